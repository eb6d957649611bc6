"""Advice for a model that does not exist yet: exact costs, stored times and verdicts, and what nobody has measured.

The stored table (`new_model.json`, written by tools/advice_table.py) has times of one machine and the differences to
softmax attention of the committed studies whose gate was passed, and which abilities probes found. Nothing is measured
when it is read.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import ConfigError, Grid, MixerConfig, RegardError, Site, StoreError, check_known
from regard.mixers import MIXERS
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell

TABLE = Path(__file__).with_name("new_model.json")
MASKS = ("causal", "padding", "bias")
TASKS = ("classification", "detection", "instances", "segmentation", "translation", "sequences", "cells")
LOSS = 2.0
"""Points below softmax attention that an interval may reach where a mechanism is named as near."""
LEARNED = 0.5
"""The share of softmax attention's gain in a probe from which an ability counts as learned."""
WORTH = 0.9
"""The share of softmax attention's time from which a mechanism is named as faster."""


@dataclass(frozen=True, kw_only=True)
class NewModel:
    """What is known of the model. site: of one attention layer. task: of `TASKS`, whose evidence comes first; "" =
    any. masks: that every layer must apply. backward: it is to be trained, so times are of forward and backward.

    Raises: ConfigError for an unknown task or mask.
    """

    site: Site
    task: str = ""
    masks: tuple[str, ...] = ()
    backward: bool = False

    def __post_init__(self) -> None:
        if self.task:
            check_known(self.task, TASKS, f"no task {self.task!r}")
        for mask in self.masks:
            if mask not in MASKS:
                raise ConfigError(f"no mask {mask!r}; masks are {', '.join(MASKS)}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A mechanism in one layer. macs_ratio, time_ratio: to softmax attention; None: not measured. evidence: lines of
    the table on this mechanism, those on the task first. lacking: abilities that it did not learn in probes; None: no
    probe has it.
    """

    mixer: str
    params: int
    macs: int
    macs_ratio: float
    time_ratio: float | None
    evidence: tuple[dict[str, Any], ...] = ()
    lacking: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class NewAdvice:
    """options: by time, those without one last. left_out: why others cannot be used. answer, studies, unknown:
    sentences: what to try, which studies and measurements that rests on, and what nobody has measured."""

    options: tuple[Option, ...]
    left_out: tuple[str, ...]
    answer: tuple[str, ...]
    studies: tuple[str, ...]
    unknown: tuple[str, ...] = field(default=())


def advise_new_model(wanted: NewModel, configs: Sequence[MixerConfig] = (), table: Path = TABLE) -> NewAdvice:
    """Mechanisms for one attention layer of a model that does not exist yet. configs: default all, at their defaults.

    Raises: ConfigError if none of them fits; StoreError if the table is damaged.
    """
    stored = read_table(table)
    base = Softmax().cost(wanted.site).macs
    options, left_out = [], []
    for config in configs or [cls() for cls in MIXERS]:
        missing = [mask for mask in wanted.masks if mask not in config.masks]
        if missing:
            left_out.append(f"{spell(config)} cannot apply a {missing[0]} mask")
            continue
        try:
            cost = config.cost(wanted.site)
        except RegardError as error:
            left_out.append(f"{spell(config)}: {error}")
            continue
        name = type(config).__name__
        lines = [line for line in stored["evidence"] if line["mechanism"] == name]
        default = spell(config) == spell(type(config)())
        options.append(
            Option(
                mixer=spell(config), params=cost.params, macs=cost.macs, macs_ratio=cost.macs / base,
                time_ratio=_time(stored["times"], name, wanted) if default else None,
                evidence=tuple(sorted(lines, key=lambda line: line["task"] != wanted.task)),
                lacking=_missing_abilities(stored["abilities"], config),
            )
        )  # fmt: skip
    if not options:
        raise ConfigError(f"no mechanism fits: {'; '.join(left_out)}")
    options.sort(key=lambda option: (option.time_ratio is None, option.time_ratio or option.macs_ratio))
    return NewAdvice(
        options=tuple(options), left_out=tuple(left_out), answer=_answer(options, wanted),
        studies=_studies(options, stored, wanted), unknown=_unknowns(options, stored, wanted),
    )  # fmt: skip


def read_table(file: Path = TABLE) -> dict[str, Any]:
    """The stored table. Raises: StoreError."""
    try:
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        value["times"]["tokens"], value["evidence"], value["abilities"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} has no times and verdicts ({error!r}); install regard again") from error
    return value


def new_site(tokens: int, dim: int, heads: int = 0, sides: tuple[int, int] | None = None, line: bool = False) -> Site:
    """The site of one layer. sides: of the grid of tokens; without them a square. line: a sequence, not a grid.

    heads: 0 = of 64 channels, else of 32. Raises: ConfigError for numbers that do not fit each other.
    """
    if sides is not None and tokens and sides[0] * sides[1] != tokens:
        raise ConfigError(
            f"a grid of {sides[0]}x{sides[1]} has {sides[0] * sides[1]} tokens, not {tokens}: leave one out"
        )
    if sides is None:
        side = math.isqrt(tokens)
        if not line and side * side != tokens:
            raise ConfigError(f"{tokens} tokens are no square; give the grid, such as --grid {side}x{side + 1}")
        sides = (1, tokens) if line else (side, side)
    number = heads or next((dim // width for width in (64, 32) if dim % width == 0), 0)
    if not number or dim % number:
        asked = f"a multiple of {heads} heads" if heads else "a multiple of 32; give --heads"
        raise ConfigError(f"{dim} channels are not {asked}")
    return Site(dim=dim, heads=number, grid=Grid(*sides))


def _time(times: dict[str, Any], name: str, wanted: NewModel) -> float | None:
    """The ratio at a number of tokens, between the measured ones on logarithmic scales; beyond them, at the nearest."""
    values = times["training" if wanted.backward else "forward"].get(name) or ()
    measured = [pair for pair in zip(times["tokens"], values, strict=False) if pair[1]]
    if not measured:
        return None
    tokens, ratios = np.log(measured).T
    return math.exp(np.interp(math.log(wanted.site.grid.tokens), tokens, ratios))


def _missing_abilities(probes: Sequence[dict[str, Any]], config: MixerConfig) -> tuple[str, ...] | None:
    """Abilities that the configuration did not learn, or the one of its class that differs in numbers only."""
    name, spelled = type(config).__name__, spell(config)
    exact = [probe for probe in probes if probe["spelling"] == spelled]
    default = spelled == spell(type(config)())
    near = [probe for probe in probes if default and probe["mechanism"] == name and probe["plain"]]
    found = next(iter(exact + near), None)
    if found is None:
        return None
    return tuple(ability for ability, share in found["learned"].items() if share < LEARNED)


def _plain(option: Option) -> list[dict[str, Any]]:
    """The evidence on the mechanism itself, without a convolution or gate."""
    return [line for line in option.evidence if "dwc=" not in line["spelling"] and "gate=" not in line["spelling"]]


def _near(option: Option, task: str) -> bool:
    """Whether the narrowest interval of the mechanism itself ends above -LOSS; on the task, where there is one."""
    plain = _plain(option)
    plain = [line for line in plain if line["task"] == task] or plain
    narrowest = min(plain, key=lambda line: line["high"] - line["low"], default=None)
    return narrowest is not None and narrowest["low"] > -LOSS and narrowest["high"] >= 0


def _answer(options: Sequence[Option], wanted: NewModel) -> tuple[str, ...]:
    site, tokens = wanted.site, wanted.site.grid.tokens
    share = tokens / (tokens + 6 * site.dim)  # of a ViT layer with an MLP of ratio 4
    first = f"attention itself is {share:.0%} of the multiplications of a ViT layer with {site.dim} channels here"
    if share < 0.2:
        return (f"{first}: no mechanism can make such a model much faster; keep Softmax()",)
    found = [
        option
        for option in options
        if option.time_ratio is not None and option.time_ratio < WORTH and _near(option, wanted.task)
    ][:4]
    names = [option.mixer for option in found]
    lacking = [f"{option.mixer} {', '.join(option.lacking)}" for option in found if option.lacking]
    probes = (f"in probes these did not learn: {'; '.join(lacking)} (docs/probes.md)",) if lacking else ()
    elsewhere = [o.mixer for o in found if wanted.task not in {line["task"] for line in _plain(o)}]
    if not names:
        return (first, "no mechanism that fits is faster and near softmax attention in a study here; keep Softmax()")
    caution = (
        f"; no study here judged {', '.join(elsewhere)} in {wanted.task}, so compare with Softmax() on your data"
        if wanted.task and elsewhere
        else ""
    )
    return (
        first,
        f"try first: {', '.join(names)}: faster, and at most {LOSS:g} points below softmax attention in their "
        f"narrowest interval{caution}",
        *probes,
    )


def _studies(options: Sequence[Option], stored: dict[str, Any], wanted: NewModel) -> tuple[str, ...]:
    used = sorted({(e["study"], e["task"], e["data"]) for option in options for e in option.evidence})
    of = "forward and backward" if wanted.backward else "forward"
    return (
        "counts are exact, of one layer with its projections",
        f"times ({of}, with projections): {stored['times']['measured']} ({stored['times']['source']}); yours differ: "
        "`regard bench`",
        "differences to softmax attention, 95 % intervals before correction, small networks: "
        + ("; ".join(f"{study} ({task}, {data})" for study, task, data in used) or "none"),
        f"abilities: probes with {stored['abilities'][0]['tokens']} tokens (probes_*), not learned: less than half of "
        "what softmax attention gains; `regard probe` measures others"
        if stored["abilities"]
        else "no abilities: `regard probe` measures them",
    )


def _unknowns(options: Sequence[Option], stored: dict[str, Any], wanted: NewModel) -> tuple[str, ...]:
    lines = [line for option in options for line in option.evidence]
    tasks = {line["task"] for line in stored["evidence"]}
    never = [option.mixer for option in options if not option.evidence and option.mixer != spell(Softmax())]
    tokens, found = wanted.site.grid.tokens, []
    if wanted.task and wanted.task not in tasks:
        found.append(f"accuracy in {wanted.task}: all studies here that could judge are of {', '.join(sorted(tasks))}")
    if lines:
        studied = sorted({line["tokens"] for line in lines})
        found.append(f"accuracy with {tokens:,} tokens: the studies have {studied[0]} to {studied[-1]}")
    if never:
        found.append(f"accuracy beside softmax attention of {', '.join(never)}")
    if not stored["times"]["tokens"][0] <= tokens <= stored["times"]["tokens"][-1]:
        found.append(f"times at {tokens:,} tokens: those of the nearest measured number stand here")
    return tuple(found)
