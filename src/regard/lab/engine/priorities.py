"""Which studies to carry out in so many hours: first those of which an hour is expected to decide most claims."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from regard.core import ConfigError, DataError, RegardError
from regard.core.validation import check_arguments
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks

from .claims import claim_rows, judgeable
from .decide import Decision, decide
from .estimate import baseline_hours
from .power import DECIDED, Prospect, prospects
from .progress import Event
from .study import Study
from .table import Table, snapshot_path

GUESS = 0.2
"""The share of a study's claims that its first seeds are expected to decide, as long as nothing is known of it: about
that of the committed studies, closed gates included."""
TUNED = 1.5
"""Runs of each row that choose its learning rate: three of half the epochs."""


@dataclass(frozen=True)
class Priority:
    """What a study is worth. claims: that are not decided. why: how the rest is known, or why nothing is expected.
    hours: to spend on it next. expected: claims that these decide."""

    study: str
    claims: int
    why: str
    hours: float = 0.0
    expected: float = 0.0

    @property
    def rate(self) -> float:
        """Claims that an hour is expected to decide."""
        return self.expected / self.hours if self.hours else 0.0


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What became of a study. hours: that it took. expected: claims, as planned. decided: claims that are decided now
    and were not before. reason: why it ended."""

    study: str
    hours: float
    expected: float
    decided: int
    reason: str


def priorities(
    studies: Sequence[Study], scale: str, store: Results, hours: float, workers: int = 1,
    report: Callable[[str], None] = lambda name: None,
) -> list[Priority]:  # fmt: skip
    """The studies with claims at a scale, the most promising first.

    hours: that can be spent on any of them. workers: runs at the same time. A study that has begun is judged by the
    prospects of its pilot; any other by a few timed steps of its baseline and `GUESS`. Runs that studies share count
    for each of them. report: called with the name of each study that is timed.
    Raises: ConfigError for smoke scale.
    """
    if scale == "smoke":
        raise ConfigError("smoke scale judges no claim: plan with --scale desk or paper")
    found = []
    for study in studies:
        if study.claims and scale in study.settings and study.settings[scale].recipe:
            known = _of_pilot(study.name, scale, store, hours, workers)
            found.append(known or _of_nothing(study, scale, store, hours, workers, report))
    return sorted(found, key=lambda priority: -priority.rate)


def _of_pilot(name: str, scale: str, store: Results, hours: float, workers: int) -> Priority | None:
    """The share of the hours that decides most claims an hour; None without two finished seeds of a claim."""
    if not snapshot_path(store.root, name, scale).exists() or not (table := Table.load(store.root, name, scale)).runs:
        return None
    claims = [claim.text for claim in table.claims if claim.verdict.word not in DECIDED]
    if table.looks is None:
        return Priority(name, len(claims), "began with a fixed number of seeds: begin it anew in another folder")
    if not claims:
        return Priority(name, 0, "all claims are decided")
    if table.gate.passed is False:
        return Priority(name, len(claims), "attention does not help here: no claim is judged")
    best = Priority(name, len(claims), "hardly any chance, by its pilot")
    for part in (hours, hours / 2, hours / 4, hours / 8):
        try:
            found = prospects(store.root, name, scale, hours=part, workers=workers)
        except ConfigError:  # too few finished seeds
            return None
        gate = 1.0 if table.gate.passed else min((_chance(each) for each in found if each.of_gate), default=1.0)
        expected = gate * sum(_chance(each) for each in found if not each.of_gate and each.text in claims)
        if expected / part > best.rate:
            best = Priority(name, len(claims), "by its pilot", part, expected)
    return best


def _chance(prospect: Prospect) -> float:
    """That more seeds than there are decide it; certain where the pilot's differences are equal and not zero."""
    if (prospect.reachable or 0) <= prospect.pilot:
        return 0.0
    return float(prospect.mean != 0) if prospect.sd == 0 else prospect.chance or 0.0


def _of_nothing(
    study: Study, scale: str, store: Results, hours: float, workers: int, report: Callable[[str], None]
) -> Priority:
    setting, seeds = study.settings[scale], Looks().pairs[0]
    rows = [{"label": row.label} for row in setting.rows]
    claims = judgeable({"rows": rows, "claims": [asdict(claim) for claim in study.claims]})
    report(study.name)
    try:
        assert setting.recipe is not None
        setting.task.batches_per_epoch(setting.recipe)
    except DataError as error:
        return Priority(study.name, len(claims), str(error))
    named = {study.baseline}.union(*map(claim_rows, claims))
    needed_rows = tuple(row for row in setting.rows if row.control or row.label in named)
    first = replace(study, settings={**study.settings, scale: replace(setting, seeds=seeds, rows=needed_rows)})
    timed = baseline_hours(first, scale, store, workers)
    if timed is None:
        return Priority(study.name, len(claims), "its parts are not here")
    needed = timed[1] + (timed[0] * TUNED / seeds if scale == "desk" else 0.0)
    expected = GUESS * len(claims) * min(1.0, hours / needed) if needed else 0.0
    return Priority(study.name, len(claims), "not begun: by a guess", needed, expected)


@check_arguments
def decide_all(
    studies: Sequence[Study], scale: str, store: Results, *, hours: float | int = 6.0, workers: int = 1,
    compile: bool = False, watch: Callable[[Event], None] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Spent]:  # fmt: skip
    """Carry out the most promising study for its hours, plan again with what it showed, until the hours are spent.

    Each study is carried out as by `decide`, with its promise of its own; one that is taken up again has an entry for
    each time. workers, compile, watch: as there. report: called with a line of text before each study, and for each
    that is timed.
    Raises: ConfigError; StoreError.
    """
    start, ended, spent = time.monotonic(), set[str](), list[Spent]()
    by_name = {study.name: study for study in studies}
    while (left := hours - (time.monotonic() - start) / 3600) > 0:
        plan = priorities(studies, scale, store, left, max(workers, 1), lambda name: report(f"timing {name}"))
        best = next((each for each in plan if each.expected > 0 and each.study not in ended), None)
        if best is None:
            break
        report(
            f"{best.study}: {best.expected:.1f} of {best.claims} claims expected in {best.hours:.2g} hours, {best.why}"
        )
        begin, before = time.monotonic(), _count_decided(store, best.study, scale)
        try:
            decision = decide(by_name[best.study], scale, store, hours=min(left, best.hours), workers=workers,
                              compile=compile, watch=watch)  # fmt: skip
        except RegardError as error:  # the other studies go on
            decision = Decision(str(error), {})
        if not decision.counts.get("done"):
            ended.add(best.study)
        spent.append(Spent(
            study=best.study, hours=(time.monotonic() - begin) / 3600, expected=best.expected,
            decided=_count_decided(store, best.study, scale) - before, reason=decision.reason,
        ))  # fmt: skip
        if any(number for state, number in decision.counts.items() if state not in ("done", "failed")):
            break
    return spent


def _count_decided(store: Results, name: str, scale: str) -> int:
    if not snapshot_path(store.root, name, scale).exists():
        return 0
    return sum(claim.verdict.word in DECIDED for claim in Table.load(store.root, name, scale).claims)
