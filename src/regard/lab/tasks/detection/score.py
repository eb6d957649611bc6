"""Average precision in the original images, by faster-coco-eval (COCO's definition).

Averaged over IoU thresholds 0.50, 0.55, ..., 0.95 and classes. torchmetrics' wrapper of the same package is not used:
it needs every mask as an array, and has no access to what a part of the images contributes.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.core import DataError, require
from regard.lab.tasks.jackknife import jackknife

from ..base import Score
from .masks import as_text, encode
from .scenes import Objects, Rle, Scene

AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
"""COCO's sizes of objects: areas in pixels of the original image."""
BLOCKS = 100
"""Largest number of blocks of images that are left out one after the other for the values of the images."""


@dataclass(frozen=True, eq=False)
class Found:
    """Predictions in one image, in pixels of the original: boxes (n, 4), labels from 0, scores, masks or None."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    masks: Sequence[Rle] | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """precision: (10 thresholds, 101 recalls, classes, 4 sizes), -1 where a class has no object of a size.

    without: the mean average precision in percent of all images but these, by their indices.
    """

    precision: np.ndarray
    classes: tuple[str, ...]
    images: int
    without: Callable[[np.ndarray], float] = field(repr=False)

    def mean(self, threshold: int | None = None, label: int | None = None, size: int = 0) -> float | None:
        """Average precision in percent; None if no class has objects. threshold: index; None = the mean of all."""
        values = self.precision[..., size]
        values = values if threshold is None else values[threshold]
        return _percent(values if label is None else values[..., label])

    def metrics(self) -> dict[str, float]:
        """map, ap50 and ap75. Raises: DataError without any object."""
        main = self.mean()
        if main is None:
            raise DataError("there are no objects to evaluate, so that there is no average precision")
        return {"map": main, "ap50": self.mean(0) or 0.0, "ap75": self.mean(5) or 0.0}

    def score(self) -> Score:
        """`metrics`; by size and by class. samples: jackknife values of the images in at most `BLOCKS` blocks.

        Raises: DataError without any object.
        """
        metrics = self.metrics()
        details = {f"ap/{name}": self.mean(size=size) for size, name in enumerate(AREAS) if size}
        details |= {f"ap/{name}": self.mean(label=label) for label, name in enumerate(self.classes)}
        samples = jackknife(self.images, self.without, BLOCKS)
        return Score(metrics, samples, {name: value for name, value in details.items() if value is not None})


def ground_truth(scenes: Sequence[Scene], classes: Sequence[str]) -> dict[str, Any]:
    """The scenes as content of a COCO file: images are numbered from 1 in their order, categories from 1."""
    annotations: list[dict[str, Any]] = []
    images = []
    for number, scene in enumerate(scenes, 1):
        images.append({"id": number, "file_name": scene.name, "height": scene.size[0], "width": scene.size[1]})
        objects = scene.objects
        for row, label in enumerate(objects.labels.tolist()):
            annotation = as_coco(objects, row, len(annotations) + 1, number, label + 1)
            if objects.masks is not None:
                annotation["segmentation"] = as_text(objects.masks[row])
            annotations.append(annotation)
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def as_coco(objects: Objects, row: int, number: int, image: int, category: int) -> dict[str, Any]:
    """An object as an annotation of COCO without its mask. number, image, category: the ids."""
    return {
        "id": number, "image_id": image, "category_id": category, "bbox": xywh(objects.boxes[row]),
        "area": float(objects.areas[row]), "iscrowd": int(objects.crowd[row]),
    }  # fmt: skip


def results(
    found: Sequence[Found], numbers: Sequence[int] | None = None, category_ids: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Predictions in COCO's format of results. numbers: ids of the images, default 1, 2, ...; the same for classes."""
    entries = []
    for index, one in enumerate(found):
        for row in range(len(one.labels)):
            label = int(one.labels[row])
            entry: dict[str, Any] = {
                "image_id": index + 1 if numbers is None else numbers[index],
                "category_id": label + 1 if category_ids is None else category_ids[label],
                "bbox": xywh(one.boxes[row]),
                "score": float(one.scores[row]),
            }
            if one.masks is not None:
                entry["segmentation"] = as_text(one.masks[row])
            entries.append(entry)
    return entries


def xywh(box: np.ndarray) -> list[float]:
    """left, top, width, height of a box left, top, right, bottom."""
    left, top, right, bottom = (float(value) for value in box)
    return [left, top, right - left, bottom - top]


def evaluate(
    scenes: Sequence[Scene], found: Sequence[Found], classes: tuple[str, ...], kind: str, detections: int
) -> Evaluation:
    """One evaluation of all images. kind: "bbox" or "segm"; detections: the largest number in an image that counts."""
    require("faster_coco_eval")

    from faster_coco_eval import faster_eval_api_cpp
    from faster_coco_eval.core.coco import COCO
    from faster_coco_eval.core.faster_eval_api import COCOeval_faster

    truth = COCO(ground_truth(scenes, classes))
    entries = results(found)
    if not entries:  # the package cannot load an empty list: a box outside of the image finds nothing
        empty = as_text(encode(np.zeros((1, *scenes[0].size), bool))[0])
        box = [-2.0, -2.0, 1.0, 1.0]
        entries = [{"image_id": 1, "category_id": 1, "bbox": box, "score": 0.0, "segmentation": empty}]
    if kind == "segm":  # with a box too, sizes would be those of boxes
        entries = [{name: value for name, value in entry.items() if name != "bbox"} for entry in entries]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator = COCOeval_faster(
            truth, truth.loadRes(entries), kind, print_function=lambda *_: None, separate_eval=True
        )
        evaluator.params.maxDets = [detections]
        evaluator.params.areaRng = [list(limits) for limits in AREAS.values()]
        evaluator.params.areaRngLbl = list(AREAS)
        evaluator.evaluate()
    numbers = len(scenes)
    cells = np.array(evaluator._evalImgs_cpp, dtype=object).reshape(len(classes), len(AREAS), numbers)

    def precision(rows: np.ndarray, sizes: int) -> np.ndarray:
        params = copy.copy(evaluator._paramsEval)
        params.imgIds = [int(row) + 1 for row in rows]
        params.areaRng = params.areaRng[:sizes]
        chosen = cells[:, :sizes][:, :, rows].reshape(-1).tolist()
        values = faster_eval_api_cpp.COCOevalAccumulate(params, chosen)["precision"]
        return np.asarray(values).reshape(len(params.iouThrs), len(params.recThrs), len(classes), sizes)

    def without(rows: np.ndarray) -> float:
        return _percent(precision(np.delete(np.arange(numbers), rows), 1)) or 0.0

    return Evaluation(precision(np.arange(numbers), len(AREAS)), classes, numbers, without)


def _percent(precision: np.ndarray) -> float | None:
    """The mean in percent where there are objects; None without any."""
    known = precision[precision > -1]
    return 100 * float(known.mean()) if known.size else None
