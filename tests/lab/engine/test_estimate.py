"""Estimates: from timed steps before a run exists, from finished runs afterwards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard import Softmax
from regard.files.cache import read_entries, write_entries
from regard.lab.engine import estimate as module
from regard.lab.engine.dry_run import dry_run
from regard.lab.engine.estimate import Speed, estimate, hours, machine
from regard.lab.engine.study import Row
from regard.lab.results.results import Results
from regard.lab.tasks import Classification

from lab.engine.test_study import ROWS, STUDY  # isort: skip


def test_every_row_is_timed_once_and_kept(tmp_path: Path) -> None:
    told: list[str] = []
    store = Results(tmp_path)
    first = estimate(STUDY, "smoke", store, 1, told.append)
    assert told == ["softmax", "w/o"]
    assert all(0 < first[label, 0] < 60 for label in told)
    assert estimate(STUDY, "smoke", store, 1, told.append) == first
    assert len(told) == 2
    assert list(read_entries(tmp_path / "estimates.json")) == [machine(1)]
    estimate(STUDY, "smoke", store, 64, told.append)
    assert len(told) == (2 if machine(64) == machine(1) else 4)


def test_seconds_are_steps_and_evaluations() -> None:
    """64 images in batches of 32 over 1 epoch: 2 steps; 64 test images, evaluated once within and once at the end."""
    run = STUDY.run("smoke", ROWS[0], 0)
    assert run.task.sample_counts() == (64, 64)
    assert module.run_seconds(run, Speed(10.0, 0.5), 64, 64) == 2 * 10 + 2 * 64 * 0.5
    many = replace(run, recipe=replace(run.recipe, epochs=40, accumulate=2))
    assert module.run_seconds(many, Speed(10.0, 0.5), 64, 64) == 40 * 1 * 10 + 11 * 64 * 0.5


def test_times_kept_for_this_machine_are_used(tmp_path: Path) -> None:
    keys = [STUDY.run("smoke", row, 0).key for row in ROWS]
    write_entries(tmp_path / "estimates.json", {machine(2): {key: {"step": 1.0, "image": 0.0} for key in keys}})
    assert estimate(STUDY, "smoke", Results(tmp_path), 2) == {("softmax", 0): 2.0, ("w/o", 0): 2.0}


def test_finished_runs_know_better(tmp_path: Path) -> None:
    store = Results(tmp_path)
    guess = {("softmax", 0): 7200.0, ("w/o", 0): 3600.0}
    assert hours(STUDY, "smoke", store, guess, 1) == (6.0, 6.0)
    assert hours(STUDY, "smoke", store, guess, 2) == (3.0, 3.0)
    done = STUDY.run("smoke", ROWS[0], 0)
    store.finish(done.key, {"status": "done", "metrics": {"top1": 1.0}, "seconds": 1800.0})
    assert hours(STUDY, "smoke", store, guess, 1) == (3.0, 2.5)
    assert hours(STUDY, "smoke", store, {}, 1) == (2.0, 1.5)  # the other row as this one


def test_what_rows_start_and_learn_from_is_counted_once(tmp_path: Path) -> None:
    """Each seed has a start of its own; both rows have one teacher, which is not a row."""
    rows = [replace(row, start=replace(row, recipe={"lr": 1e-4})) for row in ROWS]
    teacher = Row("teacher", Softmax(), recipe={"epochs": 2})
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), rows=(rows[0], ROWS[1]))})
    seeds = len(STUDY.setting("smoke").numbers)
    store = Results(tmp_path)
    timed = estimate(study, "smoke", store, 1)
    assert set(timed) == {("softmax", 0), ("softmax", 1), ("w/o", 0)}
    guess = {("softmax", 0): 3600.0, ("softmax", 1): 36000.0, ("w/o", 0): 360.0}
    assert hours(study, "smoke", store, guess, 1) == pytest.approx((11.1 * seeds, 11.1 * seeds))
    (start,) = study.run("smoke", rows[0], 0).needs()
    store.finish(start.key, {"status": "done", "metrics": {"top1": 1.0}, "seconds": 7200.0})
    assert hours(study, "smoke", store, guess, 1) == pytest.approx((3.1 * seeds, 3.1 * seeds - 2))
    taught = tuple(replace(row, teacher=teacher) for row in ROWS)
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), rows=taught)})
    guess = {("softmax", 0): 3600.0, ("w/o", 0): 3600.0, ("softmax", 1): 36000.0}
    assert hours(study, "smoke", store, guess, 1)[0] == pytest.approx(12 * seeds)


def test_a_row_that_cannot_be_built_is_left_out(tmp_path: Path) -> None:
    rows = (*ROWS, Row("none", None, host="no_such_host"))
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), rows=rows)})
    assert set(estimate(study, "smoke", Results(tmp_path), 1)) == {("softmax", 0), ("w/o", 0)}


@pytest.mark.parametrize("augment", ["crop", "shift", "timm:rand-m9-mstd0.5"])
def test_augmentation_and_half_precision_are_timed(augment: str) -> None:
    run = STUDY.run("smoke", ROWS[0], 0)
    run = replace(run, recipe=replace(run.recipe, augment=augment, precision="bf16-mixed", accumulate=2))
    speed = module.measure(run)
    assert speed.step > 0
    assert speed.image > 0


def test_models_and_their_inputs_are_timed_where_they_would_be_trained() -> None:
    """Inputs and targets, in whatever structure, follow the model."""

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor, targets: list[dict[str, torch.Tensor]], *, more: torch.Tensor) -> list[str]:
            return [each.device.type for each in (x, targets[0]["boxes"], more)]

    arguments = torch.zeros(2), [{"boxes": torch.zeros(3)}]
    for name in ("cpu", "meta"):
        model = Seen()
        module.put_on(model, torch.device(name))
        assert model(*arguments, more=torch.zeros(1)) == [name] * 3


def test_times_of_a_gpu_are_not_those_of_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(1)
    monkeypatch.setattr(module, "resolved_device", lambda device: "mps")
    assert machine(1) == f"{here}, mps"


def test_what_is_timed_is_what_runs_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a host whose spelling names classes of its own, and weights, which the real run alone needs."""
    fetched: list[str] = []
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: fetched.append("weights"))
    host = "vit_tiny_patch16_224(pretrained=True, num_classes=5, depth=1, img_size=32)"
    task = Classification(host=host, data="digits", size=(32, 32), init="host")
    rows = (Row("softmax", Softmax()),)
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), task=task, rows=rows)})
    assert [row.error for row in dry_run(study, "smoke")] == [""]
    assert set(estimate(study, "smoke", Results(tmp_path), 1)) == {("softmax", 0)}
    assert fetched == []
    assert task.build(Softmax(), 10, 1).num_classes == 10
    assert fetched == ["weights"]
