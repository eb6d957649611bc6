"""Search: which mechanism at which layer, within a budget, by an additive model of what each change loses and costs."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regard.core import ConfigError, MixerConfig, check_known
from regard.core.validation import check_fields, short_repr

from .layer_costs import OWN, Costs, Usage

KINDS = ("latency", "memory", "macs")
Choice = Mapping[str, MixerConfig | None]
"""Layer -> its mechanism; None is the model's own attention."""
STEPS = 2000
"""Of costs in the search: a plan costs at most layers / STEPS of the largest cost more than it is counted."""


@dataclass(frozen=True)
class Budget:
    """At most `share` of what the model costs with its own attention. kind: latency, memory or macs."""

    kind: str = "latency"
    share: float = 0.8

    def __post_init__(self) -> None:
        check_fields(self)
        check_known(self.kind, KINDS, f"a budget is of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0 < self.share < 1:
            raise ConfigError(f"a budget is a share between 0 and 1, such as latency=0.7x, not {self.share}")

    def __str__(self) -> str:
        return f"{self.kind}={self.share:g}x"


def read_budget(text: str) -> Budget:
    """The budget of "latency=0.7x". Raises: ConfigError."""
    match = re.fullmatch(r"\s*([a-z]+)\s*=\s*([0-9]*\.?[0-9]+)x?\s*", text) if len(text) < 100 else None
    if match is None:
        expected = "latency=0.7x, memory=0.5x or macs=0.6x, shares of what the model needs now"
        raise ConfigError(f"{short_repr(text)} is no budget; expected {expected}")
    return Budget(match[1], float(match[2]))


def cost_of(usage: Usage, kind: str) -> float:
    """The number of a usage that a budget is about; memory that is not known counts as none."""
    return {"latency": usage.seconds, "memory": float(usage.memory or 0), "macs": float(usage.macs)}[kind]


def added_cost(choice: Choice, costs: Costs, kind: str) -> float:
    """What the layers of a choice cost more than the model's own: the sum, of memory the difference of the peaks."""
    chosen = {name: cost_of(costs[name][mixer], kind) for name, mixer in choice.items()}
    own = {name: cost_of(usage[OWN], kind) for name, usage in costs.items()}
    if kind == "memory":
        return max(chosen.values()) - max(own.values())
    return math.fsum(cost - own[name] for name, cost in chosen.items())


def additive_loss(choice: Choice, losses: Mapping[str, Mapping[MixerConfig, float]]) -> float:
    """The sum of what each change loses alone."""
    return math.fsum(losses[name][mixer] for name, mixer in choice.items() if mixer is not OWN)


def front(losses: Mapping[str, Mapping[MixerConfig, float]], costs: Costs, kind: str) -> list[Choice]:
    """The choices that lose least for their cost, the model's own attention first, the cheapest last.

    losses: of each layer and mechanism alone; only mechanisms in both tables are chosen. For sums, a knapsack over the
    layers with costs in `STEPS` steps; for memory, whose peak is that of one layer, every bound on a layer's peak.
    """
    options = {
        name: [(0.0, cost_of(costs[name][OWN], kind), OWN), *_useful(losses.get(name, {}), costs[name], kind)]
        for name in costs
    }
    choices = _by_bound(options) if kind == "memory" else _by_sum(options)
    rated = [(added_cost(choice, costs, kind), additive_loss(choice, losses), choice) for choice in choices]
    kept: list[Choice] = []
    least = math.inf
    for _, loss, choice in sorted(rated, key=lambda item: (item[0], item[1])):
        if loss < least and as_plan(choice):
            kept.append(choice)
            least = loss
    return [dict.fromkeys(costs, OWN), *kept[::-1]]


_Options = dict[str, list[tuple[float, float, MixerConfig | None]]]


def _useful(
    losses: Mapping[MixerConfig, float], costs: Mapping[MixerConfig | None, Usage], kind: str
) -> list[tuple[float, float, MixerConfig | None]]:
    """(loss, cost, mechanism) of those that are cheaper than the layer's own attention and give numbers."""
    own = cost_of(costs[OWN], kind)
    return [
        (loss, cost_of(costs[mixer], kind), mixer)
        for mixer, loss in losses.items()
        if mixer in costs and cost_of(costs[mixer], kind) < own and math.isfinite(loss)
    ]


def _by_sum(options: _Options) -> Sequence[Choice]:
    """For every total cost the choice with the least loss."""
    names = list(options)
    low = {name: min(cost for _, cost, _ in rows) for name, rows in options.items()}
    spread = sum(max(cost for _, cost, _ in rows) - low[name] for name, rows in options.items())
    if spread <= 0:
        return [dict.fromkeys(names, OWN)]
    width = spread / STEPS
    best = np.zeros(STEPS + len(names) + 1)
    taken = []
    for name in names:
        steps = [int(np.ceil((cost - low[name]) / width - 1e-9)) for _, cost, _ in options[name]]
        shifted = np.full((len(steps), len(best)), np.inf)
        for row, (step, (loss, _, _)) in enumerate(zip(steps, options[name], strict=True)):
            if step < len(best):
                shifted[row, step:] = best[: len(best) - step] + max(loss, 0.0)
        taken.append((shifted.argmin(0), steps))
        best = shifted.min(0)
    return [_backtrack(names, options, taken, total) for total in range(len(best)) if np.isfinite(best[total])]


def _backtrack(names: list[str], options: _Options, taken: list[tuple[np.ndarray, list[int]]], total: int) -> Choice:
    choice: dict[str, MixerConfig | None] = {}
    for name, (rows, steps) in zip(reversed(names), reversed(taken), strict=True):
        row = int(rows[total])
        choice[name] = options[name][row][2]
        total -= steps[row]
    return {name: choice[name] for name in names}


def _by_bound(options: _Options) -> Sequence[Choice]:
    """For every bound on the cost of one layer the choice with the least loss."""
    choices = []
    for bound in sorted({cost for rows in options.values() for _, cost, _ in rows}):
        within = {name: [row for row in rows if row[1] <= bound] for name, rows in options.items()}
        if all(within.values()):
            choices.append({name: min(rows, key=lambda row: (row[0], row[1]))[2] for name, rows in within.items()})
    return choices


def spread_out(choices: Sequence[Choice], costs: Costs, kind: str, number: int, at: float) -> list[Choice]:
    """At most `number` choices of a front: evenly by cost, and those nearest to the additional cost `at` on both sides.

    The first is always the model's own attention, the last the cheapest.
    """
    if len(choices) <= number:
        return list(choices)
    values = np.array([added_cost(choice, costs, kind) for choice in choices])
    within = np.flatnonzero(values <= at)
    near = [int(within[0]), max(int(within[0]) - 1, 0)] if len(within) else [len(choices) - 1]
    targets = np.linspace(values.max(), values.min(), max(2, number - len(near)))
    rows = {0, len(choices) - 1, *near, *(int(np.abs(values - target).argmin()) for target in targets)}
    return [choices[row] for row in sorted(rows)]


def of_one_mechanism(
    losses: Mapping[str, Mapping[MixerConfig, float]], costs: Costs, kind: str, at: float
) -> list[Choice]:
    """For each mechanism a choice of the layers where it loses least for what it saves, so many that the additional
    cost is at most `at`; those that reach it, the least sum of losses first."""
    found: list[Choice] = []
    for mixer in dict.fromkeys(mixer for row in losses.values() for mixer in row):
        useful = {
            name: (loss, cost_of(costs[name][OWN], kind) - cost)
            for name, row in losses.items()
            for loss, cost, own in _useful(row, costs[name], kind)
            if own == mixer
        }
        choice: dict[str, MixerConfig | None] = dict.fromkeys(costs, OWN)
        for name in sorted(useful, key=lambda name: useful[name][0] / useful[name][1]):
            if added_cost(choice, costs, kind) > at:
                choice[name] = mixer
        if added_cost(choice, costs, kind) <= at:
            found.append(choice)
    return sorted(found, key=lambda choice: additive_loss(choice, losses))


def as_plan(choice: Choice) -> dict[str, MixerConfig]:
    """The layers whose attention changes, as a plan of layers."""
    return {name: mixer for name, mixer in choice.items() if mixer is not None}
