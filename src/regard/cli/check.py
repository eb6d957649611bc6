"""`regard check`: the public contract suite over one mechanism or all, beside other packages and published counts."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .tables import AsJson, show

if TYPE_CHECKING:
    from regard.core import Grid, MixerConfig

PLAIN = 1e-11
"""The largest difference of a fast form and its plain equation, in float64."""


def check(
    mixer: Annotated[
        str, typer.Argument(help="A spelling, such as 'MiTA(m=4, k=5)'; all mechanisms if left out.")
    ] = "",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also through torch.compile.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run the contract suite (fast form, plain form, gradients, masks, cost, ...) on small grids, in float64.

    Then each mechanism is compared with another package's or, where no package has it, with a rewrite of its published
    layer, and counted in DeiT-T and DeiT-S beside what MiTA's Tables 2 and 3 print.
    """
    from regard.core import ConfigError
    from regard.mixers import MIXERS
    from regard.mixers.spelling import parse_mixer

    texts = [mixer] if mixer else [cls.samples[0] if cls.samples else f"{cls.__name__}()" for cls in MIXERS]
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
        show(
            [_contract(row) for row in rows], notes=[*_reasons(rows), *(f"failed: {row['failure']}" for row in failed)]
        )
        show([_in_deit(row) for row in rows], notes=_DEIT_NOTES)
    if failed:
        raise typer.Exit(1)


def checked(config: "MixerConfig", standard: bool = False, compiled: bool = True) -> dict[str, Any]:
    """One row of the table: what passed, what was skipped and why, and the first failure.

    standard: the configuration is the mechanism's usual sample. compiled: with the item "compile".
    """
    from regard.mixers.spelling import spell
    from regard.testing import ContractError
    from regard.testing import check as run

    begun = time.perf_counter()
    row: dict[str, Any] = {"mechanism": spell(config), "result": "passed", "passed": (), "skipped": {}, "failure": ""}
    row |= {"compared": [], "deit": deit_counts(config, standard)}
    try:
        report = run(config, skip={} if compiled else {"compile": "left out (--no-compile)"})
    except ContractError as error:
        row |= {"result": "failed", "failure": str(error)}
    else:
        row |= {"passed": report.passed, "skipped": dict(report.skipped), "compared": compared(config, report.grids)}
        for found in row["compared"]:
            if not found["holds"]:
                row |= {"result": "failed", "failure": f"{spell(config)} differs from {found['with']}"}
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def compared(config: "MixerConfig", grids: "Sequence[Grid]") -> list[dict[str, Any]]:
    """What a mechanism was compared with: {"with", "difference", "holds"}, one for each package.

    Where there is none, or it is not installed, the plain equation of the configuration on these grids is the last.
    """
    from regard.testing.external import compare, comparisons, plain_gap

    results = [compare(one) for one in comparisons(type(config).__name__)]
    found = [{"with": one.said, "difference": one.difference, "holds": one.holds} for one in results]
    if all(one.difference is None for one in results):
        gap = plain_gap(config, grids)
        found.append({"with": "plain equation", "difference": gap, "holds": gap <= PLAIN})
    return found


def deit_counts(config: "MixerConfig", standard: bool = False) -> dict[str, Any]:
    """Parameters and multiply-accumulates of DeiT-T and DeiT-S with a mechanism, beside the printed ones.

    standard: instead of the configuration, which is for small grids, count the first published row of the mechanism, or
    its defaults if there is none. size -> {"configuration", "params", "macs", "printed", "note"}; printed is
    {"row", "params", "macs"} with the verdicts in words, or None. A configuration that does not fit has a note only.
    """
    from regard.core import RegardError
    from regard.mixers.spelling import spell
    from regard.studies.mita.counts import PUBLISHED, SMALL, TINY, WORDS
    from regard.studies.published_sizes import verdict

    found: dict[str, Any] = {}
    for size, body in (("T", TINY), ("S", SMALL)):
        rows = [row for row in PUBLISHED if row.label.partition(",")[0].endswith(f"-{size}") and not row.body.scaled]
        same = [row for row in rows if (type(row.mixer) is type(config) if standard else row.mixer == config)]
        row = same[0] if same else None
        mixer = row.mixer if row else (type(config)() if standard else config)
        cells: dict[str, Any] = {
            "configuration": spell(mixer),
            "params": None,
            "macs": None,
            "printed": None,
            "note": "",
        }
        try:
            counts = (row.body if row else body).count(mixer)  # type: ignore[arg-type]
        except RegardError as error:
            cells["note"] = str(error)
        else:
            cells |= {"params": counts[0], "macs": counts[1]}
            if row:
                said = [
                    f"{text} {WORDS[verdict(n, text)]}" for n, text in zip(counts, (row.params, row.macs), strict=True)
                ]
                cells |= {"printed": {"row": row.label, "params": said[0], "macs": said[1]}, "note": row.note}
        found[size] = cells
    return found


_DEIT_NOTES = (
    "DeiT-T and DeiT-S: images of 224, 1000 classes; G = 10^9 multiply-accumulates of one image, by formula. Printed: "
    "MiTA, Tables 2 and 3, which have not every mechanism; T and S may be other configurations there.",
    "All printed rows, with convolutions, gates and ViT-5: regard study run mita_counts.",
)


def _contract(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the first table. Several comparisons stand side by side."""
    differences = (one["difference"] for one in row["compared"])
    return {
        "mechanism": row["mechanism"],
        "result": row["result"],
        "passed": len(row["passed"]),
        "skipped": len(row["skipped"]),
        "compared with": "; ".join(one["with"] for one in row["compared"]),
        "largest difference": "; ".join("-" if value is None else f"{value:.1e}" for value in differences),
        "seconds": row["seconds"],
    }


def _in_deit(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the second table."""
    line: dict[str, Any] = {"mechanism": row["mechanism"].partition("(")[0]}
    for size, cells in row["deit"].items():
        printed = cells["printed"] or {"params": "", "macs": ""}
        macs = cells["macs"]
        line |= {
            f"parameters {size}": cells["params"],
            f"printed {size}": printed["params"],
            f"G {size}": None if macs is None else f"{macs / 1e9:.2f}",
            f"printed G {size}": printed["macs"],
        }
    notes = {f"{size}: {cells['note']}" for size, cells in row["deit"].items() if cells["note"]}
    return line | {"note": "; ".join(sorted(notes))}


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
