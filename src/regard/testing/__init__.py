"""The contract of mechanisms as a function: `regard.testing.check(MyMechanism())`.

Regard's tests run it on every mechanism and projection; users run it on their own mechanisms before a study. It works
in float64 on small grids, with perturbed parameters, since a parameter that is zero would hide what it multiplies.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.core import ConfigError, Contract, Extra, Grid, GridError, MixerConfig, UnsupportedError, nearest
from regard.mixers.spelling import parse, spell

from . import forms, influence
from .subject import ContractError, Subject

__all__ = ["GRIDS", "ITEMS", "ContractError", "Report", "Subject", "check"]

GRIDS = (Grid(4, 4), Grid(4, 6, 2), Grid(6, 4, 1), Grid(3, 5, 1, 2), Grid(1, 12))
CLIPS = (Grid(3, 4, 1, depth=2),)
LARGER = (Grid(8, 8), Grid(7, 9, 2), Grid(9, 7, 1), Grid(7, 8, 1, 2))

ITEMS: dict[str, Callable[[Subject], str]] = {
    "shape": forms.shape, "input checks": forms.input_checks, "parameters": forms.parameters, "macs": forms.macs,
    "reference": forms.reference, "weights": forms.weights, "gradients": forms.gradients, "compile": forms.compilation,
    "batch": influence.batch, "images": influence.images, "masks": influence.masks, "rotary": forms.rotary,
    "cross": forms.cross, "state": forms.state, "reset": forms.reset, "spelling": forms.spelling,
    "order": influence.order, "geometry": influence.geometry, "local": influence.local,
    "other grid": influence.other_grid,
}  # fmt: skip
COUNTS = ("parameters", "macs")
"""Items on which no other depends: where they fail the next ones are tested all the same."""
ONCE = frozenset({"gradients", "compile", "images", "rotary", "cross", "reset", "spelling"})


@dataclass(frozen=True)
class Report:
    """The result of `check`: items that passed, and items that do not apply and refused grids with the reasons."""

    spelling: str
    grids: tuple[Grid, ...]
    passed: tuple[str, ...]
    skipped: Mapping[str, str]
    refused: Mapping[Grid, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.spelling}: {len(self.passed)} items passed on {len(self.grids)} grids"]
        lines += [f"  passed          {name}" for name in self.passed]
        lines += [f"  not applicable  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines + [f"  refused         {grid}: {reason}" for grid, reason in self.refused.items()])


def samples(cls: type[MixerConfig], extra: Extra = ()) -> list[MixerConfig]:
    """The configurations that a class names in `samples`; without any, which subclasses do not inherit, its defaults.

    extra: the user's own, which these may name.
    """
    return [parse(text, (cls, *extra)) for text in vars(cls).get("samples") or (f"{cls.__name__}()",)]


def check(
    config: MixerConfig | type[MixerConfig], *, grids: Iterable[Grid] = (), dim: int = 16, heads: int = 2,
    batch: int = 3, seed: int = 0, contract: Contract | None = None, skip: Mapping[str, str] | None = None,
) -> Report:  # fmt: skip
    """Run the contract on a mechanism; returns which items passed and which do not apply.

    config: a configuration, or a class for all of its `samples`; then an item passed if it did for any of them. grids:
    by default five small ones, square and not, with prefix and suffix tokens, and one of two frames for a mechanism
    that takes them; if it refuses some of them (25 landmarks do not fit 4x4 patch tokens), larger ones are added.
    contract: what the suite must know about the configuration; None = its own `contract`. skip: further items to skip,
    with the reason of each.
    Raises: ContractError for the first item that fails, with the counts that fail; ConfigError for an unknown item in
    skip.
    """
    if isinstance(config, type):
        options: Any = {"grids": tuple(grids), "dim": dim, "heads": heads, "batch": batch, "seed": seed}
        return _join([check(each, contract=contract, skip=skip, **options) for each in samples(config)])
    contract = contract or config.contract
    reasons = {**contract.skip, **(skip or {})}
    for name in reasons:
        if name not in ITEMS:
            raise ConfigError(f"the contract has no item {name!r}; {nearest(name, ITEMS)}")
    subjects: list[Subject] = []
    refused: dict[Grid, str] = {}
    with torch.random.fork_rng(devices=[]):
        for grid in tuple(grids) or (*GRIDS, *(CLIPS if config.depth else ()), *LARGER):
            if not grids and grid in LARGER and len(subjects) >= 3:
                break
            subject = Subject(config, grid, dim, heads, batch, seed, contract)
            try:
                subject.layer.reference(subject.draw(grid, 0), grid)
            except (ConfigError, GridError, UnsupportedError) as error:
                if isinstance(error, UnsupportedError) and grid not in CLIPS:
                    raise ContractError(f"{spell(config)} on {grid}: UnsupportedError: {error}") from error
                refused[grid] = str(error)
            except Exception as error:
                raise ContractError(f"{spell(config)} on {grid}: {type(error).__name__}: {error}") from error
            else:
                subjects.append(subject)
        if not subjects:
            raise ContractError(f"{spell(config)} refuses every grid: {next(iter(refused.values()), 'there is none')}")
        failures: list[ContractError] = []
        for name in ITEMS:
            try:
                reasons[name] = reasons[name] if name in reasons else _run(name, subjects)
            except ContractError as error:
                failures.append(error)
                if name not in COUNTS:
                    break
        if failures:
            raise ContractError(f"{spell(config)}: {'; '.join(map(str, failures))}") from failures[-1]
    passed = tuple(name for name in ITEMS if not reasons[name])
    skipped = {name: reasons[name] for name in ITEMS if reasons[name]}
    return Report(spell(config), tuple(subject.grid for subject in subjects), passed, skipped, refused)


def _join(reports: list[Report]) -> Report:
    passed = tuple(name for name in ITEMS if any(name in report.passed for report in reports))
    skipped = {name: why for report in reports for name, why in report.skipped.items() if name not in passed}
    grids = tuple(dict.fromkeys(grid for report in reports for grid in report.grids))
    refused = {grid: why for report in reports for grid, why in report.refused.items() if grid not in grids}
    return Report(", ".join(report.spelling for report in reports), grids, passed, skipped, refused)


def _run(name: str, subjects: list[Subject]) -> str:
    """Run one item on its grids; returns why it does not apply, "" if it passed."""
    item = ITEMS[name]
    reason = ""
    # an expensive item runs on one grid, with a prefix and a suffix if possible
    tested = [max(subjects, key=lambda s: (s.grid.suffix, s.grid.prefix))] if name in ONCE else subjects
    for subject in tested:
        try:
            reason = item(subject)
        except Exception as error:
            kind = "" if isinstance(error, ContractError) else f"{type(error).__name__}: "
            raise ContractError(f"{name} on {subject.grid}: {kind}{error}") from error
        if reason:
            break
    return reason
