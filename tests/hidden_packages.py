"""Run a script in this process as if the packages of the extra `lab` were not installed: SCRIPT [ARGUMENT ...]."""

import runpy
import sys
from typing import Any

HIDDEN = {
    "faster_coco_eval",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pandas",
    "psutil",
    "pyarrow",
    "sacrebleu",
    "sklearn",
    "tokenizers",
    "transformers",
}


class Hiding:
    """A finder of modules that does not find some packages."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


if __name__ == "__main__":
    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
