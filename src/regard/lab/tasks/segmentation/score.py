"""Mean intersection over union of a whole split, from one confusion matrix."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8

from regard.measure import mean_iou
from regard.measure.mean_iou import ious, miou
from regard.models.segmentation import VOID

from ..base import Score
from ..jackknife import jackknife_values


def confusion(
    truth: UInt8[np.ndarray, "h w"], predicted: Int[np.ndarray, "h w"] | UInt8[np.ndarray, "h w"], classes: int
) -> Int[np.ndarray, "K K"]:
    """Numbers of pixels by true class (rows) and predicted class (columns); void pixels are left out."""
    counted = truth != VOID
    return mean_iou.confusion(truth[counted].astype(np.int64), predicted[counted].astype(np.int64), classes)


def score_of(statistics: np.ndarray, names: Sequence[str], ignored: Sequence[int] = ()) -> Score:
    """The score from the `margins` (n, 3K) of each image. details: the IoU of each class, and how many are present."""
    totals = statistics.sum(0)
    both, truth, _ = totals.reshape(3, -1)
    metrics = {"miou": miou(totals, ignored), "pixels": 100 * float(both.sum() / max(truth.sum(), 1))}
    values = ious(totals)
    details = {f"iou/{name}": float(value) for name, value in zip(names, values, strict=True) if not np.isnan(value)}
    details["classes_present"] = float(len(details))
    return Score(metrics, jackknife_values(statistics, lambda sums: miou(sums, ignored)), details)
