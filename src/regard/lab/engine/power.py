"""What a study can decide, from its pilot seeds: deviations of paired differences, seeds and hours. Needs no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.core import ConfigError
from regard.lab.statistics.sequential import Looks
from regard.measure.intervals import FEWEST, LEVEL, decided_difference, deviation_bounds, interval, power, seeds_needed

from .claims import claim_rows, claim_text, differences, judgeable
from .table import Table, load_snapshot

DECIDED = ("supported", "contradicted")
MOST = 200
"""Seeds of a row that are thought of."""
SEEDS = (3, 5, 8, 12)
"""Numbers of seeds for which the smallest difference is computed that they decide."""


@dataclass(frozen=True)
class Prospect:
    """What is known of one claim, or of the baseline against a control, before more seeds are trained.

    - pilot: the number of its paired seeds.
    - mean, sd: of their differences; low, high: the 95 % interval of the deviation.
    - target: the observed distance from what the claim has to exclude.
    - decides: by number of seeds, the difference that they decide with 80 % probability; of interim analyses, each at
      its own level.
    - seeds: the number that decides the observed difference; None above `most`, and where the pilot's differences are
      all equal, of which no deviation follows. hours: for these seeds.
    - reachable: the seeds in the hours given; chance: that they decide the observed difference. None without hours.
    - of_gate: whether it is of the baseline against a control.
    - decided: whether the seeds that are there decide it; then there is nothing left to train.
    - most: the seeds that are possible, those of the last analysis where seeds are added until claims are decided.
    """

    text: str
    pilot: int
    mean: float
    sd: float
    low: float
    high: float
    target: float
    decides: Mapping[int, float]
    seeds: int | None
    hours: float | None
    reachable: int | None = None
    chance: float | None = None
    of_gate: bool = False
    decided: bool = False
    most: int = MOST


def prospects(
    root: Path | str, name: str, scale: str, *, hours: float | None = None, workers: int = 1
) -> list[Prospect]:
    """The prospects of the gate, then of the claims, from the finished runs of a study.

    Claims are tested at 5 % divided by their number (the first step of Holm's correction), the gate at 5 %. hours: all
    undecided claims then get the same number of seeds, as far as the time suffices on `workers` processes.
    Raises: ConfigError without two finished pairs of any claim; StoreError.
    """
    snapshot, table = load_snapshot(root, name, scale), Table.load(root, name, scale)
    runs, looks = table.runs, table.looks
    compared = _comparisons(snapshot, judgeable(snapshot), table)
    seconds, counts = row_seconds([row["label"] for row in snapshot["rows"]], runs)
    reachable = None
    if hours is not None:
        rows, budget = {row for each in compared if not each.decided for row in each.rows}, 3600 * hours * workers
        in_time = (n for n in range(1, MOST + 1) if missing_seconds(rows, n, seconds, counts) <= budget)
        reachable = max(in_time, default=0)
    found = []
    for each in compared:
        values = list(differences(runs, each.rows, each.metric).values())
        if len(values) >= 2:
            found.append(_prospect(each, values, seconds, counts, workers, reachable, looks))
    if not found:
        raise ConfigError(
            f"{name} has no pilot at {scale} scale in {root}: no claim has two finished seeds of both its rows; "
            f"run some first: regard study run {name} --scale {scale} --seeds 3"
        )
    return found


@dataclass(frozen=True)
class _Compared:
    """A comparison of two or four rows, which is tested at a level: that the difference is above `by`, or within the
    margin."""

    text: str
    rows: tuple[str, ...]
    metric: str
    level: float
    within: float | None = None
    by: float = 0.0
    of_gate: bool = False
    decided: bool = False

    def target(self, mean: float) -> float:
        """The distance of a difference from what the claim has to exclude."""
        return abs(mean - self.by) if self.within is None else abs(self.within - abs(mean))

    def other(self, mean: float) -> float:
        """For a difference inside the margin, the distance from its farther edge; otherwise infinite."""
        return math.inf if self.within is None or abs(mean) > self.within else self.within + abs(mean)


def _comparisons(snapshot: Mapping[str, Any], claims: Sequence[Mapping[str, Any]], table: Table) -> list[_Compared]:
    metric, baseline, level, scale = snapshot["metric"], snapshot["baseline"], 1 - LEVEL, snapshot.get("scale", "")
    controls = [row["label"] for row in snapshot["rows"] if row.get("control")]
    passed = table.gate.passed is True
    compared = [
        _Compared(f"gate: {baseline} is above {label}", (baseline, label), metric, level, of_gate=True, decided=passed)
        for label in controls
    ]
    decided = {claim.text for claim in table.claims if claim.verdict.word in DECIDED}
    for claim in claims:
        by = claim.get("by") if scale == "paper" else None
        text = claim_text({**claim, "by": by}, scale)
        edges = claim.get("within"), by or 0.0
        compared.append(_Compared(text, claim_rows(claim), claim["metric"], level / len(claims), *edges,
                                  decided=text in decided))  # fmt: skip
    return compared


def _prospect(
    compared: _Compared, values: Sequence[float], seconds: Mapping[str, float], counts: Mapping[str, int],
    workers: int, reachable: int | None, looks: Looks | None,
) -> Prospect:  # fmt: skip
    found, level = interval(values), compared.level
    mean, sd = found.mean or 0.0, found.sd or 0.0
    target = compared.target(mean)
    numbers = [n for n in SEEDS if looks is None or n in looks.pairs]
    low, high = deviation_bounds(sd, len(values))
    other, chance = compared.other(mean), None

    def level_at(number: int) -> float:
        return level if looks is None else level * looks.shares[looks.pairs.index(number)]

    def chance_at(number: int) -> float:
        return power(number, target, sd, level=level_at(number), other=other) if number >= FEWEST else 0.0

    if looks is None:
        seeds = seeds_needed(sd, target, level=level, other=other)
    else:
        further = [pairs for pairs in looks.pairs if pairs > len(values)]
        seeds = next((pairs for pairs in further if chance_at(pairs) >= 0.8), None) if sd else None
        if reachable is not None:
            reachable = max((pairs for pairs in further if pairs <= reachable), default=len(values))
    if compared.decided:
        seeds, reachable = len(values), None
    elif sd == 0:
        seeds = None
    elif reachable is not None:
        chance = chance_at(reachable) if looks is None or reachable > len(values) else 0.0
    return Prospect(
        text=compared.text, pilot=len(values), mean=mean, sd=sd, low=low, high=high, target=target,
        decides={n: decided_difference(n, sd, level_at(n)) for n in numbers}, seeds=seeds,
        hours=None if seeds is None else missing_seconds(compared.rows, seeds, seconds, counts) / 3600 / workers,
        reachable=reachable, chance=chance, of_gate=compared.of_gate, decided=compared.decided,
        most=MOST if looks is None else looks.pairs[-1],
    )  # fmt: skip


def row_seconds(labels: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, int]]:
    """The mean seconds of a run of each row, and the number of its runs, which have ended.

    A row without any takes the mean of the others, 0 if none has any.
    """
    ended = [(run["row"], float(run["outcome"].get("seconds") or 0.0)) for run in runs]
    times = {label: [seconds for row, seconds in ended if row == label] for label in labels}
    known = [fmean(values) for values in times.values() if values]
    mean = fmean(known) if known else 0.0
    seconds = {label: fmean(values) if values else mean for label, values in times.items()}
    return seconds, {label: len(values) for label, values in times.items()}


def missing_seconds(rows: Iterable[str], seeds: int, seconds: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Seconds of the runs that rows lack to a number of seeds; seconds, counts: of `row_seconds`."""
    return sum(seconds[label] * max(seeds - counts[label], 0) for label in set(rows))
