"""Jackknife values: what each test sample contributes to a metric of the whole set (mean IoU, BLEU)."""

from collections.abc import Callable

import numpy as np

BLOCKS = 200
"""Largest number of blocks of samples that are left out one after the other."""


def jackknife_values(statistics: np.ndarray, metric: Callable[[np.ndarray], float]) -> np.ndarray:
    """n * metric(all) - (n - 1) * metric(all but sample i), shape (n,) float32.

    Their mean is close to the metric, and the standard deviation of a paired difference of two models, divided by
    sqrt(n), is the standard error of the difference of their metrics due to the sample of test images (Tukey 1958; for
    a metric that is a mean they are the values of the samples). More than `BLOCKS` samples are left out in blocks.
    statistics: (n, s) additive numbers of each sample, such as intersections and unions; metric: of their sum (s,).
    """
    total, number = statistics.sum(0), len(statistics)
    blocks = np.array_split(np.arange(number), min(number, BLOCKS))
    whole = metric(total)
    values = np.empty(number, np.float32)
    for rows in blocks:
        without = metric(total - statistics[rows].sum(0)) if len(rows) < number else whole
        values[rows] = whole + (number - len(rows)) / len(rows) * (whole - without)
    return values
