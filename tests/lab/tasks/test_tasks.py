"""What tasks refuse: recipes that they cannot apply, and fields out of their range."""

import dataclasses
from typing import Any

import pytest

from regard.core import ConfigError
from regard.lab.tasks import Cells, Classification, Detection, Instances, Segmentation, Sequences, Task, Translation
from regard.lab.train.recipe import Recipe

RECIPE = Recipe(augment="none", smoothing=0.0)
BOXES: dict[str, Any] = {"host": "vit_desk(patch=8)", "data": "nuclei", "size": (64, 64), "strides": (8, 16)}
TASKS: dict[str, Task] = {
    "segmentation": Segmentation(host="vit_desk(patch=8)", data="camvid", size=(32, 32)),
    "detection": Detection(**BOXES),
    "instances": Instances(**BOXES),
    "sequences": Sequences(host="sequence_encoder", data="digits"),
    "translation": Translation(host="translator", data="numbers"),
    "cells": Cells(host="vit_desk(patch=14)", data="digit_boards(ability=content)"),
}
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


@every_task
@pytest.mark.parametrize("field", ["augment", "mixup", "cutmix", "erasing"])
def test_a_recipe_that_cannot_be_applied_is_refused(task: Task, field: str) -> None:
    task.check(RECIPE)
    with pytest.raises(ConfigError, match=f"{field} of --task {task.name} is one of|has no {field}: it must be 0"):
        task.check(dataclasses.replace(RECIPE, **{field: "resized" if field == "augment" else 0.5}))


def test_labels_of_boxes_are_not_smoothed() -> None:
    with pytest.raises(ConfigError, match="smoothing"):
        TASKS["detection"].check(dataclasses.replace(RECIPE, smoothing=0.1))


@pytest.mark.parametrize("task", [*TASKS.values(), Classification(host="vit_desk", data="digits", size=(8, 8))])
@pytest.mark.parametrize("fields", [{"limit": -1}, {"val": 1.0}, {"val": -0.1}, {"val_seed": -1}], ids=str)
def test_a_number_of_samples_has_a_range(task: Task, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        dataclasses.replace(task, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("segmentation", {"stride": 0.0}, "stride"),
        ("segmentation", {"scales": (2.0, 1.0)}, "scales"),
        ("segmentation", {"void": 300}, "void"),
        ("instances", {"detector": "yolo"}, "detector is one of mask, cascade_mask"),
        ("instances", {"detector": "faster"}, "detector is one of mask, cascade_mask"),
        ("instances", {"strides": (8, 32)}, "strides are each the double"),
        ("instances", {"scales": (0.0,)}, "positive"),
        ("instances", {"proposals": (5, 0)}, "proposals"),
        ("sequences", {"length": 60}, "square image here; nearest to 60: 49, 64"),
        ("sequences", {"length": -1}, "0 or more, not -1"),
        ("sequences", {"length": True}, "length"),
        ("sequences", {"data": "pathfinder-mini", "length": 100}, "length is 576, the pixels of pathfinder-mini"),
        ("translation", {"beam": 0}, "beam at least 1"),
        ("translation", {"longest": 1}, "longest is at least 2"),
        ("translation", {"target": "en"}, "two languages"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TASKS[name], **fields)
