"""Table: what the store says about one study at one scale, with its gate and its claims judged. Needs no torch.

It is made from the study's snapshot and the outcomes of its runs, and can be made again at any time.
"""

import base64
import binascii
from collections import Counter
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
from regard.store.files import read_json
from regard.store.import_checks import check_snapshot
from regard.store.results import UNSAID, Results


@dataclass(frozen=True)
class Line:
    """One row: n finished runs, their mean and interval, and the difference to the baseline (None for the baseline).

    failed: runs that ended without a result; diverged: those of them whose loss or score was not finite. at_chance:
    finished runs that are no better than guessing.
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
    """A claim in words, with its verdict."""

    a: str
    b: str
    metric: str
    text: str
    verdict: Verdict


@dataclass(frozen=True)
class Gate:
    """Whether the baseline beats every control: True, False, or None where that cannot be told."""

    passed: bool | None
    sentence: str


@dataclass(frozen=True)
class Table:
    """Rows, claims and gate of a study. warnings: what a reader must know first. runs: one entry a finished run."""

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
        """Raises: ConfigError if the store has nothing of this study and scale; StoreError if a file is damaged."""
        snapshot = load_snapshot(root, name, scale)
        return make_table(snapshot, _outcomes(Results(root), snapshot))

    def line(self, label: str) -> Line:
        """Raises: ConfigError for an unknown row."""
        for row in self.rows:
            if row.label == label:
                return row
        raise ConfigError(f"no row {label!r}; {nearest(label, (row.label for row in self.rows))}")

    @property
    def expected_wrong(self) -> float:
        """How many of the judged claims would come out wrong by chance: 5 % of each."""
        return 0.05 * sum(claim.verdict.p is not None for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers in full."""
        plain = asdict(self)
        del plain["runs"]
        for row in plain["rows"]:
            if row["difference"] is None:
                del row["difference"]
        plain["expected_wrong"] = self.expected_wrong
        return plain


def snapshot_path(root: Path | str, name: str, scale: str) -> Path:
    """Where a study's snapshot lies. scale: "desk", or with changes "desk+cifar10" (see `regard.store.layout`)."""
    return Path(root) / "studies" / f"{name}-{scale}.json"


def snapshots(root: Path | str) -> list[tuple[str, str]]:
    """(study, scale with changes) of every snapshot in a store."""
    found = sorted((Path(root) / "studies").glob("*-*.json"))
    return [(path.stem.rpartition("-")[0], path.stem.rpartition("-")[2]) for path in found]


def load_snapshot(root: Path | str, name: str, scale: str) -> dict[str, Any]:
    """Raises: ConfigError if there is none (with what there is); StoreError if it is damaged."""
    path = snapshot_path(root, name, scale)
    if not path.exists():
        known = [f"{study} at {size} scale" for study, size in snapshots(root)]
        has = f"it has {', '.join(known)}" if known else "it has no study yet"
        raise ConfigError(f"no results of {name} at {scale} scale in {root}; {has}; run or import them first")
    value = read_json(path)
    if not isinstance(value, dict):
        raise StoreError(f"{path} is not a study's snapshot; delete it and run the study again")
    check_snapshot(path, {"study": name, "scale": scale, **value})  # the file's name says both
    return value


def make_table(snapshot: Mapping[str, Any], outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table from a snapshot and the outcomes by key."""
    warnings: list[str] = []
    runs = [{**run, "outcome": outcomes[run["key"]]} for run in snapshot["runs"] if run["key"] in outcomes]
    runs = _one_device(runs, warnings)
    metric, baseline = snapshot["metric"], snapshot["baseline"]
    values = {row["label"]: _values(runs, row["label"], metric) for row in snapshot["rows"]}
    lines = tuple(_line(row, runs, values, baseline, snapshot) for row in snapshot["rows"])
    gate = _gate(lines, values, baseline, metric)
    residual = pooled({line.label: values[line.label] for line in lines if not line.control and not line.failed})
    claims = _judge_all(snapshot, runs, lines, gate, residual)
    warnings += _mixtures(runs) + _losses(lines, len(snapshot["runs"]), len(runs))
    return Table(
        study=snapshot.get("study", ""), title=snapshot.get("title", ""), source=snapshot.get("source", ""),
        scale=snapshot.get("scale", ""), metric=metric, baseline=baseline, caption=_caption(snapshot), gate=gate,
        rows=lines, claims=claims, pooled=residual, warnings=tuple(warnings), notes=_notes(snapshot),
        runs=tuple(run for run in runs if run["outcome"].get("status") == "done"),
    )  # fmt: skip


def right_bits(outcome: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    """Which test images a run had right, as it recorded them; None if it did not."""
    text, number = outcome.get("bits"), (outcome.get("data") or {}).get("test")
    if not text or not isinstance(number, int):
        return None
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"the bits of run {outcome.get('key')} are damaged ({error}); run it again") from error
    if len(packed) * 8 < number:
        return None
    return np.unpackbits(packed, count=number).astype(bool)


def _outcomes(store: Results, snapshot: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = {run["key"]: store.outcome(run["key"]) for run in snapshot["runs"]}
    return {key: outcome for key, outcome in found.items() if outcome is not None}


def _one_device(runs: list[dict[str, Any]], warnings: list[str]) -> list[dict[str, Any]]:
    """Seeds of the CPU and of a GPU never stand in one interval: the kind of device with most runs is kept."""
    kinds = Counter(_device(run["outcome"]) for run in runs if run["outcome"].get("status") == "done")
    if len(kinds) < 2:
        return runs
    kept = kinds.most_common(1)[0][0]
    left = ", ".join(f"{number} on {kind}" for kind, number in sorted(kinds.items()) if kind != kept)
    warnings.append(f"only runs on {kept} are in the table; left out: {left} (devices are never mixed in an interval)")
    return [run for run in runs if _device(run["outcome"]) == kept]


def _device(outcome: Mapping[str, Any]) -> str:
    text = str((outcome.get("environment") or {}).get("device") or "cpu").lower()
    return "cpu" if text.startswith("cpu") else "a GPU"


def _values(runs: Sequence[Mapping[str, Any]], label: str, metric: str) -> dict[int, float]:
    """Metric by seed of a row's finished runs."""
    found = {}
    for run in runs:
        value = (run["outcome"].get("metrics") or {}).get(metric)
        if run["row"] == label and run["outcome"].get("status") == "done" and isinstance(value, int | float):
            found[int(run["seed"])] = float(value)
    return found


def _line(
    row: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    values: Mapping[str, Mapping[int, float]],
    baseline: str,
    snapshot: Mapping[str, Any],
) -> Line:
    label = row["label"]
    own = [run["outcome"] for run in runs if run["row"] == label]
    done = [outcome for outcome in own if outcome.get("status") == "done"]
    lost = [outcome for outcome in own if outcome.get("status") != "done"]
    whole = interval(list(values[label].values()))
    seconds = [outcome["seconds"] for outcome in done if isinstance(outcome.get("seconds"), int | float)]
    return Line(
        label=label, n=whole.n, mean=whole.mean, low=whole.low, high=whole.high, sd=whole.sd,
        difference=None if label == baseline else paired(values[label], values.get(baseline, {})),
        control=bool(row.get("control")), failed=len(lost), diverged=sum(map(_diverged, lost)),
        at_chance=sum(bool(outcome.get("diverged")) for outcome in done),
        runs=sum(run["row"] == label for run in snapshot["runs"]), paper=dict(row.get("paper") or {}),
        parameters=_known(row, done, "parameters"), macs=_known(row, done, "macs"),
        seconds=sum(seconds) / len(seconds) if seconds else None,
    )  # fmt: skip


def _known(row: Mapping[str, Any], done: Sequence[Mapping[str, Any]], name: str) -> int | None:
    value = next((outcome[name] for outcome in done if outcome.get(name) is not None), row.get(name))
    return int(value) if value is not None else None


def _diverged(outcome: Mapping[str, Any]) -> bool:
    """A failed run whose loss or score was not finite. Outcomes of before they said so have a step only then."""
    return bool(outcome.get("diverged")) or isinstance(outcome.get("step"), int)


def _gate(lines: Sequence[Line], values: Mapping[str, Mapping[int, float]], baseline: str, metric: str) -> Gate:
    """The baseline has to beat every control, with the whole interval of the difference above zero. A control that is
    ahead closes the gate; an interval around zero leaves it open, with the number of seeds that would decide."""
    controls = [line.label for line in lines if line.control]
    if not controls:
        return Gate(None, "The study has no controls: nothing shows that mixing tokens helps here.")
    parts: list[str] = []
    states: list[bool | None] = []
    for label in controls:
        ahead = paired(values.get(baseline, {}), values[label])
        verdict = judge(ahead)
        behind = verdict.word == "contradicted" or (verdict.word == "undecided" and (ahead.mean or 0.0) <= 0)
        states.append(False if behind else True if verdict.word == "supported" else None)
        if ahead.low is None or ahead.high is None:
            parts.append(f"{label}: {seed_pairs(ahead.n)}, too few")
        else:
            price = "" if states[-1] is not None else f" ({verdict.sentence.rpartition('; ')[2]})"
            parts.append(f"{label}: {ahead.mean:+.1f} [{ahead.low:+.1f}, {ahead.high:+.1f}]{price}")
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
        refusal = "the baseline does not beat both controls" if gate.passed is False else "the gate is still open"
    labels = {line.label for line in lines}
    judged = []
    for claim in snapshot.get("claims") or ():
        a, b, metric, than = claim["a"], claim["b"], claim["metric"], claim.get("than") or ()
        if not {a, b, *than} <= labels:
            continue
        pools = snapshot.get("pooled") and metric == snapshot["metric"] and not than
        verdict = judge(
            _claimed(runs, (a, b, *than), metric), within=claim.get("within"),
            by=claim.get("by"), scale=scale, refusal=refusal, pooled=residual if pools else None,
            sampling=_sampling(runs, a, b) if metric == "top1" and not than else None,
        )  # fmt: skip
        lost = sum(line.failed for line in lines if line.label in (a, b, *than))
        if lost:
            runs_lost = f"{lost} run{'s' * (lost > 1)} that failed"
            verdict = replace(verdict, sentence=f"{verdict.sentence}; without {runs_lost}")
        judged.append(Judged(a, b, metric, claim_text(claim, scale), verdict))
    return _corrected(judged)


def _claimed(runs: Sequence[Mapping[str, Any]], rows: tuple[str, ...], metric: str) -> Interval:
    """First row minus second, and of four rows minus (third minus fourth), over the seeds that all have."""
    values = [_values(runs, row, metric) for row in rows]
    signs = (1, -1, -1, 1)[: len(rows)]
    seeds = sorted(set.intersection(*map(set, values)))
    return interval([sum(sign * row[seed] for sign, row in zip(signs, values, strict=True)) for seed in seeds])


def _corrected(judged: Sequence[Judged]) -> tuple[Judged, ...]:
    """Mark the claims that survive Holm's correction over all that were judged."""
    places = [i for i, claim in enumerate(judged) if claim.verdict.p is not None]
    kept = dict(zip(places, holm([judged[i].verdict.p or 0.0 for i in places]), strict=True))
    marked = []
    for i, claim in enumerate(judged):
        verdict = claim.verdict
        if i in kept:
            decided = verdict.word in ("supported", "contradicted") and len(places) > 1
            said = f"; {'survives' if kept[i] else 'does not survive'} Holm's correction" if decided else ""
            verdict = replace(verdict, holm=kept[i], sentence=verdict.sentence + said)
        marked.append(replace(claim, verdict=verdict))
    return tuple(marked)


def claim_text(claim: Mapping[str, Any], scale: str) -> str:
    """A claim's fields in words, as they are judged at a scale."""
    a, b, metric = claim["a"], claim["b"], claim["metric"]
    if claim.get("than"):
        return f"{a} is further above {b} than {claim['than'][0]} is above {claim['than'][1]}, in {metric}"
    if claim.get("within") is not None:
        return f"{a} is as good as {b} in {metric}, within {claim['within']:g}"
    text = f"{a} is above {b} in {metric}"
    if claim.get("by") is None:
        return text
    by = f"by at least {claim['by']:g}"
    return f"{text} {by}" if scale == "paper" else f"{text} (direction alone; at paper scale {by})"


def _sampling(runs: Sequence[Mapping[str, Any]], a: str, b: str) -> float | None:
    """The error of the test sample, from the bits of the seeds that both rows have."""
    bits: dict[str, dict[int, NDArray[np.bool_]]] = {a: {}, b: {}}
    for run in runs:
        if run["row"] in bits and run["outcome"].get("status") == "done":
            found = right_bits(run["outcome"])
            if found is not None:
                bits[run["row"]][int(run["seed"])] = found
    seeds = sorted(bits[a].keys() & bits[b].keys())
    return sampling_error([bits[a][seed] for seed in seeds], [bits[b][seed] for seed in seeds])


def _mixtures(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which machines, ways of computing, code versions, data and precisions stand in one table. What an outcome does
    not say is not counted."""
    done = [run["outcome"] for run in runs if run["outcome"].get("status") == "done"]

    def several(what: str, found: Sequence[Any]) -> list[str]:
        kinds = Counter(_plain(value) for value in found if value is not None)
        if len(kinds) < 2:
            return []
        parts = (f"{kind} ({number} run{'s' * (number > 1)})" for kind, number in kinds.items())
        return [f"the table mixes {what}: {', '.join(parts)}"]

    surroundings = [outcome.get("environment") or {} for outcome in done]
    warnings = several("code versions", [outcome.get("code") for outcome in done])
    warnings += several("machines", [_machine(one) for one in surroundings])
    for what, name in _SURROUNDINGS.items():
        warnings += several(what, [said(one, name) for one in surroundings])
    return warnings + several("data checksums", [(outcome.get("data") or {}).get("checksum") for outcome in done])


def _plain(value: Any) -> str:
    return str(value) if not isinstance(value, bool) else "with" if value else "without"


def said(surroundings: Mapping[str, Any], name: str) -> Any:
    """What an outcome says of its surroundings."""
    return surroundings.get(name, UNSAID.get(name) if surroundings else None)


_SURROUNDINGS = {
    "devices": "device", "numbers of devices": "devices", "numbers of threads": "threads",
    "runs with and without compiled kernels": "compiled kernels",
    "runs with and without torch.compile": "torch.compile",
    "precisions": "precision", "torch versions": "torch",
}  # fmt: skip


def _machine(surroundings: Mapping[str, Any]) -> str | None:
    """System and processor, or GPU."""
    return " with ".join(str(surroundings[name]) for name in ("machine", "processor") if surroundings.get(name)) or None


def _losses(lines: Sequence[Line], planned: int, there: int) -> list[str]:
    kinds = {
        "diverged": lambda line: line.diverged,
        "at chance": lambda line: line.at_chance,
        "failed": lambda line: line.failed - line.diverged,
    }
    said = [f"{line.label}: {kind} {n}/{line.runs}" for kind, of in kinds.items() for line in lines if (n := of(line))]
    return [*said, f"{planned - there} of {planned} runs are still missing"] if there < planned else said


def _caption(snapshot: Mapping[str, Any]) -> str:
    changed = f", changed: {snapshot['variant']}" if snapshot.get("variant") else ""
    data, parts = snapshot.get("data") or {}, [f"{snapshot.get('scale')} scale{changed}"]
    if data.get("name"):
        sizes = f", {data['train']} training and {data['test']} test images" if data.get("train") else ""
        parts.append(f"{data['name']}{sizes}")
    if snapshot.get("recipe"):
        parts.append(str(snapshot["recipe"]))
    return "; ".join(parts)


def _notes(snapshot: Mapping[str, Any]) -> tuple[str, ...]:
    own = [f"{row['label']}: {note}" for row in snapshot["rows"] for note in row.get("notes") or ()]
    return (*(snapshot.get("notes") or ()), *own)
