"""Schedules of the learning rate, and the mean of the last epochs' weights."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import swa_utils

from regard.core import ConfigError
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.loop import _mean_weights
from regard.lab.train.recipe import SCHEDULES, Recipe
from regard.lab.train.run import Run, canonical
from regard.mixers.softmax import Softmax
from stopped_runs import same, stop
from tiny_task import Tiny


def rates(recipe: Recipe, steps: int) -> list[float]:
    return [recipe.lr_at(step, steps) for step in range(steps)]


def test_poly_is_the_power_of_what_is_left() -> None:
    recipe = Recipe(lr=0.5, warmup=0.0, schedule="poly", power=0.9)
    assert rates(recipe, 10) == pytest.approx([0.5 * (1 - step / 10) ** 0.9 for step in range(10)])


def test_steps_divide_by_ten_at_their_milestones() -> None:
    recipe = Recipe(lr=1.0, warmup=0.0, schedule="step", milestones=(8 / 12, 11 / 12))
    assert rates(recipe, 12) == pytest.approx([1.0] * 8 + [0.1] * 3 + [0.01])


def test_rsqrt_meets_the_warmup_and_falls_by_the_root() -> None:
    recipe = Recipe(lr=1.0, warmup=0.25, schedule="rsqrt")
    values = rates(recipe, 16)
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert values[15] == pytest.approx(math.sqrt(4 / 16))
    assert values[7] == pytest.approx(math.sqrt(4 / 8))


def test_linear_ends_at_the_floor() -> None:
    values = rates(Recipe(lr=1.0, warmup=0.0, schedule="linear", floor=0.2), 5)
    assert values == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "lr"),
        ({"epochs": 0}, "epochs"),
        ({"precision": "bf16"}, "precision"),
        ({"warmup": 1.0}, "warmup"),
        ({"clip": -1.0}, "clip"),
        ({"stop_after": 21}, "stop_after"),
        ({"erasing": 1.0}, "erasing"),
        ({"cooldown": 0.9}, "cooldown"),
        ({"schedule": "stairs"}, "schedule is one of cosine, linear, poly, step, rsqrt"),
        ({"milestones": (0.5,)}, 'schedule="step", and no other, has milestones'),
        ({"schedule": "step"}, "has milestones, fractions of the steps such as 0.3,0.6,0.9"),
        ({"average": 30}, "at most 20"),
        ({"average": 2, "ema": 0.9}, "two averages"),
        ({"power": 0.0}, "power is a positive number"),
        ({"power": 3.0}, 'of schedule="poly" alone'),
    ],
)
def test_impossible_recipes_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**fields)


def test_new_fields_do_not_change_old_keys() -> None:
    assert canonical(Recipe(epochs=3)) == "Recipe(epochs=3)"


@pytest.mark.untyped
def test_equal_runs_have_equal_keys() -> None:
    assert canonical(Recipe(clip=5)) == canonical(Recipe(clip=5.0)) == "Recipe(clip=5.0)"
    assert canonical(Softmax(scale=1)) == canonical(Softmax(scale=1.0))


def test_the_cosine_rises_and_falls() -> None:
    recipe = Recipe(lr=1.0, warmup=0.1, floor=0.2)
    values = rates(recipe, 100)
    assert values[0] == 0.1
    assert max(values) == values[9] == values[10] == 1.0
    assert values[55] == pytest.approx(0.6)
    assert recipe.lr_at(100, 100) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_cooldown_has_the_lowest_rate_after_the_schedule_of_the_steps_before(schedule: str) -> None:
    milestones = (0.5,) if schedule == "step" else ()
    recipe = Recipe(lr=1.0, schedule=schedule, milestones=milestones, floor=0.01, cooldown=0.2, warmup=0.1)
    rate = rates(recipe, 100)
    assert rate[80:] == [0.01] * 20
    assert min(rate[10:80]) > 0.01
    before = replace(recipe, cooldown=0.0, warmup=10 / 80, milestones=tuple(part * 100 / 80 for part in milestones))
    assert rate[:80] == pytest.approx(rates(before, 80))


RUN = Run(task=Tiny(), recipe=Recipe(epochs=4, batch=32, augment="none", average=2))


def test_the_mean_of_the_last_epochs_is_evaluated_and_kept(tmp_path: Path) -> None:
    one, two = (
        Run(task=Tiny(), recipe=replace(RUN.recipe, average=0, stop_after=epochs if epochs < 4 else 0))
        for epochs in (3, 4)
    )
    states = []
    for run in (one, two, RUN):
        execute(run, Results(tmp_path), device="cpu")
        states.append(checkpoint.trained_weights(tmp_path / run.key))
    third, fourth, mean = states
    for name, value in mean.items():
        assert torch.allclose(value, (third[name] + fourth[name]) / 2, atol=1e-7), name


def test_integer_buffers_are_averaged_where_torch_has_foreach_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: BatchNorm counts its batches in an integer."""
    monkeypatch.setattr(swa_utils, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    mean = _mean_weights(torch.nn.BatchNorm1d(2))
    for value in (1.0, 3.0):
        model = torch.nn.BatchNorm1d(2)
        model.weight.data.fill_(value)
        mean.update_parameters(model)
    assert mean.module.weight.tolist() == [2.0, 2.0]


def test_it_resumes_with_the_same_bits(tmp_path: Path) -> None:
    execute(RUN, Results(tmp_path / "whole"), device="cpu")
    store = Results(tmp_path / "parts")
    for step in (8, 12):  # a step later: within the two epochs that are averaged
        stop(RUN, store, step)
        assert (checkpoint.load(store.folder(RUN.key)) or {})["step"] == step + 1
    execute(RUN, store, device="cpu")
    assert same(*(checkpoint.trained_weights(tmp_path / part / RUN.key) for part in ("whole", "parts")))


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (Recipe, {"epochs": 2.5}, "Recipe has epochs=2.5; a whole number is expected"),
        (Recipe, {"lr": math.nan}, "Recipe has lr=nan; a finite number is expected"),
        (Recipe, {"betas": (0.9,)}, "Recipe has betas="),
        (Recipe, {"milestones": (True,)}, "Recipe has milestones="),
        (Tiny, {"limit": "9"}, "Tiny has limit='9'; a whole number is expected"),
        (Tiny, {"split": "train"}, "Tiny has no split='train': split is test, held or val"),
        (Tiny, {"class_weights": (math.inf,)}, "Tiny has class_weights="),
        (Run, {"task": Tiny(), "seed": 2.5}, "Run has seed=2.5; a whole number is expected"),
        (Run, {"task": "digits"}, "Run has task='digits'; a Task"),
        (Run, {"task": Tiny(), "removed": 1}, "Run has removed=1; True or False is expected"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_a_field_of_another_kind_is_refused_by_name(cls: type, fields: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cls(**fields)
    assert message in str(error.value)
