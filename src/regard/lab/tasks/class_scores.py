"""What tasks with classes have in common: their names, top-1 accuracy, the majority, the most probable classes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from regard.core import DataError
from regard.images.images import Images

from .base import Score


def top1_score(batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Top-1 accuracy in percent and mean cross-entropy. batches: class scores (n, classes) and labels (n,)."""
    right, total = [], 0.0
    for scores, labels in batches:
        total += F.cross_entropy(scores, labels, reduction="sum").item()
        right.append((scores.argmax(-1) == labels).cpu().numpy())
    samples = np.concatenate(right)
    return Score({"top1": 100 * float(samples.mean()), "loss": total / len(samples)}, samples)


def check_classes(data: str, classes: Sequence[str], trained: Sequence[str]) -> None:
    """Raises: DataError if the classes of other data are not those of the training data, in their order."""
    if list(classes) != list(trained):
        shown, expected = (f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" for names in (classes, trained))
        raise DataError(
            f"{data} has other classes ({len(classes)}: {shown}) than the training data ({len(trained)}: {expected}); "
            "give them the same names, in the same order"
        )


def check_subset(data: str, classes: Sequence[str], trained: Sequence[str]) -> None:
    """Raises: DataError if other data have a class that the training data do not have."""
    unknown = [name for name in classes if name not in trained]
    if unknown:
        shown, known = (f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" for names in (unknown, trained))
        raise DataError(f"{data} has classes that the training data do not have: {shown}; the model has {known}")


def check_kept_test(data: str, found: str, record: Mapping[str, Any]) -> None:
    """For the data of a training, whose test is a part drawn from them. found: their name now.

    Raises: DataError if they are not those of the training, so that they would be drawn from anew.
    """
    if record.get("name") not in (None, found):
        raise DataError(
            f"{data} has changed since the training, so the fifth that was kept for its test is not known: give data "
            "that were not trained on, in a folder of their own"
        )


def relabelled(data: str, scored: Images, classes: Sequence[str], trained: Sequence[str]) -> Images:
    """Other data with the labels of the training, whose classes they share by name. Raises: DataError."""
    if tuple(classes) == tuple(trained):
        return scored
    check_subset(data, classes, trained)
    place = np.array([list(trained).index(name) for name in classes], np.int64)
    return Images(scored.pixels, place[scored.labels])


def majority(labels: np.ndarray) -> float:
    """The share of the most frequent of some labels (n,) in percent."""
    return 100 * float(np.bincount(labels).max() / len(labels))


def best_classes(scores: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """The five most probable classes of float32 scores: "label" and "probability" of the first, and "top".

    scores: (outputs,); a model may have more outputs than there are names.
    """
    values, indices = scores.softmax(-1)[: len(names)].topk(min(5, len(names)))
    top = [
        {"label": names[index], "probability": round(value, 6)}
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]
    return {**top[0], "top": top}
