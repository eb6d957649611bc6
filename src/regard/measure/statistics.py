"""Statistics of a few seeds: t-intervals, paired differences, verdicts on claims. Needs no torch.

Accuracies and their differences are in percentage points. Fewer than three seeds give no interval and no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regard.core import require

LEVEL = 0.95
FEWEST = 3


@dataclass(frozen=True)
class Interval:
    """Mean of n values with its 95 % t-interval; low and high are None below three values. sd: of the values."""

    n: int
    mean: float | None
    low: float | None = None
    high: float | None = None
    sd: float | None = None

    @property
    def half(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class Pooled:
    """The residual of a table of rows and seeds: sd with its degrees of freedom, and the half-width of a difference of
    two rows. reason: why there is none; then the numbers are None."""

    sd: float | None
    degrees: int
    half: float | None
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """word: supported, contradicted, undecided or not judged. sentence: the same with numbers. p: two-sided, from the
    interval that is judged, so it is below 0.05 exactly where the claim is decided; None if not judged.

    needed: seeds that would decide an undecided claim with 80 % probability. task: whether the verdict stays the same
    with the error of the test sample added. holm: whether it stays significant after Holm's correction over the judged
    claims of the study.
    """

    word: str
    sentence: str
    interval: Interval
    p: float | None = None
    needed: int | None = None
    sampling: float | None = None
    task: bool | None = None
    holm: bool | None = None


def quantile(probability: float, degrees: int | float) -> float:
    """The quantile of Student's t distribution at a probability."""
    require("scipy")

    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t-interval."""
    n = len(values)
    if n == 0:
        return Interval(0, None)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(1, mean)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    if n < FEWEST:
        return Interval(n, mean, sd=sd)
    half = quantile((1 + LEVEL) / 2, n - 1) * sd / math.sqrt(n)
    return Interval(n, mean, mean - half, mean + half, sd)


def share_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Percent of values that are 1, with its 95 % Wilson interval, which holds also where all are 1.

    values: 0 or 1 for each of n independent items, or shares between them. Raises: ValueError without values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("a share needs at least one value")
    share, z = math.fsum(values) / n, 1.959964
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(n, 100 * share, 100 * (middle - half), 100 * (middle + half))


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
    """The interval of a - b over the seeds that both have."""
    return interval([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's correlation of pairs, ties with their mean rank; None for fewer than three pairs or equal values."""
    require("scipy")

    from scipy.stats import rankdata

    if len(a) < 3:
        return None
    x, y = rankdata(a), rankdata(b)
    if not x.std() or not y.std():
        return None
    return float(np.corrcoef(x, y)[0, 1])


def pooled(table: Mapping[str, Mapping[int, float]]) -> Pooled:
    """The residual variance of rows x seeds with (rows - 1)(seeds - 1) degrees of freedom, half-width t s sqrt(2 / n).

    Only for rows whose standard deviations differ by less than a factor of 3, over the seeds that all rows have; leave
    control rows and rows with failed runs out of the table.
    """
    rows = [row for row in table.values() if row]
    if len(rows) < 2:
        return Pooled(None, 0, None, "fewer than two rows")
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if len(seeds) < FEWEST:
        return Pooled(None, 0, None, f"fewer than {FEWEST} seeds that all rows have")
    x = np.array([[row[seed] for seed in seeds] for row in rows], dtype=np.float64)
    spread = x.std(axis=1, ddof=1)
    if spread.max() >= 3 * spread.min():
        return Pooled(
            None, 0, None, f"the standard deviations of the rows differ: {spread.min():.2f} to {spread.max():.2f}"
        )
    residual = x - x.mean(0, keepdims=True) - x.mean(1, keepdims=True) + x.mean()
    degrees = (len(rows) - 1) * (len(seeds) - 1)
    sd = math.sqrt(float((residual**2).sum()) / degrees)
    return Pooled(sd, degrees, quantile((1 + LEVEL) / 2, degrees) * sd * math.sqrt(2 / len(seeds)))


def sampling_error(a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]]) -> float | None:
    """Standard error of a mean difference due to the sample of test images; None without the images' values.

    a, b: for each seed what each image contributes to the metric, in its unit, all of one length. It is the standard
    deviation over images of (mean over seeds in a - mean over seeds in b) / sqrt(images); more seeds do not remove it.
    """
    if not a or not b or len({len(values) for values in (*a, *b)}) != 1 or len(a[0]) < 2:
        return None
    difference = np.mean(np.stack(a), 0, dtype=np.float64) - np.mean(np.stack(b), 0, dtype=np.float64)
    return float(difference.std(ddof=1) / math.sqrt(difference.size))


def holm(values: Sequence[float], level: float = 1 - LEVEL) -> list[bool]:
    """For each p-value whether it is significant after Holm's correction."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    significant = [False] * len(values)
    for rank, i in enumerate(order):
        if values[i] > level / (len(values) - rank):
            break
        significant[i] = True
    return significant


def power(seeds: int, difference: int | float, sd: float, degrees: int | None = None) -> float:
    """Probability that the interval of `seeds` pairs excludes zero when the true difference is `difference`.

    sd: of the paired difference. degrees: of the variance, by default seeds - 1 (one pair of rows alone).
    """
    require("scipy")

    from scipy.special import nctdtr

    degrees = seeds - 1 if degrees is None else degrees
    return 1.0 - float(nctdtr(degrees, abs(difference) * math.sqrt(seeds) / sd, quantile((1 + LEVEL) / 2, degrees)))


def seeds_needed(
    sd: int | float, difference: int | float, rows: int = 2, chance: float = 0.8, most: int = 200
) -> int | None:
    """Seeds that decide a difference with probability `chance`, never fewer than three; None if more than `most`.

    sd: of the paired difference. rows: of the table whose residual is pooled; 2 means one pair alone.
    """
    if sd <= 0:
        return FEWEST
    if difference == 0:
        return None
    for n in range(FEWEST, most + 1):
        if power(n, difference, sd, (rows - 1) * (n - 1)) >= chance:
            return n
    return None


def seed_pairs(number: int) -> str:
    """The number of paired seeds as text."""
    return "1 paired seed" if number == 1 else f"{number} paired seeds"


def judge(
    difference: Interval,
    *,
    within: int | float | None = None,
    by: int | float | None = None,
    scale: str = "desk",
    refusal: str = "",
    sampling: float | None = None,
    pooled: Pooled | None = None,
) -> Verdict:
    """The verdict on a claim from the interval of the paired difference a - b.

    within: the claim is that the difference lies inside +-within. by: that it is at least `by` (paper scale only).
    refusal: why the claim is not judged, such as a gate that was not passed; the interval is reported nevertheless.
    sampling: the `sampling_error`. pooled: of the table, for a study that declared pooling; if it has a half-width, it
    replaces that of the pair.
    """
    degrees = difference.n - 1
    if pooled is not None and pooled.half is not None and difference.mean is not None and difference.n >= FEWEST:
        mean, half, degrees = difference.mean, pooled.half, pooled.degrees
        difference = Interval(difference.n, mean, mean - half, mean + half, difference.sd)
    by = by if scale == "paper" else None
    if scale == "smoke":
        refusal = "smoke scale only tests that everything runs"
    elif difference.n < FEWEST:
        refusal = f"{seed_pairs(difference.n)}, at least {FEWEST} are needed"
    if difference.low is None or difference.high is None or difference.mean is None:
        return Verdict("not judged", f"not judged: {refusal}", difference, sampling=sampling)
    numbers = f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}], {difference.n} seeds"
    if refusal:
        return Verdict("not judged", f"not judged: {refusal}; {numbers}", difference, sampling=sampling)
    word = _word(difference.low, difference.high, within, by)
    needed, task = None, None
    if word == "undecided":
        needed, estimate = _seeds_to_decide(difference, within, by, degrees)
        sentence = f"undecided: {numbers}; {estimate}"
    else:
        sentence = f"{word}: {numbers}"
        if sampling is not None:
            task = word == _widened(difference, sampling, within, by)
            scope = "for the task" if task else "on this test set only"
            sentence += f"; holds {scope} (test-sampling error {sampling:.2f})"
    p = _claim_p(difference, word, within, by, degrees)
    return Verdict(word, sentence, difference, p, needed, sampling, task)


def _word(low: float, high: float, within: int | float | None, by: int | float | None) -> str:
    if within is not None:
        if -within < low and high < within:
            return "supported"
        return "contradicted" if low > within or high < -within else "undecided"
    edge = by or 0.0
    if low > edge or (by is not None and low >= edge):
        return "supported"
    return "contradicted" if high < edge else "undecided"


def _widened(difference: Interval, sampling: float, within: int | float | None, by: int | float | None) -> str:
    """The verdict with the error of the test sample added to that of the seeds."""
    mean, half = difference.mean or 0.0, math.hypot(difference.half or 0.0, 1.96 * sampling)
    return _word(mean - half, mean + half, within, by)


def _seeds_to_decide(
    difference: Interval, within: int | float | None, by: int | float | None, degrees: int
) -> tuple[int | None, str]:
    """The seeds that would decide a claim if the true difference were the observed one, as a number and as text.

    Against zero, a difference below 0.1 is replaced by half a point.
    """
    n, mean = difference.n, difference.mean or 0.0
    sd, rows = _error(difference, degrees) * math.sqrt(n), max(degrees // (n - 1), 1) + 1
    if within is not None:
        target = abs(within - abs(mean))
        aim = f"bring the interval {'inside' if abs(mean) <= within else 'outside'} +-{within:g}"
    elif by:
        target = abs(mean - by)
        aim = f"decide a difference of {target:.2g} from {by:g}"
    else:
        target = abs(mean) if abs(mean) >= 0.1 else 0.5
        aim = f"decide a difference of {target:.1f}"
    needed = seeds_needed(sd, target, rows)
    number = f"about {needed} seeds" if needed is not None else "more than 200 seeds"
    return needed, f"{number} would {aim}"


def _claim_p(
    difference: Interval, word: str, within: int | float | None, by: int | float | None, degrees: int
) -> float:
    """The two-sided p-value of the hypothesis that the verdict rejects.

    That is: the difference is `by` (or zero); for equivalence, it is outside +-within (the worse side of two one-sided
    tests), or, where equivalence is contradicted, inside.
    """
    if within is None:
        return _two_sided(difference, by or 0.0, degrees)
    if word == "contradicted":
        inside = min(_tail(difference, within, degrees, 1), _tail(difference, -within, degrees, -1))
        return min(1.0, 2 * inside)
    outside = max(_tail(difference, within, degrees, -1), _tail(difference, -within, degrees, 1))
    return min(1.0, 2 * outside)


def _two_sided(difference: Interval, at: int | float, degrees: int) -> float:
    return 2 * min(_tail(difference, at, degrees, 1), _tail(difference, at, degrees, -1))


def _tail(difference: Interval, at: int | float, degrees: int, side: int) -> float:
    """Probability of a mean at least so high (side 1) or so low (-1) if the true difference is `at`."""
    require("scipy")

    from scipy.special import stdtr

    mean, error = difference.mean or 0.0, _error(difference, degrees)
    if error == 0:
        return 0.5 if mean == at else float(side * (mean - at) < 0)
    return float(stdtr(degrees, side * (at - mean) / error))


def _error(difference: Interval, degrees: int) -> float:
    """The standard error of the mean, from its interval."""
    return (difference.half or 0.0) / quantile((1 + LEVEL) / 2, degrees)
