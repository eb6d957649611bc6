"""Write docs/explore.html, the explorer's page of a trained model: `python -m tools.explore_example RESULTS`.

RESULTS has the runs of `regard study run moving --scale desk`. Shown are softmax, seed 0, and a copy with MiTA in its
place and nothing learned, on the first test clip of `moving_digits`.
"""

import sys
from dataclasses import replace
from pathlib import Path

from regard import MiTA
from regard.explorer.explore import swapped_copy
from regard.explorer.page import make_page
from regard.lab.data import moving
from regard.lab.studies.moving import DESK, STUDY
from regard.lab.train.load import load_user_run
from regard.lab.train.run import Run
from regard.mixers.softmax import Softmax

FILE = Path(__file__).parents[1] / "docs" / "explore.html"


def main(results: Path) -> None:
    run = Run(task=DESK, mixer=Softmax(), recipe=STUDY.settings["desk"].recipe)
    user = replace(load_user_run(results / run.key), label="softmax, trained")
    mixer = MiTA(m=(2, 2, 2), k=16)
    pixels = moving.load().test.pixels[0]
    page = make_page(user, {"a clip of moving_digits": pixels}, replace(swapped_copy(user, mixer), label="with MiTA"))
    print(f"{page.save(FILE)}: {FILE.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
