"""Run a script in this process as if the packages of the extra `lab` were not installed: SCRIPT [ARGUMENT ...]."""

import runpy
import sys

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


if __name__ == "__main__":
    sys.modules |= dict.fromkeys(HIDDEN)  # type: ignore[arg-type]  # with None there, an import fails
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
