"""`regard study run --decide`: seeds are added to the rows of undecided claims, until nothing more can be decided."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core import ConfigError
from regard.core.validation import check_arguments
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks, gate_passed, next_pairs
from regard.lab.train.environment import resolved_device
from regard.lab.train.run import Run
from regard.lab.train.sources import warn_of_edits

from .claims import analysed_runs, claim_differences, claim_rows, gate_differences, judgeable, row_values, stored_looks
from .comparability import device_type, on_one_device
from .estimate import estimate
from .executors.base import Place
from .jobs import ENDED
from .power import missing_seconds, row_seconds
from .progress import Event
from .run_jobs import needs
from .run_study import Execution, check_jobs, execute_jobs, execution, planned_jobs, reset
from .snapshot import key_now, undo_if_refused, write_snapshot
from .study import Row, Study
from .table import stored_snapshot
from .tuning import choose_rates, tuning_runs, with_rates


@dataclass(frozen=True)
class Decision:
    """How deciding ended. reason: a sentence. counts: of the runs of this call by state."""

    reason: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class _Plan:
    """labels: the rows that are needed next. runs: of these, and of rows that have some already. reason: why it ends
    when all these runs have ended."""

    labels: Set[str]
    runs: Sequence[tuple[Row, Run]]
    reason: str


@check_arguments
def decide(
    study: Study, scale: str, store: Results, *, hours: float | int = 6.0, workers: int | None = None,
    compile: bool = False, devices: int = 1, place: Place | None = None, tune: bool | None = None, rows: str = "",
    retry: bool = False, watch: Callable[[Event], None] | None = None,
) -> Decision:  # fmt: skip
    """Train seeds until every claim is decided, nothing can be decided in the time left, or the hours are spent.

    The interim analyses are stored in the study's snapshot before the first run; a second call goes on with them. First
    the baseline and the controls get seeds, until the gate is passed; then both sides of undecided claims, those first
    whose next analysis takes the least time. No run begins after `hours`; those that run end. tune: choose the learning
    rate of every row on a validation part (`tuning`) before its first run; None: at desk scale. rows: by label or glob,
    rows that get their first seeds in any case, such as those that no claim names. The others are as in `run_study`.
    Raises: ConfigError for a study whose seeds were fixed when it began, for one whose claims or runs are not those of
    its first analyses, and for an unknown row; otherwise as `run_study`.
    """
    if hours <= 0:
        raise ConfigError(f"hours is a positive number, not {hours}")
    how = execution(workers, place, devices, compile)
    tune = scale == "desk" if tune is None else tune
    further = [row.label for row in study.rows(scale, rows)] if rows else []
    check_jobs(study, scale, planned_jobs(study, scale, study.runs(scale, seeds=1)), how)
    with undo_if_refused(study, scale, store):
        looks, tuning = _looks(study, scale, store), _Tuning(study, scale, store, tune)
        tuning.check_unchanged(tuning.study())
        if how.place.here:
            tuning.check_device()
        write_snapshot(study, scale, store, planned=(), looks=looks)
        warn_of_edits([run for _, run in tuning.study().runs(scale)], store)
        if retry:
            tuning.retry(looks)
        return _decide(tuning, looks, hours, how, further, watch)


def _decide(
    tuning: "_Tuning", looks: Looks, hours: float | int, how: Execution, further: Sequence[str],
    watch: Callable[[Event], None] | None,
) -> Decision:  # fmt: skip
    start, totals = time.monotonic(), dict[str, int]()
    scale, store, processes = tuning.scale, tuning.store, how.place.slots(how.devices)
    while True:
        left = 3600 * hours - (time.monotonic() - start)
        study = tuning.study()
        plan = _plan_runs(study, scale, store, looks, left, processes, further)
        untuned = tuning.runs_for(plan.labels)
        if not untuned:
            tuning.check_unchanged(study)
            write_snapshot(study, scale, store, planned=plan.runs, looks=looks)
        missing = [(row, run) for row, run in untuned or plan.runs if store.status(run.key) not in ENDED]
        if not missing:
            return Decision(plan.reason, totals)
        if left <= 0:
            return Decision(f"the {hours:g} hours are spent; the same command goes on", totals)
        jobs = planned_jobs(study, scale, missing, how.compile)
        counts = execute_jobs(jobs, store, how, watch, start + 3600 * hours)
        totals = {state: totals.get(state, 0) + number for state, number in counts.items()}
        if others := {state: number for state, number in counts.items() if number and state not in ENDED}:
            busy = "another process executes runs of it; the same command goes on when they have ended"
            stopped = "runs were stopped; the same command continues them"
            return Decision(busy if set(others) == {"busy"} else stopped, totals)


class _Tuning:
    """The learning rates of a study's rows: of rows that have runs, those of these runs; of others, chosen first."""

    def __init__(self, study: Study, scale: str, store: Results, tune: bool) -> None:
        self.plain, self.scale, self.store = study, scale, store
        self.runs = tuning_runs(study, scale) if tune else []
        snapshot = stored_snapshot(store.root, study.name, study.setting_name(scale)) or {"runs": []}
        self.listed = [run for run in snapshot["runs"] if store.outcome(run["key"]) is not None]
        self.as_they_are = {run["row"] for run in self.listed if key_now(study, scale, run) == run["key"]}

    def study(self) -> Study:
        """The study with the rates that are chosen."""
        return with_rates(self.plain, self.scale, choose_rates(self.runs, self.store, self.plain.metric))

    def runs_for(self, labels: Set[str]) -> list[tuple[Row, Run]]:
        """The runs that choose the rates of these rows, where they have not ended and no run has a rate yet."""
        known = choose_rates(self.runs, self.store, self.plain.metric).keys() | self.as_they_are
        return [(row, run) for row, run in self.runs if row.label in labels - known]

    def retry(self, looks: Looks) -> None:
        """Reopen failed runs; those that choose the rate of a row only while no run has it.

        A run stays failed where its row has later seeds and had an analysis, which would otherwise change.
        """
        done = Counter(
            run["row"] for run in self.listed if (self.store.outcome(run["key"]) or {}).get("status") == "done"
        )
        reset([run for row, run in self.runs if row.label not in done], self.store, False)
        later, open_again = set[str](), list[Run]()
        for row, run in reversed(self.study().runs(self.scale, seeds=2 * looks.pairs[-1])):
            if self.store.status(run.key) == "done":
                later.add(row.label)
            elif row.label not in later or done[row.label] < looks.pairs[0]:
                open_again.append(run)
        reset(open_again[::-1], self.store, False)

    def check_device(self) -> None:
        """Raises: ConfigError if the finished runs are of another type of device than this machine would use."""
        outcomes = [self.store.outcome(run["key"]) or {} for run in self.listed]
        types = {device_type(outcome) for outcome in outcomes if outcome.get("environment")}
        here = device_type({"environment": {"device": resolved_device("auto")}})
        if types and here not in types:
            raise ConfigError(
                f"{self.plain.name} was begun on {' and '.join(types)}, this machine would go on on {here}, and an "
                "interval never mixes types of devices: go on there, or begin it in another folder: --results FOLDER"
            )

    def check_unchanged(self, study: Study) -> None:
        """Raises: ConfigError if a run that was tested is not one of the study any more."""
        for run in self.listed:
            if key_now(study, self.scale, run) != run["key"]:
                raise ConfigError(
                    f"{study.name} is not what it was at its first interim analysis: row {run['row']}, seed "
                    f"{run['seed']} is another run now, by its task, recipe, mechanism or learning rate. To test new "
                    "runs under the same error level would break it; carry it out again in another folder: --results "
                    "FOLDER"
                )


def _looks(study: Study, scale: str, store: Results) -> Looks:
    """The stored interim analyses, or new ones for a study without results. Raises: ConfigError."""
    if scale == "smoke":
        raise ConfigError("smoke scale judges no claim: use --decide with --scale desk or paper")
    name = study.setting_name(scale)
    snapshot = stored_snapshot(store.root, study.name, name) or {"runs": []}
    looks = stored_looks(snapshot)
    if looks is None and any(store.outcome(run["key"]) is not None for run in snapshot["runs"]):
        raise ConfigError(
            f"{study.name} at {name} scale began with a fixed number of seeds, so its verdicts use Holm's correction; "
            "to add seeds until it is decided, begin it in another folder: --results FOLDER"
        )
    return looks or Looks()


def _plan_runs(
    study: Study, scale: str, store: Results, looks: Looks, left: float, processes: int, further: Sequence[str]
) -> _Plan:
    """The runs of the next interim analyses, seed by seed: of the cheapest ones that keep all processes busy.

    left: seconds, in which nothing else runs. further: rows that get their first seeds at last.
    """
    possible = study.runs(scale, seeds=2 * looks.pairs[-1])  # with room for runs that fail
    outcomes = {run.key: store.outcome(run.key) for _, run in possible}
    ended = [
        {"row": row.label, "seed": run.seed, "key": run.key, "outcome": outcomes[run.key]}
        for row, run in possible
        if outcomes[run.key] is not None
    ]
    runs, mixed = on_one_device(ended)
    rows: list[dict[str, Any]] = [{"label": row.label, "control": row.control} for row in study.rows(scale)]
    snapshot = {"rows": rows, "scale": scale, "claims": [asdict(claim) for claim in study.claims]}
    controls = [row["label"] for row in rows if row["control"]]
    claims = [claim_rows(claim) for claim in judgeable(snapshot)]
    compared = [*claims, *((study.baseline, label) for label in controls)]

    first = analysed_runs([{"row": row.label, "seed": run.seed} for row, run in possible], ended, runs)
    values = {row["label"]: row_values(first, row["label"], study.metric) for row in rows}
    gate = gate_differences(values, controls, study.baseline)
    passed = bool(gate_passed(looks, gate))
    times = _Times(
        possible, store, runs, _estimated_seconds(study, scale, store, claims, runs, processes) if passed else {}
    )
    reachable = _reachable(looks, claims, times, left * processes)
    pairs = np.concatenate(next_pairs(looks, claim_differences(snapshot, first), gate, reachable)).tolist()
    ends = [(run["row"], run["seed"]) for run in runs if run["outcome"].get("status") != "done"]
    failed = {label: {seed for row, seed in ends if row == label} for label in values}
    asked = [
        (labels, _seeds_for(number, [failed[label] for label in labels]))
        for labels, number in zip(compared, pairs, strict=True)
        if number
    ]

    needed = [(labels, seeds) for labels, seeds in asked if seeds]
    needed = needed or [((label,), looks.pairs[0]) for label in further]
    seeds = _cheapest(
        sorted(needed, key=lambda each: times.remaining_seconds(*each)),
        order=list(dict.fromkeys(run.seed for _, run in possible)),
        missing=[(row.label, run.seed) for row, run in possible if outcomes[run.key] is None],
        most=2 * processes,
    )
    listed = {label for labels in compared for label in labels} | set(further)
    planned = [
        (row, run)
        for row, run in possible
        if run.seed in seeds.get(row.label, ()) or (row.label in listed and outcomes[run.key] is not None)
    ]
    lost = {label: len(failed[label]) for labels, number in asked if not number for label in labels if failed[label]}
    reason = _reason(study.baseline, controls, passed, dict(sorted(lost.items())), mixed if asked else ())
    return _Plan(seeds.keys(), planned, reason)


def _cheapest(
    needed: Sequence[tuple[Sequence[str], int]], order: Sequence[int], missing: Sequence[tuple[str, int]], most: int
) -> dict[str, Sequence[int]]:
    """The seeds of each row: of the comparisons in `needed`, one after another, until `most` runs are missing.

    needed: rows and their number of seeds, the cheapest first. order: of the seeds. missing: runs, as row and seed.
    """
    seeds: dict[str, Sequence[int]] = {}
    for labels, number in needed:
        if sum(seed in seeds.get(label, ()) for label, seed in missing) >= most:
            break
        seeds |= {label: order[: max(number, len(seeds.get(label, ())))] for label in labels}
    return seeds


def _reason(baseline: str, controls: Sequence[str], passed: bool, lost: Mapping[str, int], mixed: Sequence[str]) -> str:
    """Why nothing is left to be trained. lost: failed runs of rows that nothing can be decided with. mixed: that runs
    of another device, which are there, do not count."""
    if mixed:
        return f"{mixed[0]}, so only further seeds of the first type would count"
    if lost:
        rows = ", ".join(f"{number} of {label}" for label, number in lost.items())
        return f"too many runs failed ({rows}); --retry repeats them"
    if passed:
        return "every claim is decided, or has hardly a chance in the analyses and the time left"
    return (
        f"{baseline} is not shown to be above {' and '.join(controls)}, and more seeds have hardly a chance to show "
        "it: no claim can be judged here"
    )


def _seeds_for(pairs: int, failed: Sequence[set[int]]) -> int:
    """Seeds that give a number of pairs if no further run fails; none where half of them failed."""
    lost = len(set().union(*failed))
    return 0 if lost > pairs else pairs + lost


def _estimated_seconds(
    study: Study, scale: str, store: Results, claims: Sequence[tuple[str, ...]], runs: Sequence[Mapping[str, Any]],
    processes: int,
) -> dict[str, float]:  # fmt: skip
    """The estimated seconds of a run of the rows of claims that have none, at desk scale: from a few timed steps."""
    new = {label for labels in claims for label in labels} - {run["row"] for run in runs}
    rows = [row for row in study.rows(scale) if row.label in new]
    timed = estimate(study, scale, store, processes, rows=rows) if scale == "desk" and len(claims) > 1 else {}
    return {label: seconds for (label, part), seconds in timed.items() if part == 0}


class _Times:
    """What further seeds of rows take, with the runs that they start or learn from.

    estimated: seconds of a run of rows without finished ones; others take the mean of all rows.
    """

    def __init__(
        self, possible: Sequence[tuple[Row, Run]], store: Results, runs: Sequence[Mapping[str, Any]],
        estimated: Mapping[str, float],
    ) -> None:  # fmt: skip
        labels = list(dict.fromkeys(row.label for row, _ in possible))
        self.each, self.counts = row_seconds(labels, runs)
        self.each |= {label: seconds for label, seconds in estimated.items() if not self.counts[label]}
        needed = [(row.label, {each.key for each in needs(run)}) for row, run in possible]
        outcomes = {key: store.outcome(key) for key in set().union(*(keys for _, keys in needed))}
        seconds = [float(outcome.get("seconds") or 0.0) for outcome in outcomes.values() if outcome is not None]
        self.mean = fmean(seconds) if seconds else 0.0
        self.keys: dict[str, list[set[str]]] = {}
        for label, keys in needed:
            self.keys.setdefault(label, []).append({key for key in keys if outcomes[key] is None})

    def remaining_seconds(self, labels: Sequence[str], seeds: int) -> float:
        """Seconds of the runs that rows lack to a number of seeds; runs that they need first count once each."""
        first = set().union(*(keys for label in labels for keys in self.keys[label][:seeds]))
        return missing_seconds(labels, seeds, self.each, self.counts) + self.mean * len(first)


def _reachable(looks: Looks, claims: Sequence[tuple[str, ...]], times: _Times, seconds: float) -> NDArray[np.int64]:
    """The largest interim analysis that each claim can reach alone in so many seconds of the processes."""
    in_time = [
        [pairs for pairs in looks.pairs if times.remaining_seconds(labels, pairs) <= seconds] for labels in claims
    ]
    return np.array([max(pairs, default=0) for pairs in in_time], np.int64)
