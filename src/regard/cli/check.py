"""`regard check`: the public contract suite over one mechanism, or over all of them."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .show import AsJson, show

if TYPE_CHECKING:
    from regard.core import MixerConfig

# arguments that fit into 4x4 cells, where the defaults are made for larger grids
SMALL: Mapping[str, str] = {
    "MiTA": "MiTA(m=4, k=5)",
    "DynamicConv": "DynamicConv(groups=4)",
    "DeformableConv": "DeformableConv(groups=2)",
    "MHLA": "MHLA(m=4)",
    "Agent": "Agent(m=4)",
    "Linformer": "Linformer(m=4)",
    "Nystrom": "Nystrom(m=4)",
    "TopK": "TopK(k=5)",
    "BRA": "BRA(regions=(2, 2), k=2)",
    "Window": "Window(size=3)",
    "DAT": "DAT(stride=2, kernel=3)",
    "MoBA": "MoBA(block=(2, 3), k=2)",
    "NSA": "NSA(block=(2, 3), k=2)",
    "Reformer": "Reformer(chunk=5, rounds=3)",
}

GATHER: Mapping[str, Any] = {"counted": {"execution": "gather"}}

# what the contract is told of a mechanism whatever its fields are
TOLD: Mapping[str, Mapping[str, Any]] = {
    "MiTA": GATHER,  # the formula counts that every query gathers its keys
    "TopK": GATHER,
    "MoBA": GATHER,
    "NSA": GATHER,
    "DynamicConv": {"macs": "reference"},  # the counter does not see products one by one
    "PVT": {"skip": {"geometry": "its values lie on another grid than its queries"}},
    "DAT": {"skip": {"geometry": "its values lie on another grid than its queries"}},
}

# the contract checks that the order of tokens does not matter to these, with default arguments
ANYWHERE = frozenset({"Softmax", "XCA", "Linear", "PolaFormer", "InLine", "Performer", "TopK"})


@dataclass(frozen=True)
class Unless:
    """An item that cannot hold where a field is other than `unless`."""

    mechanism: str
    field: str
    unless: Any
    item: str
    reason: str


EXCEPTIONS = (
    Unless("FLatten", "local", 0, "cross", "the local branch needs one grid"),
    Unless("PolaFormer", "local", 0, "cross", "the local branch needs one grid"),
    Unless("Agent", "bias", False, "cross", "the biases have places"),
    Unless("InLine", "residual", False, "cross", "the residual branch needs one grid"),
    Unless("Nystrom", "kernel", 0, "cross", "the convolution needs one sequence"),
)


def check(
    mixer: Annotated[
        str, typer.Argument(help="A spelling, such as 'MiTA(m=4, k=5)'; all mechanisms if left out.")
    ] = "",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also through torch.compile.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run the contract suite (fast form, plain form, gradients, masks, cost, ...) on small grids, in float64."""
    from regard.core import ConfigError
    from regard.mixers import MIXERS
    from regard.mixers.spell import parse_mixer

    texts = [mixer] if mixer else [SMALL.get(cls.__name__, cls.__name__) for cls in MIXERS]
    configs = [parse_mixer(text) for text in texts]
    rows = []
    for config in configs:
        if config is None:
            raise ConfigError("None cannot be checked: it stands for no mixer at all")
        rows.append(checked(config, standard=not mixer, compiled=compiled))
        print(f"{rows[-1]['mechanism']}: {rows[-1]['result']}", file=sys.stderr, flush=True)
    failed = [row for row in rows if row["result"] != "passed"]
    if as_json:
        show(rows, as_json)
    else:
        short = [row | {"skipped": len(row["skipped"]), "passed": len(row["passed"])} for row in rows]
        for row in short:
            del row["failure"]
        show(short, notes=[*_reasons(rows), *(f"failed: {row['failure']}" for row in failed)])
    if failed:
        raise typer.Exit(1)


def checked(config: "MixerConfig", standard: bool = False, compiled: bool = True) -> dict[str, Any]:
    """One row of the table: what passed, what was skipped and why, and the first failure.

    standard: the configuration is the one of `SMALL` or the default. compiled: with the item "compile".
    """
    from regard.mixers.spell import spell
    from regard.testing import ContractError
    from regard.testing import check as run

    begun = time.perf_counter()
    row: dict[str, Any] = {"mechanism": spell(config), "result": "passed", "passed": (), "skipped": {}, "failure": ""}
    try:
        report = run(config, **told(config, standard, compiled))
    except ContractError as error:
        row |= {"result": "failed", "failure": str(error)}
    else:
        row |= {"passed": report.passed, "skipped": dict(report.skipped)}
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def told(config: "MixerConfig", standard: bool = False, compiled: bool = True) -> dict[str, Any]:
    """What `regard.testing.check` must know about a configuration of this package."""
    name = type(config).__name__
    options = {**TOLD.get(name, {})}
    skip = dict(options.pop("skip", {}))
    for known in EXCEPTIONS:
        if known.mechanism == name and getattr(config, known.field) != known.unless:
            skip[known.item] = known.reason
    if getattr(config, "indexer", "") == "lightning":
        skip["gradients"] = "the indexer learns from its own loss"
    if getattr(config, "duplicates", "") == "union":
        options = {"macs": ""}  # the counter sees the mask of the dense form
    if not compiled:
        skip["compile"] = "left out (--no-compile)"
    if standard and name in ANYWHERE:
        options["positions"] = False
    return options | {"skip": skip}


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """What was skipped, each reason once: `geometry (PVT, DAT): its values lie on another grid`."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for item, reason in row["skipped"].items():
            found.setdefault((item, reason), []).append(row["mechanism"].partition("(")[0])
    return [
        f"skipped: {item} ({'all' if len(names) == len(rows) > 1 else ', '.join(names)}): {reason}"
        for (item, reason), names in found.items()
    ]
