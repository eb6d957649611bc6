"""The validation part of every task: neither trained on nor tested, and what chooses weights and learning rates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layouts_of_boxes import coco_files
from regard.cli.app import run as command
from regard.core import ConfigError
from regard.lab.engine.study import Row, Setting, Study
from regard.lab.engine.tuning import tuning_runs
from regard.lab.results.layout import TUNING_SEED
from regard.lab.results.results import Results
from regard.lab.tasks.cells import Cells
from regard.lab.tasks.classification import Classification
from regard.lab.tasks.detection import Detection
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.tasks.sequences import Sequences
from regard.lab.tasks.translation import Translation
from regard.lab.tasks.validation import ValidationPart
from regard.lab.train.recipe import Recipe
from regard.mixers.softmax import Softmax
from small_masks import labels, pairs


def masks(root: Path, *splits: str, number: int = 20) -> str:
    """A folder of images with masks; those of the first split are called 100, 101, ..., of the next 200, ..."""
    numbers = tuple((split, range(100 * n, 100 * n + number)) for n, split in enumerate(splits, 1))
    return str(pairs(root, values=lambda row: labels(row, 2), splits=numbers))


def segmented(task: Segmentation, split: str) -> set[int]:
    return {int(sample.image_file.stem) for sample in task.part(split)}  # type: ignore[attr-defined]


def test_segmentation_draws_training_images(tmp_path: Path) -> None:
    task = Segmentation(host="vit_desk(patch=8)", data=masks(tmp_path, "train", "test"), size=(16, 16), val=0.25)
    train, held = segmented(task, "train"), segmented(task, "held")
    assert (len(train), len(held)) == (15, 5)
    assert train | held == set(range(100, 120))
    assert segmented(task, "test") == set(range(200, 220))
    assert segmented(replace(task, val_seed=1), "held") != held
    few = replace(task, limit=8)
    assert segmented(few, "train") | segmented(few, "held") == set(range(100, 108))
    assert len(segmented(few, "test")) == 8
    assert task.record()["train"] == 15
    validated = task.validation()
    assert (validated.split, validated.record()["test"], validated.validation()) == ("held", 5, None)


def test_segmentation_takes_images_that_the_data_reserve(tmp_path: Path) -> None:
    data = masks(tmp_path / "three", "train", "val", "test")
    task = Segmentation(host="vit_desk(patch=8)", data=data, size=(16, 16), val=0.25)
    assert segmented(task, "train") == set(range(100, 120))
    assert segmented(task, "held") == segmented(task, "val") == set(range(200, 220))
    both = Segmentation(host="vit_desk(patch=8)", data=masks(tmp_path / "two", "train", "val"), size=(16, 16), val=0.25)
    assert len(segmented(both, "held")) == 5  # "val" is the test there
    cued = Segmentation(host="vit_desk(patch=7)", data="cued-digits", size=(84, 84), val=0.1)
    assert (len(cued.part("train")), len(cued.part("held"))) == (38_400, 512)
    assert not np.array_equal(cued.part("held")[0].image, cued.part("test")[0].image)


def test_detection_draws_training_images(tmp_path: Path) -> None:
    coco_files(tmp_path, "images", "{}.json", (("train", range(12)), ("val", range(12, 24))))
    task = Detection(host="vit_desk(patch=8)", data=str(tmp_path), size=(32, 32), val=0.25)

    def found(split: str, task: Detection = task) -> set[int]:
        return {int(Path(scene.name).stem) for scene in task.part(split).scenes}

    train, held = found("train"), found("held")
    assert (len(train), len(held)) == (9, 3)
    assert train | held == set(range(12))
    assert found("val") == set(range(12, 24))
    validated = task.validation()
    assert {int(Path(scene.name).stem) for scene in validated.test_scenes()} == held
    assert found("held", replace(task, val_seed=1)) != held


def texts(root: Path, **numbers: int) -> str:
    """A folder with so many sentences of each split."""
    root.mkdir()
    for split, number in numbers.items():
        for language in ("en", "de"):
            lines = [f"{split} {language} {row}" for row in range(number)]
            (root / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    return str(root)


def test_translation_draws_or_takes_sentences(tmp_path: Path) -> None:
    task = Translation(host="translator", data=texts(tmp_path / "two", train=20, test=4), val=0.25)
    validated = task.validation()
    train, held = task.train_sentences(), validated.test_sentences()
    assert (len(train), len(held)) == (15, 5)
    assert set(train.source) | set(held.source) == {f"train en {row}" for row in range(20)}
    assert [line.split()[-1] for line in held.source] == [line.split()[-1] for line in held.target]
    assert len(task.test_sentences()) == 4
    assert task.words().text == validated.words().text
    reserved = replace(task, data=texts(tmp_path / "three", train=20, val=2, test=4))
    assert len(reserved.train_sentences()) == 20
    assert reserved.validation().test_sentences().source == ("val en 0", "val en 1")  # type: ignore[union-attr]


def test_sequences_draw_or_take_samples(tmp_path: Path) -> None:
    for split, number in (("train", 20), ("test", 4)):
        lines = [f"text {split} {row},{row % 2}" for row in range(number)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    task = Sequences(host="sequence_encoder", data=str(tmp_path), val=0.25)
    validated = task.validation()
    assert (len(task.train_split()), len(validated.test_split()), len(task.test_split())) == (15, 5, 4)
    listops = Sequences(host="sequence_encoder", data="listops-mini", val=0.25)
    assert len(listops.train_split()) == len(replace(listops, val=0.0).train_split())
    assert len(listops.validation().test_split()) > 0  # type: ignore[union-attr]


def test_boards_that_are_reserved_are_the_validation_part() -> None:
    task = Cells(host="vit_desk(patch=14)", data="digit_boards(ability=content)", val=0.1)
    assert task.validation() == replace(task, split="val")
    assert replace(task, val=0.0).validation() is None


TASKS: tuple[ValidationPart, ...] = (
    Classification(host="vit_desk(patch=2)", data="digits", size=(8, 8)),
    Segmentation(host="vit_desk(patch=7)", data="cued-digits", size=(84, 84)),
    Detection(host="vit_desk(patch=7)", data="cued-digits", size=(84, 84)),
    Translation(host="translator", data="numbers"),
    Sequences(host="sequence_encoder", data="listops-mini"),
    Cells(host="vit_desk(patch=14)", data="digit_boards(ability=content)"),
)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_learning_rates_are_chosen_on_it_in_every_task(task: Any) -> None:
    setting = Setting(
        task=task, recipe=Recipe(epochs=4, augment="none", smoothing=0.0), rows=(Row("softmax", Softmax()),)
    )
    study = Study(name="tuned", title="T", source="tests", question="?", baseline="softmax", settings={"desk": setting})
    runs = [run for _, run in tuning_runs(study, "desk")]
    assert len({run.key for run in runs}) == 3
    for run in runs:
        part: Any = run.task
        assert (part.split, part.val, part.val_seed) == (type(task).part_name, 0.1, TUNING_SEED)
        assert part.validation() is None


def test_a_part_without_samples_is_refused(tmp_path: Path) -> None:
    task = Segmentation(
        host="vit_desk(patch=8)", data=masks(tmp_path, "train", "test", number=4), size=(16, 16), val=0.1
    )
    with pytest.raises(ConfigError, match=r"val=0.1 of 4 training samples leaves none"):
        task.part("train")


def test_the_best_weights_of_a_segmenter_are_chosen_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, root = masks(tmp_path / "data", "train", "test"), str(tmp_path / "results")
    arguments = ["train", "SKA()", "--task", "segmentation", "--data", data, "--size", "16", "--host",
                 "vit_desk(patch=8, dim=16, depth=1, heads=2)", "--set", "recipe.epochs=2", "--set", "recipe.batch=4",
                 "--results", root, "--device", "cpu"]  # fmt: skip
    assert command([*arguments, "--val", "0.25", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert set(outcome["best"]) == {"step", "miou"}
    assert (Results(root).folder(outcome["key"]) / "best.ckpt").exists()
    assert command(["eval", outcome["key"], "--best", "--results", root, "--device", "cpu"]) == 0
    assert command([*arguments, "--val", "1.5"]) == 2
    assert "--val is a share between 0 and 1" in capsys.readouterr().err
