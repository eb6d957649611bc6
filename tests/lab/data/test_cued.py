"""The generated cued sets: what matches, what does not, and where."""

from pathlib import Path

import numpy as np
import pytest

from regard.core import DataError
from regard.lab.data import cued
from regard.lab.data.board_images import board_images
from regard.lab.tasks.cells import Cells
from regard.lab.tasks.detection import data as scenes
from regard.lab.tasks.segmentation import data as masks

NAMES = ("cued", "cued-class", "cued-random", "cued-digits")


def slots(image: np.ndarray) -> np.ndarray:
    """The 36 slots (36, 14, 14) of an image (84, 84) or (84, 84, 1), in rows."""
    return image.reshape(6, 14, 6, 14).swapaxes(1, 2).reshape(36, 14, 14)


def made(name: str, split: str, index: int) -> cued.Canvas:
    try:
        return cued.canvas(name, split, index)
    except DataError as error:
        pytest.skip(f"needs fashion_mnist: {error}")


def test_a_canvas_depends_on_set_split_and_index_only() -> None:
    first, again = (cued.canvas("cued-digits", "train", 7) for _ in range(2))
    assert (first.image == again.image).all()
    assert (first.instances == again.instances).all()
    others = (cued.canvas("cued-digits", split, index).image for split, index in (("train", 8), ("test", 7)))
    assert all((other != first.image).any() for other in others)


@pytest.mark.parametrize("name", NAMES)
def test_thirteen_slots_are_filled_and_three_to_six_match(name: str) -> None:
    for index in range(20):
        canvas = made(name, "train", index)
        filled = slots(canvas.image).any((1, 2))
        assert filled.sum() == 13
        matching = slots(canvas.mask).any((1, 2))
        assert 3 <= matching.sum() == len(canvas.instances) <= 6
        assert filled[matching].all()


@pytest.mark.parametrize("name", ["cued", "cued-digits"])
def test_matching_items_are_the_cue_times_a_brightness(name: str) -> None:
    for index in range(20):
        canvas = made(name, "test", index)
        tiles = slots(canvas.image).astype(float)
        cue, matching = tiles[0], slots(canvas.mask).any((1, 2))
        assert not matching[0]
        near = []
        for place in range(1, 36):
            unclipped = (cue > 60) & (cue < 190)  # there noise and clipping leave the factor
            ratio = tiles[place][unclipped] / cue[unclipped]
            factor = np.median(ratio)
            near.append(0.6 < factor < 1.4 and np.abs(tiles[place] - factor * cue)[cue < 190].mean() < 12)
        assert near == matching[1:].tolist()


def test_a_random_cue_has_a_white_frame_and_is_no_match() -> None:
    places = set()
    for index in range(20):
        canvas = made("cued-random", "train", index)
        tiles = slots(canvas.image)
        framed = [
            place
            for place in range(36)
            if (tiles[place][[0, -1]] == 255).all() and (tiles[place][:, [0, -1]] == 255).all()
        ]
        assert len(framed) == 1
        assert not slots(canvas.mask)[framed[0]].any()
        places.add(framed[0])
    assert len(places) > 8


def test_boxes_are_tight_around_their_instances() -> None:
    canvas = cued.canvas("cued-digits", "test", 3)
    for (left, top, right, bottom), instance in zip(canvas.boxes.astype(int), canvas.instances, strict=True):
        inside = instance[top:bottom, left:right]
        assert inside.sum() == instance.sum()
        assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
    assert (canvas.instances.sum(0) == canvas.mask).all()


def test_training_and_test_share_no_item() -> None:
    tiles = [{tile.tobytes() for tile in cued._items("digits", split).tiles} for split in cued.COUNTS]
    assert not (tiles[0] & tiles[1]) | (tiles[0] & tiles[2]) | (tiles[1] & tiles[2])


def test_what_was_read_from_one_data_folder_is_not_shown_of_another(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached images would hide that a folder is missing, or was changed."""
    if not (data_root / "fashion_mnist").is_dir():
        pytest.skip("needs fashion_mnist below REGARD_DATA")
    readers = (
        lambda: cued.canvas("cued", "val", 0),
        lambda: board_images(True, "val", False),
        lambda: masks.load("cued", 0, 0),
        lambda: scenes.load("cued", False, "stop"),
        lambda: Cells(host="vit_desk", data="boards(ability=content)").example(),
    )
    for read in readers:
        read()
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    for read in readers:
        with pytest.raises(DataError):
            read()


def test_a_missing_data_folder_names_the_set_that_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    with pytest.raises(DataError, match="cued-digits needs no data folder"):
        cued.canvas("cued", "train", 0)
