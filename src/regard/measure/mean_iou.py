"""Mean intersection over union of two maps of classes."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def confusion(truth: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"], classes: int) -> Int[np.ndarray, "K K"]:
    """Numbers of pixels by true class (rows) and predicted class (columns); all values are below `classes`."""
    return np.bincount(truth * classes + predicted, minlength=classes**2).reshape(classes, classes)


def margins(matrix: Int[np.ndarray, "K K"]) -> Int[np.ndarray, " s"]:
    """Intersection, true and predicted pixels of each class, one after the other: s = 3 K numbers."""
    return np.concatenate([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])


def ious(totals: np.ndarray) -> np.ndarray:
    """The IoU (K,) of each class in percent from `margins`; NaN for a class in neither truth nor prediction."""
    both, truth, predicted = totals.astype(np.float64).reshape(3, -1)
    union = truth + predicted - both
    return np.divide(100 * both, union, out=np.full_like(union, np.nan), where=union > 0)


def miou(totals: np.ndarray, ignored: Sequence[int] = ()) -> float:
    """The mean IoU in percent of the classes that are present and not ignored; 0 if there is none."""
    values = np.delete(ious(totals), list(ignored))
    present = ~np.isnan(values)
    return float(values[present].mean()) if present.any() else 0.0
