"""Learning rates that are chosen on a validation part: of training images only, the same for all rows."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard import SKA, Factors, Softmax
from regard.core import ConfigError
from regard.images.images import Images
from regard.lab import Recipe, Row, Study
from regard.lab.engine.decide import decide
from regard.lab.engine.run_study import planned_jobs
from regard.lab.engine.study import Setting
from regard.lab.engine.table import Table, load_snapshot
from regard.lab.engine.tuning import FACTORS, choose_rates, tuning_runs, with_rates
from regard.lab.results.layout import TUNING_SEED
from regard.lab.results.results import Results
from regard.lab.studies import STUDIES, load_study
from regard.lab.train.execute import execute
from tiny_task import Tiny

ROWS = (Row("softmax", Softmax()), Row("SKA", SKA()), Row("w/o", None, control=True, removed=True),
        Row("uniform", Factors(terms="0000"), control=True))  # fmt: skip


def study(task: Tiny) -> Study:
    setting = Setting(task=task, recipe=Recipe(epochs=4, batch=16, lr=4e-3, augment="none"), rows=ROWS)
    return Study(name="tuned", title="T", source="tests", question="?", baseline="softmax", settings={"desk": setting})


@dataclass(frozen=True, kw_only=True)
class OtherTest(Tiny):
    """Another test set: its labels are permuted. What is chosen without it stays the same."""

    def test_images(self) -> Images:
        images = super().test_images()
        return images if self.split == "val" else Images(images.pixels, np.roll(images.labels, 5))


@dataclass(frozen=True, kw_only=True)
class Peeking(OtherTest):
    """A task that validates on its test images."""

    def test_images(self) -> Images:
        return dataclasses.replace(self, split="test").test_images() if self.split == "val" else super().test_images()


def scores(task: Tiny, root: Path) -> dict[str, dict[float, float | None]]:
    """The scores by which the rates of two rows are chosen."""
    runs = [(row, run) for row, run in tuning_runs(study(task), "desk") if row.label in ("softmax", "w/o")]
    for _, run in runs:
        execute(run, Results(root), device="cpu")
    return {label: dict(tuned.scores) for label, tuned in choose_rates(runs, Results(root), "top1").items()}


def test_rates_do_not_depend_on_the_test_images(tmp_path: Path) -> None:
    """A row that peeks at test images is found by other labels of these: its scores change."""
    honest = scores(Tiny(), tmp_path / "a")
    assert scores(OtherTest(), tmp_path / "b") == honest
    assert scores(Peeking(), tmp_path / "c") != honest


def test_all_rows_try_the_same_rates_with_half_the_epochs_and_one_seed() -> None:
    runs = tuning_runs(study(Tiny()), "desk")
    assert len(runs) == len(ROWS) * len(FACTORS)
    rates = {row.label: [run.recipe.lr for other, run in runs if other == row] for row in ROWS}
    assert set(map(tuple, rates.values())) == {(2e-3, 4e-3, 8e-3)}
    assert {(run.recipe.epochs, run.seed) for _, run in runs} == {(2, TUNING_SEED)}
    assert {run.task.split for _, run in runs if isinstance(run.task, Tiny)} == {"val"}
    assert not any(job.probes for job in planned_jobs(study(Tiny()), "desk", runs))  # no page shows their maps


def test_a_tuned_rate_is_that_of_the_runs_and_tuning_starts_from_the_setting() -> None:
    plain = study(Tiny())
    rows = tuple(replace(row, rate=1e-3) if row.label == "SKA" else row for row in ROWS)
    shipped = replace(plain, settings={"desk": replace(plain.setting("desk"), rows=rows)})
    rates = {row.label: run.recipe.lr for row, run in shipped.runs("desk", seeds=1)}
    assert rates == {"softmax": 4e-3, "SKA": 1e-3, "w/o": 4e-3, "uniform": 4e-3}
    assert [run.key for _, run in tuning_runs(shipped, "desk")] == [run.key for _, run in tuning_runs(plain, "desk")]
    assert shipped.elsewhere("desk", data="digits-canvas").setting("desk").rows == ROWS
    assert shipped.elsewhere("desk", data=Tiny().data).setting("desk").rows == rows  # nothing changes


def test_the_quickstart_ships_rates_that_tuning_can_choose() -> None:
    quickstart = load_study("quickstart")
    rates = {run.recipe.lr for _, run in tuning_runs(quickstart, "desk")}
    assert {row.rate for row in quickstart.rows("desk")} <= rates
    assert all(row.rate is None for row in quickstart.rows("smoke"))


@pytest.mark.parametrize("data", ["digits", "digits-canvas"])
def test_the_parts_have_no_image_in_common(data: str) -> None:
    size = (12, 12) if data == "digits-canvas" else (8, 8)
    whole = Tiny(data=data, size=size)
    task = replace(whole, val=0.25, val_seed=3)
    part = task.validation()
    assert part.validation() is None
    rows = task.divide(128)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(128))
    assert (len(task.train_images()), len(part.test_images())) == (96, 32)
    assert len(task.test_images()) == len(whole.test_images())
    assert part.test_images().pixels.shape[1:3] == size
    assert not np.array_equal(replace(task, val_seed=4).divide(128)[1], rows[1])
    assert task.record()["train"] == 96


@pytest.mark.parametrize("fields", [{"val": 1.0}, {"split": "val"}, {"val": -0.1}, {"val": 0.1, "val_seed": -1}])
def test_impossible_parts_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="val is a share|needs a share"):
        Tiny(**fields)
    with pytest.raises(ConfigError, match="leaves none"):
        Tiny(limit=4, val=0.1).train_images()


def peeking_rows(study: Study) -> list[str]:
    """Rows that are scored on, or trained on, another part of the images than the setting says."""

    def parts(task: Any) -> list[Any]:
        return [getattr(task, part, None) for part in ("split", "val", "limit")]

    rows = [(setting, row) for setting in study.settings.values() for row in setting.rows]
    return [row.label for setting, row in rows if parts(setting.task_of(row)) != parts(setting.task)]


@pytest.mark.parametrize("name", STUDIES)
def test_no_row_of_a_study_chooses_its_images(name: str) -> None:
    assert peeking_rows(load_study(name)) == []


def test_a_row_with_other_images_is_found() -> None:
    honest = study(Tiny())
    planted = replace(ROWS[1], task={"split": "val", "val": 0.5})
    setting = replace(honest.setting("desk"), rows=(ROWS[0], planted, *ROWS[2:]))
    assert peeking_rows(replace(honest, settings={"desk": setting})) == ["SKA"]


def test_the_best_rate_is_the_rows_and_a_failed_run_is_no_choice(tmp_path: Path) -> None:
    store, whole = Results(tmp_path), study(Tiny())
    runs = [(row, run) for row, run in tuning_runs(whole, "desk") if row.label in ("softmax", "SKA")]
    for (_, run), score in zip(runs, (50.0, None, 70.0, None, 60.0, None), strict=True):
        metrics = {} if score is None else {"top1": score}
        store.finish(run.key, {"status": "done" if metrics else "failed", "metrics": metrics})
    tuned = choose_rates(runs, store, "top1")
    assert (tuned["softmax"].rate, tuned["SKA"].rate) == (4e-3, 4e-3)
    other = {**tuned, "softmax": replace(tuned["softmax"], rate=8e-3)}
    rows = {row.label: row for row in with_rates(whole, "desk", other).rows("desk")}
    run = with_rates(whole, "desk", other).run("desk", rows["softmax"], 0)
    assert run.recipe.lr == 8e-3
    assert rows["SKA"].notes[-1].startswith("Learning rate 0.004, the setting's own (0.002: failed")
    same = with_rates(whole, "desk", other).run("desk", rows["SKA"], 0)
    assert same.key == whole.run("desk", ROWS[1], 0).key  # the setting's own rate is the run of before


@pytest.mark.slow
def test_a_study_is_tuned_before_it_is_decided(tmp_path: Path) -> None:
    store = Results(tmp_path)
    decide(study(Tiny(limit=64)), "desk", store, workers=0, rows="*")
    snapshot = load_snapshot(tmp_path, "tuned", "desk")
    assert {0, 1, 2} <= (seeds := {run["seed"] for run in snapshot["runs"]})
    assert TUNING_SEED not in seeds
    assert sum("Learning rate" in note for note in Table.load(tmp_path, "tuned", "desk").notes) == len(ROWS)
    ended = len(list(tmp_path.glob("*/outcome.json")))
    assert ended == len(ROWS) * len(FACTORS) + len(snapshot["runs"])
    assert decide(study(Tiny(limit=64)), "desk", store, workers=0, rows="*").counts == {}
    assert len(list(tmp_path.glob("*/outcome.json"))) == ended


def test_rates_are_not_judged_on_images_that_the_start_has_learned() -> None:
    """The networks that rows start or learn from leave out the same part, where they learn from the same data."""
    plain = study(Tiny())
    rows = (Row("started", SKA(), start=Row("first", Softmax())), *plain.settings["desk"].rows)
    needs = 0
    for _, run in tuning_runs(replace(plain, settings={"desk": replace(plain.settings["desk"], rows=rows)}), "desk"):
        assert run.task.val == 0.1  # type: ignore[attr-defined]
        needs += len(run.needs())
        for needed in run.needs():
            assert (needed.task.val, needed.task.val_seed) == (run.task.val, run.task.val_seed)  # type: ignore[attr-defined]
    assert needs == 3
