"""Table: the results of one study at one scale, with the verdicts on its gate and claims. Needs no torch.

It is computed from the study's snapshot and the outcomes of its runs.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core import ConfigError, StoreError, nearest
from regard.measure.statistics import (
    Interval,
    Pooled,
    Verdict,
    holm,
    interval,
    judge,
    paired,
    pooled,
    sampling_error,
    seed_pairs,
)
from regard.store.import_checks import check_listed, check_snapshot
from regard.store.records import read_record
from regard.store.results import Results

from .comparability import mixture_warnings, on_one_device


@dataclass(frozen=True)
class Line:
    """One row: n finished runs, their mean and 95 % interval, and the difference to the baseline (None for itself).

    failed: runs that ended without a result; diverged: those among them whose loss or score was not finite. at_chance:
    finished runs that are not better than chance. runs: planned runs. macs: of one image. seconds: mean time of a run.
    """

    label: str
    n: int
    mean: float | None
    low: float | None
    high: float | None
    sd: float | None
    difference: Interval | None
    control: bool
    failed: int
    diverged: int
    at_chance: int
    runs: int
    paper: Mapping[str, int | float]
    parameters: int | None
    macs: int | None
    seconds: int | float | None


@dataclass(frozen=True)
class Judged:
    """A claim as a sentence, with its verdict."""

    a: str
    b: str
    metric: str
    text: str
    verdict: Verdict


@dataclass(frozen=True)
class Gate:
    """Whether the baseline is better than every control: True, False, or None if that is not decided."""

    passed: bool | None
    sentence: str


@dataclass(frozen=True)
class Table:
    """Rows, claims and gate of a study. warnings: problems that a reader must know. runs: finished ones."""

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
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    runs: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, root: Path | str, name: str, scale: str) -> "Table":
        """The table of a study in a store. Raises: ConfigError if there is none; StoreError if a file is damaged."""
        snapshot = load_snapshot(root, name, scale)
        return make_table(snapshot, _outcomes(Results(root), snapshot))

    def line(self, label: str) -> Line:
        """The line of a row. Raises: ConfigError for an unknown row."""
        for row in self.rows:
            if row.label == label:
                return row
        raise ConfigError(f"no row {label!r}; {nearest(label, (row.label for row in self.rows))}")

    @property
    def expected_wrong(self) -> float:
        """Expected number of wrong verdicts by chance: 5 % of the judged claims."""
        return 0.05 * sum(claim.verdict.p is not None for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        """The table without its runs as plain data, with unrounded numbers."""
        value = asdict(self)
        del value["runs"]
        for row in value["rows"]:
            if row["difference"] is None:
                del row["difference"]
        value["expected_wrong"] = self.expected_wrong
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
    if not path.exists():
        settings = [f"{study} at {setting} scale" for study, setting in snapshots(root)]
        content = f"it has {', '.join(settings)}" if settings else "it has no study yet"
        raise ConfigError(f"no results of {name} at {scale} scale in {root}; {content}; run or import them first")
    value = read_record(path)
    if not isinstance(value, dict):
        raise StoreError(f"{path} is not a study's snapshot; delete it and run the study again")
    check_snapshot(path, {"study": name, "scale": scale, **value})  # the file's name has both
    return value


def make_table(snapshot: Mapping[str, Any], outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table of a snapshot, with the outcomes of its runs by key."""
    runs = [{**run, "outcome": outcomes[run["key"]]} for run in snapshot["runs"] if run["key"] in outcomes]
    runs, warnings = on_one_device(runs)
    metric, baseline = snapshot["metric"], snapshot["baseline"]
    values = {row["label"]: _values(runs, row["label"], metric) for row in snapshot["rows"]}
    lines = tuple(_line(row, runs, values, baseline, snapshot) for row in snapshot["rows"])
    gate = _gate(lines, values, baseline, metric)
    residual = pooled({line.label: values[line.label] for line in lines if not line.control and not line.failed})
    claims = _judge_all(snapshot, runs, lines, gate, residual)
    warnings += mixture_warnings(runs) + _run_warnings(lines, runs, len(snapshot["runs"]))
    return Table(
        study=snapshot.get("study", ""), title=snapshot.get("title", ""), source=snapshot.get("source", ""),
        scale=snapshot.get("scale", ""), metric=metric, baseline=baseline, caption=_caption(snapshot), gate=gate,
        rows=lines, claims=claims, pooled=residual, warnings=tuple(warnings), notes=_notes(snapshot),
        runs=tuple(run for run in runs if run["outcome"].get("status") == "done"),
    )  # fmt: skip


def sample_values(outcome: Mapping[str, Any], metric: str) -> NDArray[np.float64] | None:
    """What each test sample contributes to a metric, (n,), in its unit; None if that is not recorded.

    Right and wrong images count as 100 and 0 of "top1". Raises: StoreError.
    """
    bits, number = outcome.get("bits") if metric == "top1" else None, (outcome.get("data") or {}).get("test")
    text = bits or (outcome.get("samples") if outcome.get("sampled") == metric else None)
    if not text or not isinstance(number, int):
        return None
    try:
        data = base64.b64decode(text, validate=True)
        values = np.frombuffer(data, np.uint8 if bits else "<f4")
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"the samples of run {outcome.get('key')} are damaged ({error}); run it again") from error
    if len(values) * (8 if bits else 1) < number:
        return None
    return 100 * np.unpackbits(values, count=number).astype(np.float64) if bits else values[:number].astype(np.float64)


def _outcomes(store: Results, snapshot: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    outcomes = {run["key"]: listed_outcome(store, run) for run in snapshot["runs"]}
    return {key: outcome for key, outcome in outcomes.items() if outcome is not None}


def listed_outcome(store: Results, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The outcome of a run that a snapshot lists, None if it has none. Raises: StoreError, also for another seed."""
    outcome = store.outcome(run["key"])
    if outcome is not None:
        check_listed(outcome, run)
    return outcome


def _values(runs: Sequence[Mapping[str, Any]], label: str, metric: str) -> dict[int, float]:
    """The metric of a row's finished runs, by seed."""
    values = {}
    for run in runs:
        value = (run["outcome"].get("metrics") or {}).get(metric)
        if run["row"] == label and run["outcome"].get("status") == "done" and isinstance(value, int | float):
            values[int(run["seed"])] = float(value)
    return values


def _line(
    row: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    values: Mapping[str, Mapping[int, float]],
    baseline: str,
    snapshot: Mapping[str, Any],
) -> Line:
    label = row["label"]
    outcomes = [run["outcome"] for run in runs if run["row"] == label]
    done = [outcome for outcome in outcomes if outcome.get("status") == "done"]
    failed = [outcome for outcome in outcomes if outcome.get("status") != "done"]
    own_interval = interval(list(values[label].values()))
    seconds = [outcome["seconds"] for outcome in done if isinstance(outcome.get("seconds"), int | float)]
    return Line(
        label=label, n=own_interval.n, mean=own_interval.mean, low=own_interval.low,
        high=own_interval.high, sd=own_interval.sd,
        difference=None if label == baseline else paired(values[label], values.get(baseline, {})),
        control=bool(row.get("control")), failed=len(failed), diverged=sum(map(_diverged, failed)),
        at_chance=sum(bool(outcome.get("diverged")) for outcome in done),
        runs=sum(run["row"] == label for run in snapshot["runs"]), paper=dict(row.get("paper") or {}),
        parameters=_count(row, done, "parameters"), macs=_count(row, done, "macs"),
        seconds=sum(seconds) / len(seconds) if seconds else None,
    )  # fmt: skip


def _count(row: Mapping[str, Any], done: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Parameters or MACs: as a run counted them, else as the snapshot has them."""
    value = next((outcome[name] for outcome in done if outcome.get(name) is not None), row.get(name))
    return int(value) if value is not None else None


def _diverged(outcome: Mapping[str, Any]) -> bool:
    """Whether the loss or score of a failed run was not finite. Old outcomes have a step instead of the field."""
    return bool(outcome.get("diverged")) or isinstance(outcome.get("step"), int)


def _gate(lines: Sequence[Line], values: Mapping[str, Mapping[int, float]], baseline: str, metric: str) -> Gate:
    """Passed if the baseline is better than every control, with the whole interval of each difference above zero.

    Not passed if a control is better. If an interval contains zero the gate is open, and the sentence has the
    number of seeds that would decide it.
    """
    controls = [line.label for line in lines if line.control]
    if not controls:
        return Gate(None, "The study has no controls, so it cannot show that mixing tokens helps here.")
    parts: list[str] = []
    states: list[bool | None] = []
    for label in controls:
        difference = paired(values.get(baseline, {}), values[label])
        verdict = judge(difference)
        worse = verdict.word == "contradicted" or (verdict.word == "undecided" and (difference.mean or 0.0) <= 0)
        states.append(False if worse else True if verdict.word == "supported" else None)
        if difference.low is None or difference.high is None:
            parts.append(f"{label}: {seed_pairs(difference.n)}, too few")
        else:
            needed = "" if states[-1] is not None else f" ({verdict.sentence.rpartition('; ')[2]})"
            parts.append(f"{label}: {difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]{needed}")
    passed = False if False in states else None if None in states else True
    word = {True: "passed", False: "not passed", None: "open"}[passed]
    return Gate(passed, f"Gate {word}: {baseline} minus each control in {metric}: {'; '.join(parts)}.")


def _judge_all(
    snapshot: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    lines: Sequence[Line],
    gate: Gate,
    residual: Pooled,
) -> tuple[Judged, ...]:
    scale = snapshot.get("scale", "")
    controls = any(line.control for line in lines)
    refusal = ""
    if controls and gate.passed is not True:
        refusal = "the baseline is not better than every control" if gate.passed is False else "the gate is still open"
    labels = {line.label for line in lines}
    judged = []
    for claim in snapshot.get("claims") or ():
        a, b, metric, than = claim["a"], claim["b"], claim["metric"], claim.get("than") or ()
        if not {a, b, *than} <= labels:
            continue
        use_pooled = snapshot.get("pooled") and metric == snapshot["metric"] and not than
        verdict = judge(
            _difference(runs, (a, b, *than), metric), within=claim.get("within"),
            by=claim.get("by"), scale=scale, refusal=refusal, pooled=residual if use_pooled else None,
            sampling=_sampling(runs, a, b, metric) if not than else None,
        )  # fmt: skip
        failed = sum(line.failed for line in lines if line.label in (a, b, *than))
        if failed:
            text = f"{verdict.sentence}; without {failed} failed run{'s' * (failed > 1)}"
            verdict = replace(verdict, sentence=text)
        judged.append(Judged(a, b, metric, claim_text(claim, scale), verdict))
    return _corrected(judged)


def _difference(runs: Sequence[Mapping[str, Any]], rows: tuple[str, ...], metric: str) -> Interval:
    """a - b of two rows, (a - b) - (c - d) of four, over the seeds that all of them have."""
    values = [_values(runs, row, metric) for row in rows]
    signs = (1, -1, -1, 1)[: len(rows)]
    seeds = sorted(set.intersection(*map(set, values)))
    return interval([sum(sign * row[seed] for sign, row in zip(signs, values, strict=True)) for seed in seeds])


def _corrected(judged: Sequence[Judged]) -> tuple[Judged, ...]:
    """Mark the claims that remain significant after Holm's correction over all judged claims."""
    tested = [i for i, claim in enumerate(judged) if claim.verdict.p is not None]
    significant = dict(zip(tested, holm([judged[i].verdict.p or 0.0 for i in tested]), strict=True))
    corrected = []
    for i, claim in enumerate(judged):
        verdict = claim.verdict
        if i in significant:
            decided = verdict.word in ("supported", "contradicted") and len(tested) > 1
            note = f"; {'survives' if significant[i] else 'does not survive'} Holm's correction" if decided else ""
            verdict = replace(verdict, holm=significant[i], sentence=verdict.sentence + note)
        corrected.append(replace(claim, verdict=verdict))
    return tuple(corrected)


def claim_text(claim: Mapping[str, Any], scale: str) -> str:
    """A claim as a sentence, as it is judged at a scale."""
    a, b, metric = claim["a"], claim["b"], claim["metric"]
    if claim.get("than"):
        return f"{a} is further above {b} than {claim['than'][0]} is above {claim['than'][1]}, in {metric}"
    if claim.get("within") is not None:
        return f"{a} is as good as {b} in {metric}, within {claim['within']:g}"
    text = f"{a} is above {b} in {metric}"
    if claim.get("by") is None:
        return text
    by = f"by at least {claim['by']:g}"
    return f"{text} {by}" if scale == "paper" else f"{text} (direction only; at paper scale {by})"


def _sampling(runs: Sequence[Mapping[str, Any]], a: str, b: str, metric: str) -> float | None:
    """The `sampling_error` of a - b, over the seeds that both rows have."""
    samples: dict[str, dict[int, NDArray[np.float64]]] = {a: {}, b: {}}
    for run in runs:
        if run["row"] in samples and run["outcome"].get("status") == "done":
            values = sample_values(run["outcome"], metric)
            if values is not None:
                samples[run["row"]][int(run["seed"])] = values
    seeds = sorted(samples[a].keys() & samples[b].keys())
    return sampling_error([samples[a][seed] for seed in seeds], [samples[b][seed] for seed in seeds])


def _run_warnings(lines: Sequence[Line], runs: Sequence[Mapping[str, Any]], planned: int) -> list[str]:
    """Diverged and failed runs with their errors, runs at chance, and missing runs."""
    warnings = []
    for line in lines:
        if line.failed:
            failed = [run for run in runs if run["row"] == line.label and run["outcome"].get("status") != "done"]
            warnings += [
                f"{line.label}: {state} {len(errors)}/{line.runs} ({_errors(errors)})"
                for state in ("diverged", "failed")
                if (errors := [run for run in failed if _diverged(run["outcome"]) == (state == "diverged")])
            ]
        if line.at_chance:
            warnings.append(f"{line.label}: at chance {line.at_chance}/{line.runs}")
    missing = [f"{planned - len(runs)} of {planned} runs are missing"] if len(runs) < planned else []
    return warnings + missing


def _errors(runs: Sequence[Mapping[str, Any]]) -> str:
    """The errors of failed runs, each with the seeds that have it."""
    seeds: dict[str, list[int]] = {}
    for run in sorted(runs, key=lambda run: int(run["seed"])):
        seeds.setdefault(str(run["outcome"].get("error") or "no error was recorded"), []).append(run["seed"])
    return "; ".join(
        f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {error}" for error, numbers in seeds.items()
    )


def _caption(snapshot: Mapping[str, Any]) -> str:
    changed = f", changed: {snapshot['variant']}" if snapshot.get("variant") else ""
    data, parts = snapshot.get("data") or {}, [f"{snapshot.get('scale')} scale{changed}"]
    if data.get("name"):
        sizes = (
            f", {data['train']} training and {data['test']} test {data.get('unit', 'images')}"
            if data.get("train")
            else ""
        )
        parts.append(f"{data['name']}{sizes}")
    if snapshot.get("recipe"):
        parts.append(str(snapshot["recipe"]))
    return "; ".join(parts)


def _notes(snapshot: Mapping[str, Any]) -> tuple[str, ...]:
    row_notes = [f"{row['label']}: {note}" for row in snapshot["rows"] for note in row.get("notes") or ()]
    return (*(snapshot.get("notes") or ()), *row_notes)
