"""Jackknife values: what each test sample contributes to a metric of the whole set (mean IoU, BLEU)."""

from collections.abc import Callable

import numpy as np

BLOCKS = 200
"""Largest number of blocks of samples that are left out one after the other."""


def jackknife_values(statistics: np.ndarray, metric: Callable[[np.ndarray], float]) -> np.ndarray:
    """n * metric(all) - (n - 1) * metric(all but sample i), shape (n,) float32.

    Their mean is close to the metric, and the standard deviation of a paired difference of two models, divided by
    sqrt(n), is the standard error of the difference of their metrics due to the sample of test images (Tukey 1958; for
    a metric that is a mean they are the values of the samples). More than `BLOCKS` samples are left out in blocks: a
    block's samples share one value, whose distance to the metric is that of the block's mean times the square root of
    their number, so that the standard deviation stays that of single samples.
    statistics: (n, s) additive numbers of each sample, such as intersections and unions; metric: of their sum (s,).
    """
    total = statistics.sum(0)
    return jackknife(len(statistics), lambda rows: metric(total - statistics[rows].sum(0)))


def jackknife(number: int, without: Callable[[np.ndarray], float], most: int = BLOCKS) -> np.ndarray:
    """`jackknife_values` of `number` samples for any metric.

    without: the metric of all samples but those of the given rows; no rows = of all. most: number of blocks.
    """
    blocks = np.array_split(np.arange(number), min(number, most))
    whole = without(np.arange(0))
    values = np.empty(number, np.float32)
    for rows in blocks:
        left = without(rows) if len(rows) < number else whole
        values[rows] = whole + (number - len(rows)) / len(rows) ** 0.5 * (whole - left)
    return values
