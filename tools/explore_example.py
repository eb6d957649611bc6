"""Write docs/explore.html, the explorer's page of a trained model of clips: `python -m tools.explore_example RUN`.

RUN is the folder of a run on `moving_digits`; that of the page is of `regard train 'Softmax()' --task video --set
recipe.epochs=6 --set task.split=held`. Beside it stands a copy with MiTA in its place and nothing learned, on the first
test clip.
"""

import sys
from dataclasses import replace
from pathlib import Path

from regard import MiTA
from regard.explorer.explore import swapped_copy
from regard.explorer.page import make_page
from regard.lab.data import moving
from regard.lab.train.load import load_user_run

FILE = Path(__file__).parents[1] / "docs" / "explore.html"


def main(run: Path) -> None:
    user = replace(load_user_run(run), label="softmax, trained")
    second = replace(swapped_copy(user, MiTA(m=(2, 2, 2), k=16)), label="with MiTA")
    page = make_page(user, {"a clip of moving_digits": moving.load().test.pixels[0]}, second)
    print(f"{page.save(FILE)}: {FILE.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
