"""The search over plans against all plans of a small problem, and budgets as text."""

import itertools
import random

import pytest

from regard.advice.layer_costs import Usage
from regard.advice.search import (
    Budget,
    added_cost,
    additive_loss,
    as_plan,
    front,
    of_one_mechanism,
    read_budget,
    spread_out,
)
from regard.core import ConfigError
from regard.mixers.linear import Linear
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA

MIXERS = (SKA(), Linear(), Softmax())
LAYERS = ("a", "b", "c", "d")


def problem(seed: int):  # type: ignore[no-untyped-def]
    rng = random.Random(seed)
    losses = {name: {mixer: rng.random() for mixer in MIXERS} for name in LAYERS}
    costs = {
        name: {None: Usage(1.0, 1000, 1000)}
        | {mixer: Usage(rng.uniform(0.1, 1.2), rng.randrange(100, 1200), rng.randrange(100, 1200)) for mixer in MIXERS}
        for name in LAYERS
    }
    return losses, costs


@pytest.mark.parametrize("kind", ["latency", "memory", "macs"])
@pytest.mark.parametrize("seed", range(5))
def test_no_plan_is_better_than_the_front(kind: str, seed: int) -> None:
    losses, costs = problem(seed)
    choices = front(losses, costs, kind)
    assert as_plan(choices[0]) == {}
    for rows in itertools.product((None, *MIXERS), repeat=len(LAYERS)):
        choice = dict(zip(LAYERS, rows, strict=True))
        loss, cost = additive_loss(choice, losses), added_cost(choice, costs, kind)
        slack = 0.0 if kind == "memory" else 2e-3 * len(LAYERS) * (1 if kind == "latency" else 1000)
        assert any(
            additive_loss(best, losses) <= loss + 1e-9 and added_cost(best, costs, kind) <= cost + slack
            for best in choices
        )
    both = [(additive_loss(best, losses), added_cost(best, costs, kind)) for best in choices[1:]]
    assert all(loss <= later[0] and cost >= later[1] for (loss, cost), later in itertools.pairwise(both))


def test_plans_near_the_budget_are_among_those_verified() -> None:
    losses, costs = problem(0)
    choices = front(losses, costs, "latency")
    target = -0.3 * len(LAYERS)
    chosen = spread_out(choices, costs, "latency", 5, target)
    best = next(choice for choice in choices if added_cost(choice, costs, "latency") <= target)
    assert best in chosen
    assert choices[0] in chosen
    assert choices[-1] in chosen
    assert len(chosen) <= 6


def test_plans_of_one_mechanism_reach_the_budget_with_few_layers() -> None:
    losses, costs = problem(1)
    for choice in (found := of_one_mechanism(losses, costs, "latency", -0.5)):
        (mixer,) = set(choice.values()) - {None}
        assert added_cost(choice, costs, "latency") <= -0.5
        last = max(as_plan(choice), key=lambda name: losses[name][mixer] / (1 - costs[name][mixer].seconds))
        assert added_cost(choice | {last: None}, costs, "latency") > -0.5
    assert [additive_loss(choice, losses) for choice in found] == sorted(additive_loss(c, losses) for c in found)
    assert of_one_mechanism(losses, costs, "latency", -10.0) == []


def test_budgets_as_text() -> None:
    assert read_budget("latency=0.7x") == Budget("latency", 0.7)
    assert read_budget(" memory = 0.5 ") == Budget("memory", 0.5)
    for text in ("", "latency", "time=0.5x", "latency=1.5x", "latency=0x", "macs=-0.5x", "latency=nan", "x" * 200):
        with pytest.raises(ConfigError):
            read_budget(text)
