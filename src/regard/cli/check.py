"""`regard check`: the contract suite on one mechanism or on all, comparison with other packages, published counts."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra

from .imports import Imports, imported_items, read_mixer
from .tables import AsJson, show

if TYPE_CHECKING:
    from regard.core import Grid, MixerConfig

TOLERANCE = 1e-11
"""The largest allowed difference of a fast form and its plain equation, in float64."""


def check(
    mixer: Annotated[
        str,
        typer.Argument(
            metavar="MECHANISM",
            help="A mechanism, such as 'MiTA(m=4, k=5)'; of your own without arguments, all its samples. "
            "Default: all of --import, else all of Regard.",
        ),
    ] = "",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also check torch.compile.")] = True,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Run the contract suite (fast form, plain form, gradients, masks, cost, ...) on small grids, in float64.

    Then compare each mechanism with another package, or at least its plain equation, and count Regard's in DeiT-T and
    DeiT-S beside the numbers in Tables 2 and 3 of the MiTA paper.
    """
    rows = []
    for config in _configurations(mixer, imported_items(modules)):
        rows.append(check_row(config, standard=not (mixer or modules), compiled=compiled))
        print(f"{rows[-1]['mechanism']}: {rows[-1]['result']}", file=sys.stderr, flush=True)
    failed = [row for row in rows if row["result"] != "passed"]
    if as_json:
        show(rows, as_json)
    else:
        notes = [*_skip_notes(rows), *(f"failed: {row['failure']}" for row in failed)]
        show([_contract_line(row) for row in rows], notes=notes)
        if counted := [_deit_line(row) for row in rows if row["deit"]]:
            show(counted, notes=_DEIT_NOTES)
    if failed:
        raise typer.Exit(1)


def _configurations(mixer: str, extra: Extra) -> "list[MixerConfig]":
    """What is spelled; of the user's own mechanism without arguments, and of all of --import, all samples.

    Without both the first sample of each of Regard's.
    """
    from regard.core import MixerConfig
    from regard.mixers import MIXERS
    from regard.mixers.spelling import spell
    from regard.testing import samples

    if mixer:
        config = read_mixer(mixer, extra)
        plain = type(config) in extra and spell(config) == f"{type(config).__name__}()"
        return samples(type(config), extra) if plain else [config]
    users = [item for item in extra if isinstance(item, type) and issubclass(item, MixerConfig)]
    if extra and not users:
        raise ConfigError("the modules of --import have no mechanisms in MIXERS; to check Regard's, leave --import out")
    if users:
        return [config for cls in users for config in samples(cls, extra)]
    return [samples(cls)[0] for cls in MIXERS]


def check_row(config: "MixerConfig", standard: bool = False, compiled: bool = True) -> dict[str, Any]:
    """One mechanism as plain data: items that passed, items that were skipped and why, and failures.

    Only Regard's have counts in DeiT. standard: as in `deit_counts`. compiled: with the item "compile".
    """
    from regard.mixers import MIXERS
    from regard.mixers.spelling import spell
    from regard.testing import ContractError
    from regard.testing import check as run

    start = time.perf_counter()
    row: dict[str, Any] = {"mechanism": spell(config), "result": "passed", "passed": (), "skipped": {}, "failure": ""}
    row |= {"compared": [], "deit": deit_counts(config, standard) if type(config) in MIXERS else {}}
    try:
        report = run(config, skip={} if compiled else {"compile": "left out (--no-compile)"})
    except ContractError as error:
        row |= {"result": "failed", "failure": str(error)}
    else:
        row |= {"passed": report.passed, "skipped": dict(report.skipped)}
        row["compared"] = comparison_rows(config, report.grids)
        for comparison in row["compared"]:
            if not comparison["holds"]:
                row |= {"result": "failed", "failure": f"{spell(config)} differs from {comparison['with']}"}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def comparison_rows(config: "MixerConfig", grids: "Sequence[Grid]") -> list[dict[str, Any]]:
    """{"with", "difference", "holds"} for each package that a mechanism is compared with.

    If there is none, or none is installed, the last entry is the mechanism's plain equation on these grids.
    """
    from regard.testing.external import compare, comparisons, plain_gap

    results = [compare(external) for external in comparisons(type(config).__name__)]
    rows = [{"with": result.label, "difference": result.difference, "holds": result.holds} for result in results]
    if all(result.difference is None for result in results):
        gap = plain_gap(config, grids)
        rows.append({"with": "plain equation", "difference": gap, "holds": gap <= TOLERANCE})
    return rows


def deit_counts(config: "MixerConfig", standard: bool = False) -> dict[str, Any]:
    """Parameters and multiply-accumulates of DeiT-T and DeiT-S with a mechanism, beside the printed ones.

    standard: count the first published row of the mechanism, or else its default configuration, instead of `config`,
    which is a sample for small grids. Returns size -> {"configuration", "params", "macs", "printed", "note"};
    printed is {"row", "params", "macs"} with the verdicts as text, or None. A configuration that does not fit has
    only a note.
    """
    from regard.core import RegardError
    from regard.lab.studies.mita.counts import VERDICTS
    from regard.lab.studies.mita.printed import PUBLISHED, SMALL, TINY
    from regard.lab.studies.published_sizes import verdict
    from regard.mixers.spelling import spell

    sizes: dict[str, Any] = {}
    for size, body in (("T", TINY), ("S", SMALL)):
        plain = [row for row in PUBLISHED.values() if not row.body.scaled]
        rows = [row for row in plain if row.label.partition(",")[0].endswith(f"-{size}")]
        row = next(
            (row for row in rows if (type(row.mixer) is type(config) if standard else row.mixer == config)), None
        )
        mixer = row.mixer if row else (type(config)() if standard else config)
        line: dict[str, Any] = {
            "configuration": spell(mixer),
            "params": None,
            "macs": None,
            "printed": None,
            "note": "",
        }
        try:
            counts = (row.body if row else body).count(mixer)  # type: ignore[arg-type]
        except RegardError as error:
            line["note"] = str(error)
        else:
            line |= {"params": counts[0], "macs": counts[1]}
            if row:
                pairs = zip(counts, (row.params, row.macs), strict=True)
                params, macs = (f"{text} {VERDICTS[verdict(count, text)]}" for count, text in pairs)
                line |= {"printed": {"row": row.label, "params": params, "macs": macs}, "note": row.note}
        sizes[size] = line
    return sizes


_DEIT_NOTES = (
    "DeiT-T and DeiT-S: images of 224x224, 1000 classes; G: 10^9 multiply-accumulates for one image, by formula.",
    "Printed: Tables 2 and 3 of the MiTA paper, which lack some mechanisms; there T and S may have different options.",
    "All printed rows, also those with convolutions, gates and ViT-5: regard study run mita_counts.",
)


def _contract_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the first table, with all comparisons in one cell."""
    differences = (comparison["difference"] for comparison in row["compared"])
    return {
        "mechanism": row["mechanism"],
        "result": row["result"],
        "passed": len(row["passed"]),
        "skipped": len(row["skipped"]),
        "compared with": "; ".join(comparison["with"] for comparison in row["compared"]),
        "largest difference": "; ".join("-" if value is None else f"{value:.1e}" for value in differences),
        "seconds": row["seconds"],
    }


def _deit_line(row: Mapping[str, Any]) -> dict[str, Any]:
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


def _skip_notes(rows: list[dict[str, Any]]) -> list[str]:
    """The skipped items, each reason once: `geometry (PVT, DAT): its values lie on another grid`."""
    mechanisms: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for item, reason in row["skipped"].items():
            mechanisms.setdefault((item, reason), []).append(row["mechanism"].partition("(")[0])
    return [
        f"skipped: {item} ({'all' if len(names) == len(rows) > 1 else ', '.join(names)}): {reason}"
        for (item, reason), names in mechanisms.items()
    ]
