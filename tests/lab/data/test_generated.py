"""What generators make, and that a change of it changes the keys of runs."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regard.images.streams import generator
from regard.lab.data import boards, generated, moving
from regard.lab.data.catalog import digits
from regard.lab.data.cued import CUED, canvas
from regard.lab.data.generated import REVISIONS
from regard.lab.tasks import TASKS as KINDS
from regard.lab.tasks import Task
from regard.lab.tasks.sequences import listops, matching, pathfinder
from regard.lab.tasks.translation.numbers_text import number_sentences
from regard.lab.train.run import Run

SETS = {
    "digits-canvas": "classification",
    "cued": "segmentation",
    "cued-digits": "detection",
    "listops-mini": "sequences",
    "matching-mini": "sequences",
    "pathfinder": "sequences",
    "numbers": "translation",
    "digit_boards(ability=content)": "cells",
    "moving_digits": "video",
}
"""A task for each place where the data of a key are named."""


def task_on(data: str) -> Task:
    kind: Any = next(kind for kind in KINDS if kind.name == SETS[data])
    size = {"size": (28, 28) if data == moving.NAME else (12, 12)} if "size" in kind.__dataclass_fields__ else {}
    return kind(host="vit_desk(patch=14)", data=data, **size)


@pytest.mark.parametrize("data", SETS)
def test_a_run_on_another_revision_of_a_set_has_another_key(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(task=task_on(data))
    before = replace(run).key
    assert run.task.identity().data == data  # as in the keys of versions without revisions
    name, mark, options = data.partition("(")
    monkeypatch.setitem(generated.REVISIONS, name, 2)
    assert run.task.identity().data == f"{name}@2{mark}{options}"
    assert run.key != before


def _scenes(name: str) -> bytes:
    spec, rng = pathfinder.PATHFINDER[name], generator("test")
    scenes = [pathfinder.scene(rng, spec) for _ in range(2)]
    return b"".join(np.asarray(scene.dots).round(3).tobytes() + bytes([scene.label]) for scene in scenes)


def _trees(name: str) -> bytes:
    trees = listops.samples(listops.LISTOPS[name], "test", 3)
    return trees.tokens.symbols.tobytes() + trees.labels.tobytes()


def _canvases(name: str) -> bytes:
    items = [canvas(name, split, index) for split in ("train", "test") for index in range(3)]
    return b"".join(item.image.tobytes() + item.mask.tobytes() for item in items)


def _boards(name: str) -> bytes:
    made = [
        boards.boards(boards.read_boards(f"{name}(ability={ability})"), split, 0, 0, 2)
        for ability in boards.ABILITIES
        for split in ("train", "test")
    ]
    return b"".join(board.images.tobytes() + board.answers.tobytes() for board in made)


MADE: dict[str, tuple[Callable[[], bytes], str]] = {
    "digits-canvas": (lambda: digits(canvas=(12, 12)).test.pixels.tobytes(), "1: 93d553b0d004"),
    "cued-digits": (lambda: _canvases("cued-digits"), "1: 3ef627678c73"),
    "listops": (lambda: _trees("listops"), "1: 6e9dda65357d"),
    "listops-mini": (lambda: _trees("listops-mini"), "1: 71aa3e613734"),
    "matching-mini": (lambda: matching.samples("test", 3).tokens.symbols.tobytes(), "1: 484cf0a92e7b"),
    "pathfinder": (lambda: _scenes("pathfinder"), "1: d7f33773e06e"),
    "pathfinder-9": (lambda: _scenes("pathfinder-9"), "1: c6da341446fe"),
    "pathfinder-mini": (lambda: _scenes("pathfinder-mini"), "1: b3b429fd4842"),
    "digit_boards": (lambda: _boards("digit_boards"), "1: ee76e524f5b5"),
    "moving_digits": (lambda: moving.load().test.pixels[:3].tobytes(), "1: ec19653cd888"),
    "numbers": (lambda: repr(number_sentences(50)).encode(), "1: e19deb5ffcf3"),
}
"""Of each set without a data folder: samples as bytes; the revision, and 12 digits of the SHA-256 of the samples."""


@pytest.mark.parametrize("name", MADE)
def test_generators_make_what_they_made_when_their_revision_was_set(name: str) -> None:
    make, digest = MADE[name]
    made = f"{REVISIONS[name]}: {hashlib.sha256(make()).hexdigest()[:12]}"
    assert made == digest, f"{name} has changed: raise its number in regard/tasks/data/generated.py, and write it here"


def test_every_generated_set_has_a_revision() -> None:
    sequences = {*listops.LISTOPS, *pathfinder.PATHFINDER, matching.NAME}
    names = {"digits-canvas", *CUED, *sequences, *boards.NAMES, "numbers", moving.NAME}
    assert REVISIONS.keys() == names
