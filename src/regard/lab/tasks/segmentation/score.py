"""Mean intersection over union of a whole split, from one confusion matrix."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8

from regard.models.segmentation import VOID

from ..base import Score
from ..jackknife import jackknife_values


def confusion(
    truth: UInt8[np.ndarray, "h w"], predicted: Int[np.ndarray, "h w"] | UInt8[np.ndarray, "h w"], classes: int
) -> Int[np.ndarray, "K K"]:
    """Numbers of pixels by true class (rows) and predicted class (columns); void pixels are left out."""
    counted = truth != VOID
    index = truth[counted].astype(np.int64) * classes + predicted[counted]
    return np.bincount(index, minlength=classes**2).reshape(classes, classes)


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


def score_of(statistics: np.ndarray, names: Sequence[str], ignored: Sequence[int] = ()) -> Score:
    """The score from the `margins` (n, 3K) of each image. details: the IoU of each class, and how many are present."""
    totals = statistics.sum(0)
    both, truth, _ = totals.reshape(3, -1)
    metrics = {"miou": miou(totals, ignored), "pixels": 100 * float(both.sum() / max(truth.sum(), 1))}
    values = ious(totals)
    details = {f"iou/{name}": float(value) for name, value in zip(names, values, strict=True) if not np.isnan(value)}
    details["classes_present"] = float(len(details))
    return Score(metrics, jackknife_values(statistics, lambda sums: miou(sums, ignored)), details)
