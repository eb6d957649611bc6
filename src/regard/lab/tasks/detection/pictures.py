"""Pictures: predictions on an image, beside the annotated objects, and curves of precision and recall."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from regard.core.plain_text import plain_text

from ..drawing import canvas, colour, font_of
from .masks import decode
from .scenes import Scene
from .score import Evaluation, Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 0.5
"""Objects with a lower score are not drawn."""
OPACITY = 0.45
"""Of the colour of a mask."""


def drawn(pixels: UInt8[np.ndarray, "h w C"], prediction: Mapping[str, Any]) -> Image.Image:
    """A prediction of `predict` on its image: masks, boxes, labels and scores in the colours of the classes."""
    items = [item for item in prediction["objects"] if item["score"] >= SHOWN]
    captions = [f"{item['label']} {100 * item['score']:.0f}" for item in items]
    masks = [item["mask"] for item in items if "mask" in item]
    return _drawn(pixels, [item["box"] for item in items], [item["category"] - 1 for item in items], captions, masks)


def beside_truth(pixels: UInt8[np.ndarray, "h w C"], scene: Scene, found: Found, classes: Sequence[str]) -> Image.Image:
    """The predictions in an image at the left, its annotated objects at the right, with a caption each."""
    rows: list[int] = np.flatnonzero(found.scores >= SHOWN).tolist()
    captions = [f"{classes[int(found.labels[row])]} {100 * found.scores[row]:.0f}" for row in rows]
    masks = None if found.masks is None else [found.masks[row] for row in rows]
    left = _drawn(pixels, found.boxes[rows].tolist(), found.labels[rows].tolist(), captions, masks)
    objects = scene.objects
    names = [classes[int(label)] for label in objects.labels]
    right = _drawn(pixels, objects.boxes.tolist(), objects.labels.tolist(), names, objects.masks)
    font = font_of(max(left.width // 32, 12))
    strip = round(2 * font.size)
    page = Image.new("RGB", (2 * left.width + 8, left.height + strip), "white")
    draw = ImageDraw.Draw(page)
    for place, image, caption in ((0, left, f"predicted: {len(rows)}"), (1, right, f"annotated: {len(objects)}")):
        page.paste(image, (place * (left.width + 8), strip))
        draw.text((place * (left.width + 8) + 6, strip // 4), caption, fill="black", font=font)
    return page


def _drawn(
    pixels: np.ndarray,
    boxes: Sequence[Sequence[float]],
    labels: Sequence[int],
    captions: Sequence[str],
    masks: Sequence[Mapping[str, Any]] | None,
) -> Image.Image:
    if masks is not None and len(masks):
        pixels = _tinted(pixels, masks, labels)
    image, factor = canvas(pixels)
    draw = ImageDraw.Draw(image)
    font = font_of(max(image.width // 60, 11))
    few = len(boxes) <= 40  # more captions would cover the image
    for box, label, caption in zip(boxes, labels, captions, strict=True):
        left, top, right, bottom = (factor * value for value in box)
        draw.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=colour(label), width=2)
        if few:
            place = draw.textbbox((left + 3, top + 2), caption, font=font)
            draw.rectangle((place[0] - 2, place[1] - 1, place[2] + 2, place[3] + 1), fill=colour(label))
            draw.text((left + 3, top + 2), caption, fill="black", font=font)
    return image


def _tinted(pixels: np.ndarray, masks: Sequence[Mapping[str, Any]], labels: Sequence[int]) -> np.ndarray:
    """The pixels with the colour of the class on each mask, and the outline of each mask."""
    values = np.broadcast_to(pixels, (*pixels.shape[:2], 3)).astype(np.float32).copy()
    sides = masks[0]["size"]
    rles = [{**mask, "counts": _bytes(mask["counts"])} for mask in masks]
    for mask, label in zip(decode(rles, (sides[0], sides[1])).astype(bool), labels, strict=True):
        values[mask] += OPACITY * (np.array(colour(label), np.float32) - values[mask])
        values[_outline(mask)] = colour(label)
    return values.round().astype(np.uint8)


def _bytes(counts: str | bytes) -> bytes:
    return counts.encode() if isinstance(counts, str) else counts


def _outline(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask that have a neighbour outside it."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner


@plain_text()
def precision_recall(evaluation: Evaluation, thresholds: Sequence[int] = (0, 5)) -> "Figure":
    """Precision over recall of each class, one plot for each threshold of the IoU: index 0 is 0.50, 5 is 0.75.

    Precision is COCO's: the highest at this recall or a higher one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(thresholds), 3.6), layout="constrained")
    recall = 100 * np.linspace(0, 1, evaluation.precision.shape[1])
    for place, threshold in enumerate(thresholds):
        axes = figure.add_subplot(1, len(thresholds), place + 1)
        for label, name in enumerate(evaluation.classes):
            average = evaluation.mean(threshold, label)
            if average is not None:
                curve = 100 * evaluation.precision[threshold, :, label, 0]
                shade = np.array(colour(label)) / 255
                axes.plot(recall, curve, color=tuple(shade), label=f"{name} ({average:.1f})")
        axes.set(xlim=(0, 100), ylim=(0, 102), xlabel="recall (%)", title=f"IoU from {0.5 + 0.05 * threshold:.2f}")
        axes.set_ylabel("precision (%)" if place == 0 else "")
        axes.legend(loc="lower left", title="class (average precision)", fontsize="small", title_fontsize="small")
        axes.grid(alpha=0.3)
    return figure
