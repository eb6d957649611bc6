"""Boards: pure, disjoint, balanced, and answered completely by reading them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regard.core import ConfigError, DataError
from regard.lab.data.board_images import board_images
from regard.lab.data.boards import (
    ABILITIES,
    CELL,
    HALF,
    NAMES,
    NOTHING,
    REACH,
    STEPS,
    Boards,
    boards,
    checksum,
    place_codes,
    question_mark,
    read_boards,
    step_codes,
)
from regard.lab.tasks.cells import Cells

NUMBER = 96
QUESTION = question_mark()[:, :HALF]


def board_set(ability: str, **options: int | float) -> str:
    more = "".join(f", {name}={value}" for name, value in options.items())
    return f"digit_boards(ability={ability}{more})"


def made(ability: str, split: str = "test", seed: int = 0, **options: int | float) -> Boards:
    return boards(read_boards(board_set(ability, **options)), split, seed, 0, NUMBER)


def cells_of(image: np.ndarray) -> np.ndarray:
    """The cells of an image (H, W, frames) in rows, frame by frame, (n, 14, 14) float."""
    side = image.shape[0] // CELL
    apart = image.reshape(side, CELL, side, CELL, -1).transpose(4, 0, 2, 1, 3)
    return apart.reshape(-1, CELL, CELL).astype(np.float64)


class Reader:
    """Answers a board from its pixels alone: digits by their images, garments by correlation, codes by equality."""

    def __init__(self, ability: str, side: int) -> None:
        self.ability, self.side = ability, side
        pools = board_images(False, "test", False).digits
        self.digits = {tile.astype(np.uint8).tobytes(): label for label, pool in enumerate(pools) for tile in pool}
        self.places = {code.astype(np.uint8).tobytes(): index for index, code in enumerate(place_codes(side))}
        self.steps = {code.astype(np.uint8).tobytes(): step for code, step in zip(step_codes(), STEPS, strict=True)}

    def digit(self, cell: np.ndarray) -> int | None:
        return self.digits.get(cell[:, HALF:].astype(np.uint8).tobytes())

    def answers(self, image: np.ndarray) -> list[int]:
        cells = cells_of(image)
        return [NOTHING if (answer := self.answer(cells, at)) is None else answer for at in range(len(cells))]

    def answer(self, cells: np.ndarray, at: int) -> int | None:
        cell, code = cells[at], cells[at].astype(np.uint8).tobytes()
        if self.ability in ("place", "hops"):
            if code not in self.places:
                return None
            for _ in range(2):  # steps; `place` needs one
                at = self.places.get(cells[at].astype(np.uint8).tobytes(), at)
            return self.digit(cells[at])
        if self.ability == "offset":
            if code not in self.steps:
                return None
            down, across = self.steps[code]
            return self.digit(cells[at + down * self.side + across])
        if self.ability == "motion":
            if self.digit(cell) is not None or not cell.any():
                return None
            first = [c for c in range(self.side**2) if self.digit(cells[c]) is not None]
            alike = sorted(first, key=lambda c: alikeness(cell, cells[c]))[-2:]
            steps = np.subtract(np.divmod(alike, self.side), np.divmod([at % self.side**2] * 2, self.side))
            return self.digit(cells[alike[int(np.abs(steps).max(0).argmin())]])
        asks = (cell[:, HALF:] == QUESTION).all()
        if self.ability == "salience":
            bright = [c[:, :HALF].mean() if self.digit(c) is not None else -1 for c in cells]
            return (
                self.digit(cells[int(np.argmax(bright))])
                if code == question_mark().astype(np.uint8).tobytes()
                else None
            )
        if self.ability == "content":
            if self.digit(cell) is not None or not cell.any():
                return None
            alike = [alikeness(cell, c) if self.digit(c) is not None else -1 for c in cells]
            return self.digit(cells[int(np.argmax(alike))])
        matches = sum(alikeness(cell, c) > 0.998 for c in cells if not c[:, HALF:].any() and c.any())
        return matches if asks else None


def alikeness(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two left halves where neither is white, which brightness does not change."""
    x, y = a[:, :HALF], b[:, :HALF]
    grey = (x < 255) & (y < 255)
    x, y = x[grey], y[grey]
    return float((x * y).sum() / max(np.sqrt((x**2).sum() * (y**2).sum()), 1e-9))


@pytest.mark.parametrize("side", [6, 7])
@pytest.mark.parametrize("ability", ABILITIES)
def test_reading_a_board_answers_it(ability: str, side: int) -> None:
    """Every asking cell has one right answer, which is on the board; cells that do not ask have none."""
    seen, reader = made(ability, noise=0, side=side), Reader(ability, side)
    wrong = sum(
        reader.answers(image) != answers.ravel().tolist()
        for image, answers in zip(seen.images[:12], seen.answers, strict=False)
    )
    assert wrong == 0


@pytest.mark.parametrize("ability", ABILITIES)
def test_a_board_is_a_pure_function_of_set_split_seed_and_index(ability: str) -> None:
    data = read_boards(board_set(ability))
    whole, part = boards(data, "train", 3, 0, 100), boards(data, "train", 3, 50, 90)
    assert (part.images == whole.images[50:90]).all()
    assert (part.answers == whole.answers[50:90]).all()
    assert (boards(data, "train", 4, 0, 100).images != whole.images).any((1, 2, 3)).all()
    assert (boards(data, "test", 4, 0, 100).images == boards(data, "test", 3, 0, 100).images).all()
    assert (boards(data, "val", 0, 0, 100).images != boards(data, "test", 0, 0, 100).images).any((1, 2, 3)).all()


@pytest.mark.parametrize("garments", [False, True], ids=["digits", "garments"])
def test_no_image_is_in_two_splits(garments: bool) -> None:
    if garments and not Path(os.environ.get("REGARD_DATA", ""), "fashion_mnist").is_dir():
        pytest.skip("needs fashion_mnist below REGARD_DATA")
    splits = [board_images(garments, split, False) for split in ("train", "val", "test")]
    shown = [{tile.tobytes() for tile in tiles.shown} for tiles in splits]
    digits = [{tile.tobytes() for pool in tiles.digits for tile in pool} for tiles in splits]
    for sets in (shown, digits):
        assert not sets[0] & sets[1]
        assert not sets[0] & sets[2]
        assert not sets[1] & sets[2]
    assert all(len(names) == len(tiles.shown) for names, tiles in zip(shown, splits, strict=True))


@pytest.mark.parametrize("ability", ABILITIES)
def test_every_answer_is_equally_frequent(ability: str) -> None:
    seen = made(ability, split="train")
    data = read_boards(board_set(ability))
    asked = seen.answers[seen.answers != NOTHING]
    assert ((seen.answers != NOTHING).sum((1, 2)) == data.asking).all()
    counts = np.bincount(asked, minlength=data.classes)
    assert len(counts) == data.classes
    if ability == "compare":  # exactly half of each board
        assert ((seen.answers == 1).sum((1, 2)) == data.asking // 2).all()
    # answers of a board can depend on each other; with salience all are one
    independent = NUMBER if ability == "salience" else counts.sum() / 2
    share = 1 / data.classes
    assert (abs(counts / counts.sum() - share) < 4 * np.sqrt(share * (1 - share) / independent)).all()


def test_counts_are_exactly_balanced_where_they_can_be() -> None:
    seen = made("count", pairs=8)
    for number in range(4):
        assert ((seen.answers == number).sum((1, 2)) == 2).all()


@pytest.mark.parametrize(
    ("ability", "moved"), [("content", 0), ("salience", 0), ("count", 0), ("place", 1), ("offset", 1)]
)
def test_only_places_depend_on_the_order_of_cells(ability: str, moved: int) -> None:
    """Shuffled cells keep their answers where content decides; a network without positions loses nothing there."""
    seen, reader, rng = made(ability, noise=0), Reader(ability, 6), np.random.default_rng(0)
    kept = asked = 0
    for image, answers in zip(seen.images[:16], seen.answers, strict=False):
        order = rng.permutation(36)
        cells = cells_of(image)[order].astype(np.uint8)
        shuffled = cells.reshape(6, 6, CELL, CELL).swapaxes(1, 2).reshape(84, 84, 1)
        truth = answers.ravel()[order]
        where = np.flatnonzero(truth != NOTHING)
        if ability == "offset":  # only cells from where the step stays on the board
            where = [at for at in where if _stays(reader, cells[at], int(at))]
        read = [reader.answer(cells_of(shuffled), int(at)) for at in where]
        kept += sum(a == b for a, b in zip(read, truth[where], strict=True))
        asked += len(read)
    assert (kept < asked / 2) if moved else (kept == asked)


def _stays(reader: Reader, cell: np.ndarray, at: int) -> bool:
    down, across = reader.steps[cell.tobytes()]
    return 0 <= at // 6 + down < 6 and 0 <= at % 6 + across < 6


def test_steps_stay_within_reach() -> None:
    assert len(STEPS) == len(set(STEPS)) == (2 * REACH + 1) ** 2 - 1
    assert len({code.tobytes() for code in step_codes()}) == len(STEPS)
    assert len({code.tobytes() for code in place_codes(12)}) == 144


@pytest.mark.parametrize("name", NAMES)
def test_a_spelling_is_read_and_written(name: str) -> None:
    text = f"{name}(ability=content, pairs=16)"
    assert str(read_boards(text)) == text
    assert str(read_boards(f' {name}( ability = "content", pairs=10, noise=0.1)')) == f"{name}(ability=content)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boards", "needs an ability"),
        ("boards(ability=contents)", "no ability 'contents'; did you mean"),
        ("boards(ability=content, pair=3)", "has no 'pair'; it has"),
        ("boards(ability=content, pairs=19)", "2 to 18 pairs for content, not 19"),
        ("boards(ability=content, side=1)", "2 to 32 cells"),
        ("boards(ability=content, noise=2)", "0 to 1, not 2"),
        ("boards(ability=content", "cannot read the boards"),
        ("chess", "is no set of boards"),
    ],
)
def test_a_wrong_spelling_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_boards(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.untyped
def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match="pairs=2.5; a whole number"):
        read_boards("boards(ability=content, pairs=2.5)")


def test_both_sets_have_checksums_of_their_own() -> None:
    sums = {checksum(read_boards(board_set(ability))) for ability in ABILITIES}
    assert len(sums) == len(ABILITIES)


def test_boards_that_show_more_images_than_the_test_has_are_refused_before_training() -> None:
    task = Cells(data="digit_boards(ability=compare, side=32, pairs=201)", host="vit_desk(patch=14)")
    with pytest.raises(DataError, match=r'shows 402 different images on a board, and its split "test" has 400'):
        task.record()
    few = replace(task, data="digit_boards(ability=content, side=16, pairs=101)")
    assert few.record()["test"]
    with pytest.raises(DataError, match='split "val" has 100'):
        replace(few, val=0.1).record()


def test_one_noise_is_one_set() -> None:
    whole, part = (read_boards(f"digit_boards(ability=content, noise={noise})") for noise in ("0", "0.0"))
    assert str(whole) == str(part)


def test_a_board_that_holds_no_pairs_says_so() -> None:
    with pytest.raises(ConfigError, match="2 x 2 cells are too small for count"):
        read_boards("digit_boards(ability=count, side=2)")
    with pytest.raises(ConfigError, match="4 x 4 cells are too small for motion"):
        read_boards("digit_boards(ability=motion, side=4)")
