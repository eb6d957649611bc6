"""Statistics of a few seeds: t-intervals, paired differences, power. Needs no torch.

Accuracies and their differences are in percentage points. Fewer than three seeds give no interval and no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any] | float | int

LEVEL = 0.95
FEWEST = 3
ROUNDING = 1e-10
"""Values that differ by less than this part of the largest one are equal: what remains is the rounding of fractions."""


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


def quantile(probability: float, degrees: int | float) -> float:
    """The quantile of Student's t distribution at a probability."""
    return float(quantiles(probability, degrees))


def quantiles(probability: Numbers, degrees: Numbers) -> NDArray[np.float64]:
    """As `quantile`, of arrays."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(degrees, probability))


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t-interval; equal values, but for their rounding, have sd 0."""
    n = len(values)
    if n == 0:
        return Interval(0, None)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(1, mean)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    if max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        sd = 0.0
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


def paired_interval(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
    """The interval of a - b over the seeds that both have."""
    return interval([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's correlation of pairs, ties with their mean rank; None for fewer than three pairs or equal values."""
    if len(a) < FEWEST:
        return None
    x, y = _ranks(a), _ranks(b)
    if not x.std() or not y.std():
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1; equal values have the mean of theirs."""
    _, rows, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[rows]


def pooled_variance(table: Mapping[str, Mapping[int, float]]) -> Pooled:
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
        return Pooled(None, 0, None, f"the rows' standard deviations differ: {spread.min():.2f} to {spread.max():.2f}")
    residual = x - x.mean(0, keepdims=True) - x.mean(1, keepdims=True) + x.mean()
    degrees = (len(rows) - 1) * (len(seeds) - 1)
    sd = math.sqrt(float((residual**2).sum()) / degrees)
    sd = sd if sd > ROUNDING * float(np.abs(x).max()) else 0.0
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


def holm(values: Sequence[float] | NDArray[np.float64], level: float = 1 - LEVEL) -> NDArray[np.bool_]:
    """For each p-value, (..., m), whether it is significant after Holm's correction over the last axis."""
    p = np.asarray(values, np.float64)
    order = p.argsort(axis=-1, kind="stable")
    limits = level / np.arange(p.shape[-1], 0, -1)
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, -1) <= limits, axis=-1)
    significant = np.zeros(p.shape, np.bool_)
    np.put_along_axis(significant, order, passed, -1)
    return significant


def power(
    seeds: int, difference: int | float, sd: float, degrees: int | None = None, level: float = 1 - LEVEL,
    other: float = math.inf,
) -> float:  # fmt: skip
    """Probability that a two-sided test of `seeds` pairs at a level finds the true difference `difference`.

    sd: of the paired difference. degrees: of the variance, by default seeds - 1 (one pair of rows alone). The level
    0.05 is that of the 95 % interval. other: of a claim of equivalence, `difference` being the distance from the nearer
    edge of its margin: that from the farther one, which has to be excluded as well.
    """
    return float(powers(seeds, abs(difference), sd, level, degrees, other))


def powers(
    seeds: Numbers, difference: Numbers, sd: Numbers, level: Numbers, degrees: Numbers | None = None,
    other: Numbers = math.inf,
) -> NDArray[np.float64]:  # fmt: skip
    """As `power`, of arrays, for the right side of the test only: 1 without any deviation."""
    from scipy.special import nctdtr

    seeds, difference, sd = (np.asarray(value, np.float64) for value in (seeds, difference, sd))
    degrees = seeds - 1 if degrees is None else degrees

    def power_at(distance: Numbers) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            shift = np.where(sd > 0, np.maximum(distance, 0.0) * np.sqrt(seeds) / sd, np.inf)
        found = 1.0 - nctdtr(degrees, np.minimum(shift, 1e3), quantiles(1 - np.asarray(level) / 2, degrees))
        return np.where(np.isfinite(found), found, 1.0)

    if not np.isfinite(other).any():
        return power_at(difference)
    return np.maximum(power_at(difference) + power_at(other) - 1.0, 0.0)


def seeds_needed(
    sd: int | float, difference: int | float, rows: int = 2, chance: float = 0.8, most: int = 200,
    level: float = 1 - LEVEL, other: float = math.inf,
) -> int | None:  # fmt: skip
    """Seeds that decide a difference with probability `chance`, never fewer than three; None if more than `most`.

    sd: of the paired difference. rows: of the table whose residual is pooled; 2 means one pair alone. level: of the
    two-sided test. other: as in `power`.
    """
    if sd <= 0:
        return FEWEST
    if difference == 0:
        return None
    for n in range(FEWEST, most + 1):
        if power(n, difference, sd, (rows - 1) * (n - 1), level, other) >= chance:
            return n
    return None


def decided_difference(seeds: int, sd: float, level: float = 1 - LEVEL, chance: float = 0.8) -> float:
    """The true difference that a two-sided test of `seeds` pairs at a level finds with probability `chance`.

    sd: of the paired difference. By the noncentral t distribution, as `power`.
    """
    from scipy.special import nctdtrinc

    shift = float(nctdtrinc(seeds - 1, 1 - chance, quantile(1 - level / 2, seeds - 1)))
    return shift * sd / math.sqrt(seeds)


def deviation_bounds(sd: float, seeds: int) -> tuple[float, float]:
    """The 95 % interval of a standard deviation that was estimated from so many seeds, by the chi-squared distribution.

    Three seeds leave it between 0.52 and 6.3 times the estimate.
    """
    from scipy.special import chdtri

    degrees = seeds - 1
    low, high = (float(chdtri(degrees, (1 + sign * LEVEL) / 2)) for sign in (-1, 1))
    return sd * math.sqrt(degrees / low), sd * math.sqrt(degrees / high)


def seed_pairs(number: int) -> str:
    """The number of paired seeds as text."""
    return "1 paired seed" if number == 1 else f"{number} paired seeds"
