"""Table: the results of one study at one scale, with the verdicts on its gate and claims. Needs no torch.

It is computed from the study's snapshot and the outcomes of its runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.core import ConfigError, check_known
from regard.files.records import read_record
from regard.lab.results.import_checks import check_listed, check_snapshot
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks
from regard.measure.intervals import Interval, Pooled, interval, paired_interval, pooled_variance

from .claims import Gate, Judged, analysed_runs, headline, judge_claims, judge_gate, row_values, stored_looks
from .comparability import mixture_warnings, on_one_device

LONGEST_NAME = 255
"""Of a file, in bytes; names of snapshots are ASCII."""


@dataclass(frozen=True)
class Line:
    """One row: n finished runs, their mean and 95 % interval, and the difference to the row that it is compared with.

    - against: that row, "" for the study's baseline; the baseline itself has no difference.
    - share: the mean difference to the baseline as a share of what attention brings (`Gate.gain`), None unless the gate
      is passed.
    - failed: runs that ended without a result; diverged: those among them whose loss or score was not finite.
    - at_chance: finished runs that are not better than chance.
    - runs: planned runs. macs: of one image. seconds: mean time of a run.
    """

    label: str
    n: int
    mean: float | None
    low: float | None
    high: float | None
    sd: float | None
    difference: Interval | None
    share: float | None
    control: bool
    failed: int
    diverged: int
    at_chance: int
    runs: int
    paper: Mapping[str, int | float]
    parameters: int | None
    macs: int | None
    seconds: int | float | None
    against: str = ""


@dataclass(frozen=True)
class Table:
    """Rows, claims and gate of a study. runs: finished ones, on the device that most of them have.

    looks: the interim analyses, None where the seeds were fixed. warnings: problems that a reader must know.
    """

    study: str
    title: str
    source: str
    scale: str
    metric: str
    baseline: str
    caption: str
    gate: Gate
    rows: tuple[Line, ...]
    claims: tuple[Judged, ...]
    pooled: Pooled
    looks: Looks | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    runs: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, root: Path | str, name: str, scale: str) -> "Table":
        """The table of a study in a store. Raises: ConfigError if there is none; StoreError if a file is damaged."""
        snapshot = load_snapshot(root, name, scale)
        return make_table(snapshot, ended_runs(Results(root), snapshot))

    def line(self, label: str) -> Line:
        """The line of a row. Raises: ConfigError for an unknown row."""
        rows = {row.label: row for row in self.rows}
        check_known(label, rows, f"no row {label!r}")
        return rows[label]

    @property
    def headline(self) -> str:
        """The verdicts on the claims in one sentence, with the numbers after correction."""
        return headline(self.claims, self.gate, self.scale)

    def to_json(self) -> dict[str, Any]:
        """The table without its runs as plain data, with unrounded numbers."""
        value = asdict(self)
        del value["runs"]
        for row in value["rows"]:
            for name in ("difference", "against"):
                if not row[name]:
                    del row[name]
        for claim, judged in zip(value["claims"], self.claims, strict=True):
            claim["verdict"] = judged.verdict.to_json()
        value["headline"] = self.headline
        return value


def snapshot_path(root: Path | str, name: str, scale: str) -> Path:
    """The path of a study's snapshot. scale: the name of the setting, such as "desk" or "desk+cifar10"."""
    return Path(root) / "studies" / f"{name}-{scale}.json"


def snapshots(root: Path | str) -> list[tuple[str, str]]:
    """(study, setting's name) of every snapshot in a store."""
    stems = (path.stem.rpartition("-") for path in sorted((Path(root) / "studies").glob("*-*.json")))
    return [(study, setting) for study, _, setting in stems]


def load_snapshot(root: Path | str, name: str, scale: str) -> dict[str, Any]:
    """Read a snapshot. Raises: ConfigError if it is missing, with a list of all; StoreError if it is damaged."""
    path = snapshot_path(root, name, scale)
    if len(path.name) > LONGEST_NAME or not path.exists():
        settings = [f"{study} at {setting} scale" for study, setting in snapshots(root)]
        content = f"it has {', '.join(settings)}" if settings else "it has no study yet"
        raise ConfigError(f"no results of {name} at {scale} scale in {root}; {content}; run or import them first")
    value = read_record(path)
    check_snapshot(path, {"study": name, "scale": scale, **value})  # the file's name has both
    return value


def stored_snapshot(root: Path | str, name: str, scale: str) -> dict[str, Any] | None:
    """The snapshot of a study, None if there is none. Raises: StoreError if it is damaged."""
    return load_snapshot(root, name, scale) if snapshot_path(root, name, scale).exists() else None


def make_table(snapshot: Mapping[str, Any], ended: Sequence[dict[str, Any]]) -> Table:
    """The table of a snapshot from its runs that have ended, with their outcomes."""
    missing = len(snapshot["runs"]) - len(ended)
    runs, warnings = on_one_device(ended)
    metric, baseline = snapshot["metric"], snapshot["baseline"]
    values = {row["label"]: row_values(runs, row["label"], metric) for row in snapshot["rows"]}
    controls = [row["label"] for row in snapshot["rows"] if row.get("control")]
    first = analysed_runs(snapshot["runs"], ended, runs)
    first_values = {label: row_values(first, label, metric) for label in values}
    gate = judge_gate(values, controls, baseline, metric, stored_looks(snapshot), first_values)
    lines = tuple(_line(row, runs, values, gate, snapshot) for row in snapshot["rows"])
    residual = pooled_variance(
        {line.label: values[line.label] for line in lines if not line.control and not line.failed}
    )
    claims = judge_claims(snapshot, runs, gate, {line.label: line.failed for line in lines}, residual, first)
    warnings += mixture_warnings(runs) + _run_warnings(lines, runs)
    warnings += [f"{missing} of {len(snapshot['runs'])} runs are missing"] if missing else []
    return Table(
        study=snapshot.get("study", ""), title=snapshot.get("title", ""), source=snapshot.get("source", ""),
        scale=snapshot.get("scale", ""), metric=metric, baseline=baseline, caption=_caption(snapshot), gate=gate,
        rows=lines, claims=claims, pooled=residual, looks=stored_looks(snapshot),
        warnings=tuple(warnings), notes=_notes(snapshot),
        runs=tuple(run for run in runs if run["outcome"].get("status") == "done"),
    )  # fmt: skip


def ended_runs(store: Results, snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a snapshot that have ended, with their outcomes. Raises: StoreError."""
    outcomes = ((run, listed_outcome(store, run)) for run in snapshot["runs"])
    return [{**run, "outcome": outcome} for run, outcome in outcomes if outcome is not None]


def listed_outcome(store: Results, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The outcome of a run that a snapshot lists, None if it has none. Raises: StoreError, also for another seed."""
    outcome = store.outcome(run["key"])
    if outcome is not None:
        check_listed(outcome, run)
    return outcome


def _line(
    row: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], values: Mapping[str, Mapping[int, float]], gate: Gate,
    snapshot: Mapping[str, Any],
) -> Line:  # fmt: skip
    label, baseline = row["label"], snapshot["baseline"]
    base = row.get("against") or baseline
    against = "" if base == baseline else base
    difference = None if label == base else paired_interval(values[label], values.get(base, {}))
    outcomes = [run["outcome"] for run in runs if run["row"] == label]
    done = [outcome for outcome in outcomes if outcome.get("status") == "done"]
    failed = [outcome for outcome in outcomes if outcome.get("status") != "done"]
    own = interval(list(values[label].values()))
    low, high = (None if edge is None else min(max(edge, 0.0), 100.0) for edge in (own.low, own.high))  # of percent
    seconds = [outcome["seconds"] for outcome in done if isinstance(outcome.get("seconds"), int | float)]
    # parameters and MACs: as a run counted them, else as the snapshot has them
    counts = [
        next((outcome[name] for outcome in done if outcome.get(name) is not None), row.get(name))
        for name in ("parameters", "macs")
    ]
    parameters, macs = (None if count is None else int(count) for count in counts)
    return Line(
        label=label, n=own.n, mean=own.mean, low=low, high=high, sd=own.sd, difference=difference,
        share=None if difference is None or against else gate.share(difference.mean),
        control=bool(row.get("control")), failed=len(failed),
        diverged=sum(bool(outcome.get("diverged")) for outcome in failed),
        at_chance=sum(bool(outcome.get("diverged")) for outcome in done),
        runs=sum(run["row"] == label for run in snapshot["runs"]), paper=dict(row.get("paper") or {}),
        parameters=parameters, macs=macs, seconds=sum(seconds) / len(seconds) if seconds else None, against=against,
    )  # fmt: skip


def _run_warnings(lines: Sequence[Line], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Diverged and failed runs with their errors, and runs at chance, among those of their row that have ended."""
    warnings = []
    for line in lines:
        ended = [run for run in runs if run["row"] == line.label]
        failed = [run for run in ended if run["outcome"].get("status") != "done"]
        warnings += [
            f"{line.label}: {len(errors)} of {len(ended)} seeds {state} ({_errors(errors)})"
            for state in ("diverged", "failed")
            if (errors := [run for run in failed if bool(run["outcome"].get("diverged")) == (state == "diverged")])
        ]
        if line.at_chance:
            warnings.append(f"{line.label}: {line.at_chance} of {len(ended)} seeds at chance (no better than guessing)")
    return warnings


def _errors(runs: Sequence[Mapping[str, Any]]) -> str:
    """The errors of failed runs, each with the seeds that have it."""
    seeds: dict[str, list[int]] = {}
    for run in sorted(runs, key=lambda run: int(run["seed"])):
        seeds.setdefault(str(run["outcome"].get("error") or "no error was recorded"), []).append(run["seed"])
    return "; ".join(
        f"{'seeds' if len(numbers) > 1 else 'seed'} {', '.join(map(str, numbers))}: {error}"
        for error, numbers in seeds.items()
    )


def _caption(snapshot: Mapping[str, Any]) -> str:
    changed = f", changed: {snapshot['variant']}" if snapshot.get("variant") else ""
    data, sizes = snapshot.get("data") or {}, ""
    if data.get("train") and data.get("test"):
        sizes = f", {data['train']} training and {data['test']} test {data.get('unit', 'images')}"
    named = f"{data['name']}{sizes}" if data.get("name") else ""
    return "; ".join(filter(None, (f"{snapshot.get('scale')} scale{changed}", named, snapshot.get("recipe"))))


def _notes(snapshot: Mapping[str, Any]) -> tuple[str, ...]:
    row_notes = [f"{row['label']}: {note}" for row in snapshot["rows"] for note in row.get("notes") or ()]
    return (*(snapshot.get("notes") or ()), *row_notes)
