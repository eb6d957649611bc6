"""The snapshot of a study at one scale, written beside its results: all that tables and reports need of the study."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regard.core import ConfigError, RegardError
from regard.files.records import read_record, write_record
from regard.lab.results.import_checks import further_runs, same_rows
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks
from regard.mixers.spelling import spell

from .export import short_entries
from .jobs import ENDED
from .table import snapshot_path, stored_snapshot

if TYPE_CHECKING:
    from regard.lab.train.run import Run

    from .study import Row, Setting, Study


def write_snapshot(
    study: "Study", scale: str, store: Results, seeds: int | None = None, rows: str = "*",
    planned: "Sequence[tuple[Row, Run]] | None" = None, looks: Looks | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write and return the snapshot of one scale.

    Runs of an earlier snapshot, such as further seeds, stay listed if their rows did not change and, unless nothing is
    planned, would have the same keys now. So do parameters and MACs. seeds: their number instead of the setting's.
    rows: the rows for which seeds beyond the setting's are listed; the setting's own seeds are listed for all rows,
    since a table needs all of them. planned: instead of these, the runs to list. looks: the interim analyses of a study
    whose seeds are added until it is decided; those of an earlier snapshot stay. Claims that are new where all results
    were there already are marked as late, but for smoke scale, which judges none.
    Raises: ConfigError, also if an earlier snapshot has interim analyses and there are none now, or the claims are not
    those for which they were fixed; StoreError.
    """
    setting = study.setting(scale)
    if planned is None:
        planned = [] if setting.recipe is None else _planned_runs(study, scale, seeds, rows)
    value: dict[str, Any] = {
        "study": study.name, "title": study.title, "source": study.source, "scale": scale, "variant": setting.variant,
        "question": study.question, "metric": study.metric, "baseline": study.baseline, "pooled": study.pooled,
        "notes": list(study.notes),
        "task": spell(setting.task.identity()),
        "data": short_entries({**setting.task.record(), "unit": setting.task.unit}),
        "recipe": spell(setting.recipe) if setting.recipe is not None else "",
        "rows": [describe(row, setting) for row in setting.rows],
        "claims": [asdict(claim) for claim in study.claims],
        "runs": [{"key": run.key, "row": row.label, "seed": run.seed} for row, run in planned],
    }  # fmt: skip
    if looks is not None:
        value["decide"] = looks.to_json()
    name = study.setting_name(scale)
    if (earlier := stored_snapshot(store.root, study.name, name)) is not None:
        _add_counts(value, earlier)
        _mark_late_claims(value, earlier, store)
        further = further_runs(value, earlier)
        value["runs"] += [run for run in further if key_now(study, scale, run) == run["key"]] if planned else further
        if earlier.get("decide") is not None:
            _keep_analyses(value, earlier, store)
    write_record(snapshot_path(store.root, study.name, name), value)
    return value


@contextmanager
def undo_if_refused(study: "Study", scale: str, store: Results) -> Iterator[None]:
    """For a block that writes the snapshot and executes runs: of a place that refuses them nothing is left.

    A new snapshot is removed again, with the folders that are new, if a RegardError ends the block and none of its runs
    has begun.
    """
    path = snapshot_path(store.root, study.name, study.setting_name(scale))
    new = [each for each in (path, path.parent, store.root) if not each.exists()]
    try:
        yield
    except RegardError:
        begun = path.exists() and any(store.status(run["key"]) != "new" for run in read_record(path)["runs"])
        if path in new and not begun:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # a folder that is not empty stays
                for folder in new[1:]:
                    folder.rmdir()
        raise


def _planned_runs(study: "Study", scale: str, seeds: int | None, rows: str) -> list[tuple["Row", "Run"]]:
    own_seeds = study.setting(scale).numbers
    runs = study.runs(scale, seeds=None if seeds is None else min(seeds, len(own_seeds)))
    return [*runs, *(pair for pair in study.runs(scale, rows, seeds) if pair[1].seed not in own_seeds)]


def describe(row: "Row", setting: "Setting") -> dict[str, Any]:
    """A row of the setting as plain data."""
    fields = {} if row.mixer is None else asdict(row.mixer.card)
    card = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields.items()}
    return {
        "label": row.label, "spelling": spell_row(row), "host": setting.task_of(row).host, "control": row.control,
        "card": card or None, "paper": dict(row.paper), "exact": dict(row.exact), "notes": list(row.notes),
        "against": row.against, "parameters": None, "macs": None,
    }  # fmt: skip


def spell_row(row: "Row") -> str:
    """The spelling of a row's mechanism."""
    return spell(row.mixer) if row.mixer is not None else "no mixer" if row.removed else "the host's own attention"


def key_now(study: "Study", scale: str, run: Mapping[str, Any]) -> str:
    """The key that the row and seed of a listed run have now, as the row's recipe may have changed; "" without it."""
    rows = [row for row in study.setting(scale).rows if row.label == run["row"]]
    return study.run(scale, rows[0], run["seed"]).key if rows else ""


def _add_counts(value: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """Add the counts of an earlier snapshot, for rows that did not change."""
    earlier_rows, same = {row["label"]: row for row in earlier["rows"]}, same_rows(value, earlier)
    for row in value["rows"]:
        if row["label"] in same:
            row |= {name: earlier_rows[row["label"]].get(name) for name in ("parameters", "macs")}


def _mark_late_claims(value: dict[str, Any], earlier: Mapping[str, Any], store: Results) -> None:
    """Mark claims that an earlier snapshot marks, or that it lacks although all of its runs had ended."""
    before = {_text(claim): bool(claim.get("late")) for claim in earlier["claims"]}
    seen = (
        value["scale"] != "smoke"
        and bool(earlier["runs"])
        and all(store.status(run["key"]) in ENDED for run in earlier["runs"])
    )
    for claim in value["claims"]:
        if before.get(_text(claim), seen):
            claim["late"] = True


def _text(claim: Mapping[str, Any]) -> str:
    """A claim without its mark, to compare."""
    return json.dumps({name: claim[name] for name in sorted(claim) if name != "late" and claim[name] is not None})


def _keep_analyses(value: dict[str, Any], earlier: Mapping[str, Any], store: Results) -> None:
    """Take over the interim analyses of an earlier snapshot. Raises: ConfigError without any now, for other claims."""
    if value.get("decide") is None:
        folder = shlex.quote(str(store.root))
        changed = ", with the same --data, --host, --size and --set" if value["variant"] else ""
        raise ConfigError(
            f"{value['study']} began with seeds that are added until its claims are decided, and a number of seeds "
            "fixed after a look at results would break its error level; continue it with: regard study run "
            f"{value['study']} --scale {value['scale']} --decide --results {folder}{changed}; or begin with a fixed "
            "number in another folder: --results FOLDER"
        )
    value["decide"] = earlier["decide"]
    if [*map(_text, value["claims"])] != [*map(_text, earlier["claims"])]:
        raise ConfigError(
            f"the claims of {value['study']} changed after its interim analyses were fixed, which would break "
            "their error level; carry it out again in another folder: --results FOLDER"
        )
