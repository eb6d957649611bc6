"""Verdicts on claims: what one interval suggests, and what holds after correction over all claims. Needs no torch.

A claim is "suggested" where its own test decides it at 5 %. Only `correct` says "supported" or "contradicted": those
words belong to a study, of which at most 5 % have one that is false.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.measure.intervals import FEWEST, LEVEL, Interval, Numbers, Pooled, holm, quantile, seed_pairs, seeds_needed

WORDS = ("supported", "contradicted", "suggested", "undecided", "not judged")


@dataclass(frozen=True)
class Verdict:
    """What is known of a claim, as one of `WORDS`, with the numbers that it rests on (facts, interval).

    - p: two-sided, of what the verdict rejects, so it is below 0.05 exactly where the claim's own test decides it; None
      if not judged.
    - side: 1 for the claim, -1 against it, 0 undecided or not judged.
    - needed: seeds that would decide an undecided claim with 80 % probability.
    - sampling: the error of the test sample; task: whether the verdict stays the same with it added.
    - holm: whether it stays significant after Holm's correction over all claims of the study.
    - reason: why it is not judged. remedy: what would decide it, if it is undecided.
    """

    word: str
    facts: str
    interval: Interval
    p: float | None = None
    side: int = 0
    needed: int | None = None
    sampling: float | None = None
    task: bool | None = None
    holm: bool | None = None
    reason: str = ""
    remedy: str = ""

    @property
    def detail(self) -> str:
        """The facts, with the side where the word does not say it."""
        return f"the opposite, {self.facts}" if self.word == "suggested" and self.side < 0 else self.facts

    @property
    def sentence(self) -> str:
        """Word and detail."""
        return f"{self.word}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Word, sentence and numbers as plain data."""
        value = asdict(self)
        rest = {name: item for name, item in value.items() if name not in ("word", "facts", "reason", "remedy")}
        return {"word": self.word, "sentence": self.sentence, **rest}


def claim_p(
    mean: Numbers, error: Numbers, degrees: Numbers, within: Numbers | None = None, at: Numbers = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(two-sided p, side) of claims from means of differences, their standard errors and degrees of freedom.

    The claim is that the difference is above `at`, or with `within` that it lies inside +-within. side: 1 where p is of
    the claim's opposite, so that a small one speaks for the claim; -1 where it is of the claim itself. For equivalence
    that is the worse side of two one-sided tests, or the hypothesis that the difference lies inside. p is 1 without a
    standard error: equal differences, as of few test images, say nothing of their deviation. All arguments may be
    arrays, which are broadcast.
    """
    from scipy.special import stdtr

    mean, error, degrees = (np.asarray(value, np.float64) for value in (mean, error, degrees))

    def tail(edge: Numbers, sign: int) -> Any:
        """Probability of a mean at least so high (sign 1) or so low (-1) if the true difference is `edge`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return stdtr(degrees, np.where(mean == edge, 0.0, sign * (edge - mean) / error))

    if within is None:
        p = 2 * np.minimum(tail(at, 1), tail(at, -1))
        return np.where(error == 0, 1.0, p), np.where(mean > at, 1, -1)
    outside = 2 * np.maximum(tail(within, -1), tail(-within, 1))
    inside = 2 * np.minimum(tail(within, 1), tail(-within, -1))
    p = np.minimum(np.minimum(inside, outside), 1.0)
    return np.where(error == 0, 1.0, p), np.where(outside < inside, 1, -1)


def judge(
    difference: Interval, *, within: int | float | None = None, by: int | float | None = None, scale: str = "desk",
    refusal: str = "", sampling: float | None = None, pooled: Pooled | None = None,
) -> Verdict:  # fmt: skip
    """What the interval of the paired difference a - b says of a claim by itself: suggested, undecided or not judged.

    within: the claim is that the difference lies inside +-within. by: that it is at least `by` (paper scale only).
    refusal: why the claim is not judged, such as a gate that was not passed; the interval is reported nevertheless.
    sampling: the `sampling_error`. pooled: of the table, for a study that declared pooling and two of the rows that it
    is of; if it has a standard deviation, the half-width by it and this pair's seeds replaces that of the pair.
    """
    degrees = difference.n - 1
    if pooled is not None and pooled.sd is not None and difference.mean is not None and difference.n >= FEWEST:
        mean, degrees = difference.mean, pooled.degrees
        half = quantile((1 + LEVEL) / 2, degrees) * pooled.sd * math.sqrt(2 / difference.n)
        difference = Interval(difference.n, mean, mean - half, mean + half, difference.sd)
    by = by if scale == "paper" else None
    if scale == "smoke":
        refusal = "smoke scale only tests that everything runs"
    elif difference.n < FEWEST:
        refusal = f"{seed_pairs(difference.n)}, at least {FEWEST} are needed"
    elif difference.low == difference.high:
        refusal = "all differences are equal, so nothing is known of their deviation; more seeds or test images tell it"
    if difference.low is None or difference.high is None or difference.mean is None:
        return Verdict("not judged", refusal, difference, sampling=sampling, reason=refusal)
    numbers = numbers_of(difference)
    if refusal:
        return Verdict("not judged", f"{refusal}; {numbers}", difference, sampling=sampling, reason=refusal)
    p, sides = claim_p(difference.mean, _error(difference, degrees), degrees, within, by or 0.0)
    if p >= 1 - LEVEL:
        needed, estimate = _seeds_to_decide(difference, within, by, degrees)
        facts = f"{numbers}; {estimate}"
        return Verdict("undecided", facts, difference, float(p), 0, needed, sampling, remedy=estimate)
    side, task, facts = int(sides), None, numbers
    if sampling is not None:
        task = side == _widened_side(difference, sampling, within, by)
        scope = "for the task" if task else "on this test set only"
        facts += f"; holds {scope} (test-sampling error {sampling:.2f})"
    return Verdict("suggested", facts, difference, float(p), side, None, sampling, task)


def numbers_of(difference: Interval) -> str:
    """Mean, interval and seeds as text."""
    return f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}], {difference.n} seeds"


def correct(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of a study's claims after Holm's correction over all of them.

    What survives it is supported or contradicted; what does not remains suggested. Claims that are not judged yet count
    as p = 1: whoever trains the promising rows first would otherwise pay for fewer claims than the study has.
    """
    survives = holm([1.0 if verdict.p is None else verdict.p for verdict in verdicts]).tolist()
    correction, corrected = f"Holm's correction over {len(verdicts)} claims", []
    for verdict, holds in zip(verdicts, survives, strict=True):
        judged = verdict if verdict.p is None else replace(verdict, holm=holds)
        if judged.side and not holds:
            judged = replace(judged, facts=f"{judged.facts}; does not survive {correction}")
        elif judged.side:
            word = "supported" if judged.side > 0 else "contradicted"
            note = f"; survives {correction}" if len(verdicts) > 1 else ""
            judged = replace(judged, word=word, facts=f"{judged.facts}{note}")
        corrected.append(judged)
    return corrected


def _widened_side(difference: Interval, sampling: float, within: int | float | None, by: int | float | None) -> int:
    """The side of the interval with the error of the test sample added to that of the seeds."""
    mean, half = difference.mean or 0.0, math.hypot(difference.half or 0.0, 1.96 * sampling)
    low, high = mean - half, mean + half
    if within is not None:
        return 1 if -within < low and high < within else -1 if low > within or high < -within else 0
    edge = by or 0.0
    return 1 if low > edge else -1 if high < edge else 0


def _seeds_to_decide(
    difference: Interval, within: int | float | None, by: int | float | None, degrees: int
) -> tuple[int | None, str]:
    """The seeds that would decide a claim if the true difference were the observed one, as a number and as text.

    Against zero, a difference below 0.1 is replaced by half a point.
    """
    n, mean, other = difference.n, difference.mean or 0.0, math.inf
    sd, rows = _error(difference, degrees) * math.sqrt(n), max(degrees // (n - 1), 1) + 1
    if within is not None:
        target = abs(within - abs(mean))
        other = within + abs(mean) if abs(mean) <= within else math.inf
        aim = f"bring the interval {'inside' if abs(mean) <= within else 'outside'} +-{within:g}"
    elif by:
        target = abs(mean - by)
        aim = f"decide a difference of {target:.2g} from {by:g}"
    else:
        target = abs(mean) if abs(mean) >= 0.1 else 0.5
        aim = f"decide a difference of {target:.1f}"
    needed = seeds_needed(sd, target, rows, other=other)
    number = f"about {needed} seeds" if needed is not None else "more than 200 seeds"
    return needed, f"{number} would {aim}"


def _error(difference: Interval, degrees: int) -> float:
    """The standard error of the mean, from its interval."""
    return (difference.half or 0.0) / quantile((1 + LEVEL) / 2, degrees)
