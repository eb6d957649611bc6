"""The snapshot of a study: what reports and tables need to know of it, written beside its results."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regard.mixers.spelling import spell
from regard.store.files import write_json
from regard.store.import_checks import further_runs, same_rows
from regard.store.results import Results

from .table import load_snapshot, snapshot_path

if TYPE_CHECKING:
    from regard.train.run import Run

    from .study import Row, Setting, Study


def write_snapshot(
    study: "Study", scale: str, store: Results, seeds: int | None = None, rows: str = "*"
) -> dict[str, Any]:
    """Write and return the snapshot of one scale. Runs of an earlier one with the same rows, such as further seeds,
    stay listed; so do counts that a dry run has filled in.

    seeds: their number instead of the setting's. rows: those of which seeds beyond the setting's are listed; all rows
    are listed with the others, since a table without some of them is not complete.

    Raises: ConfigError, StoreError.
    """
    setting = study.setting(scale)
    runs = [] if setting.recipe is None else _planned(study, scale, seeds, rows)
    value = {
        "version": 1,
        "study": study.name,
        "title": study.title,
        "source": study.source,
        "scale": scale,
        "variant": setting.variant,
        "question": study.question,
        "metric": study.metric,
        "baseline": study.baseline,
        "pooled": study.pooled,
        "notes": list(study.notes),
        "task": spell(setting.task.identity()),
        "data": data_record(setting),
        "recipe": spell(setting.recipe) if setting.recipe is not None else "",
        "rows": [describe(row, setting) for row in setting.rows],
        "claims": [asdict(claim) for claim in study.claims],
        "runs": [{"key": run.key, "row": row.label, "seed": run.seed} for row, run in runs],
    }
    path = snapshot_path(store.root, study.name, study.place(scale))
    if path.exists():
        _keep(value, load_snapshot(store.root, study.name, study.place(scale)))
    write_json(path, value)
    return value


def _planned(study: "Study", scale: str, seeds: int | None, rows: str) -> list[tuple["Row", "Run"]]:
    own = study.setting(scale).numbers
    every = study.runs(scale, seeds=None if seeds is None else min(seeds, len(own)))
    return [*every, *(pair for pair in study.runs(scale, rows, seeds) if pair[1].seed not in own)]


def data_record(setting: "Setting") -> dict[str, Any]:
    """Name, checksum and sizes of the data. Raises: DataError if the data are not there."""
    return dict(setting.task.record())


def describe(row: "Row", setting: "Setting") -> dict[str, Any]:
    """One row as plain data."""
    spelling = spell(row.mixer) if row.mixer is not None else "no mixer" if row.removed else "the host's own attention"
    return {
        "label": row.label,
        "spelling": spelling,
        "host": setting.task_of(row).host,
        "control": row.control,
        "card": _card(row),
        "paper": dict(row.paper),
        "exact": dict(row.exact),
        "notes": list(row.notes),
        "parameters": None,
        "macs": None,
    }


def _card(row: "Row") -> dict[str, Any] | None:
    if row.mixer is None:
        return None
    plain = asdict(row.mixer.card)
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in plain.items()}


def _keep(value: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """What an earlier snapshot of the same task knows more: further runs of rows that did not change, and counts."""
    before, same = {row["label"]: row for row in earlier["rows"]}, same_rows(value, earlier)
    for row in value["rows"]:
        if row["label"] in same:
            for name in ("parameters", "macs"):
                row[name] = before[row["label"]].get(name)
    value["runs"] += further_runs(value, earlier)
