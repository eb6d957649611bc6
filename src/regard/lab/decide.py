"""`regard study run --decide`: seeds are added to the rows of undecided claims, until nothing more can be decided."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core import ConfigError
from regard.core.validation import checked
from regard.measure.sequential import Looks, gate_passed, next_pairs
from regard.store.results import Results
from regard.train.run import Run

from .claims import claim_differences, claim_rows, gate_differences, judgeable, row_values
from .comparability import on_one_device
from .executors.base import Place
from .power import missing_seconds, row_seconds
from .progress import Event
from .run_jobs import needs
from .run_study import Execution, execute_jobs, execution, planned_jobs
from .snapshot import removed_if_refused, write_snapshot
from .study import Row, Study
from .table import load_snapshot, snapshot_path
from .tuning import chosen, tuning_runs, with_rates

ENDED = ("done", "failed")


@dataclass(frozen=True)
class Decision:
    """How deciding ended. reason: a sentence. counts: of the runs of this call by state."""

    reason: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class _Plan:
    """seeds: of each row that is needed, by label. runs: with these seeds, of the rows whose rates are chosen. reason:
    why it ends when all these runs have ended."""

    seeds: Mapping[str, int]
    runs: Sequence[tuple[Row, Run]]
    reason: str


@checked
def decide(
    study: Study,
    scale: str,
    store: Results,
    *,
    hours: float | int = 6.0,
    workers: int | None = None,
    compile: bool = False,
    devices: int = 1,
    place: Place | None = None,
    tune: bool | None = None,
    rows: str = "",
    watch: Callable[[Event], None] | None = None,
) -> Decision:
    """Train seeds until every claim is decided, nothing can be decided in the time left, or the hours are spent.

    The interim analyses are stored in the study's snapshot before the first run; a second call goes on with them. First
    the baseline and the controls get seeds, until the gate is passed; then both sides of undecided claims. No run
    begins after `hours`; those that run end. tune: choose the learning rate of every row on a validation part
    (`tuning`) before its first run; None: at desk scale. rows: by label or glob, rows that get their first seeds in any
    case, such as those that no claim names. The others are as in `run_study`.
    Raises: ConfigError for a study whose seeds were fixed when it began, or an unknown row; otherwise as `run_study`.
    """
    if hours <= 0:
        raise ConfigError(f"hours is a positive number, not {hours}")
    how = execution(workers, place, devices, compile)
    tune = scale == "desk" if tune is None else tune
    further = [row.label for row in study.rows(scale, rows)] if rows else []
    with removed_if_refused(study, scale, store):
        return _decide(study, scale, store, hours, how, tune, further, watch)


def _decide(
    study: Study,
    scale: str,
    store: Results,
    hours: float | int,
    how: Execution,
    tune: bool,
    further: Sequence[str],
    watch: Callable[[Event], None] | None,
) -> Decision:
    start, totals = time.monotonic(), dict[str, int]()
    looks = _looks(study, scale, store)
    deadline = start + 3600 * hours
    write_snapshot(study, scale, store, planned=(), looks=looks)
    tuning = tuning_runs(study, scale) if tune else []
    processes = how.place.slots(how.devices)
    while True:
        left = 3600 * hours - (time.monotonic() - start)
        rates = chosen(tuning, store, study.metric)
        tuned = with_rates(study, scale, rates)
        plan = _planned(tuned, scale, store, looks, left * processes, further)
        untuned = [(row, run) for row, run in tuning if row.label in plan.seeds.keys() - rates.keys()]
        if not untuned:
            write_snapshot(tuned, scale, store, planned=plan.runs, looks=looks)
        missing = [(row, run) for row, run in untuned or plan.runs if store.status(run.key) not in ENDED]
        if not missing:
            return Decision(plan.reason, totals)
        if left <= 0:
            return Decision(f"the {hours:g} hours are spent; the same command goes on", totals)
        counts = execute_jobs(planned_jobs(tuned, scale, missing, how.compile), store, how, watch, deadline)
        totals = {state: totals.get(state, 0) + number for state, number in counts.items()}
        if any(number for state, number in counts.items() if state not in ENDED):
            return Decision("runs were stopped; the same command continues them", totals)


def _looks(study: Study, scale: str, store: Results) -> Looks:
    """The stored interim analyses, or new ones for a study without results. Raises: ConfigError."""
    if scale == "smoke":
        raise ConfigError("smoke scale judges no claim: use --decide with --scale desk or paper")
    name = study.setting_name(scale)
    if not snapshot_path(store.root, study.name, name).exists():
        return Looks()
    snapshot = load_snapshot(store.root, study.name, name)
    if snapshot.get("decide") is None:
        if all(store.outcome(run["key"]) is None for run in snapshot["runs"]):
            return Looks()
        raise ConfigError(
            f"{study.name} at {name} scale began with a fixed number of seeds, so its verdicts use Holm's correction; "
            "to add seeds until it is decided, begin it in another folder: --results FOLDER"
        )
    return Looks.from_json(snapshot["decide"])


def _planned(study: Study, scale: str, store: Results, looks: Looks, seconds: float, further: Sequence[str]) -> _Plan:
    """What the next interim analyses need, the runs seed by seed.

    seconds: of the processes in the time left, in which nothing else runs. further: rows that get their first seeds.
    """
    possible = study.runs(scale, seeds=2 * looks.pairs[-1])  # with room for runs that fail
    outcomes = [(row.label, run, store.outcome(run.key)) for row, run in possible]
    ended = [
        {"row": label, "seed": run.seed, "key": run.key, "outcome": outcome}
        for label, run, outcome in outcomes
        if outcome is not None
    ]
    runs, _ = on_one_device(ended)
    rows: list[dict[str, Any]] = [{"label": row.label, "control": row.control} for row in study.rows(scale)]
    snapshot = {"rows": rows, "scale": scale, "claims": [asdict(claim) for claim in study.claims]}
    controls = [row["label"] for row in rows if row["control"]]
    compared = [claim_rows(claim) for claim in judgeable(snapshot)]
    values = {row["label"]: row_values(runs, row["label"], study.metric) for row in rows}
    gate = gate_differences(values, controls, study.baseline)
    reachable = _reachable(looks, compared, runs, _Missing(possible, store), seconds)
    wanted = next_pairs(looks, claim_differences(snapshot, runs), gate, reachable)
    failed = {label: {run["seed"] for run in runs if run["row"] == label and _failed(run)} for label in values}
    numbers = dict.fromkeys(values, 0)
    compared += [(study.baseline, label) for label in controls]
    for labels, pairs in zip(compared, np.concatenate(wanted).tolist(), strict=True):
        seeds = _seeds_for(pairs, [failed[label] for label in labels])
        for label in labels:
            numbers[label] = max(numbers[label], seeds)
    passed = bool(gate_passed(looks, gate))
    if not np.concatenate(wanted).any():
        numbers |= dict.fromkeys(further, looks.pairs[0])
    places = {seed: index for index, seed in enumerate(dict.fromkeys(run.seed for _, run in possible))}
    return _Plan(
        {label: number for label, number in numbers.items() if number},
        [(row, run) for row, run in possible if places[run.seed] < numbers[row.label]],
        "every claim is decided, or has hardly a chance in the analyses and the time left"
        if passed
        else f"{study.baseline} is not shown to be above {' and '.join(controls)}, and more seeds have hardly a chance "
        "to show it: no claim can be judged here",
    )


def _failed(run: Mapping[str, Any]) -> bool:
    return run["outcome"].get("status") != "done"


def _seeds_for(pairs: int, failed: Sequence[set[int]]) -> int:
    """Seeds that give a number of pairs if no further run fails; none where half of them failed."""
    lost = len(set().union(*failed))
    return 0 if lost > pairs else pairs + lost * (pairs > 0)


class _Missing:
    """What the first seeds of rows lack before their own runs can begin: runs that they start or learn from."""

    def __init__(self, possible: Sequence[tuple[Row, Run]], store: Results) -> None:
        needed = [(row.label, {each.key for each in needs(run)}) for row, run in possible]
        outcomes = {key: store.outcome(key) for key in set().union(*(keys for _, keys in needed))}
        seconds = [float(outcome.get("seconds") or 0.0) for outcome in outcomes.values() if outcome is not None]
        self.mean = fmean(seconds) if seconds else 0.0
        self.keys: dict[str, list[set[str]]] = {}
        for label, keys in needed:
            self.keys.setdefault(label, []).append({key for key in keys if outcomes[key] is None})

    def seconds(self, labels: Sequence[str], seeds: int) -> float:
        """Of the missing ones, each counted once, by the mean of those that are there."""
        return self.mean * len(set().union(*(keys for label in labels for keys in self.keys[label][:seeds])))


def _reachable(
    looks: Looks,
    compared: Sequence[tuple[str, ...]],
    runs: Sequence[Mapping[str, Any]],
    needed: _Missing,
    seconds: float,
) -> NDArray[np.int64]:
    """The largest interim analysis that each claim can reach alone in so many seconds of the processes.

    A row without finished runs takes the mean of the others; without any, every analysis counts as reachable.
    """
    each, counts = row_seconds(list(needed.keys), runs)

    def lacks(labels: tuple[str, ...], pairs: int) -> float:
        return missing_seconds(labels, pairs, each, counts) + needed.seconds(labels, pairs)

    reachable = [
        max((pairs for pairs in looks.pairs if lacks(labels, pairs) <= seconds), default=0) for labels in compared
    ]
    return np.array(reachable, np.int64)
