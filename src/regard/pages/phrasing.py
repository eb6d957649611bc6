"""Numbers and verdicts as text on the pages."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple


class Quantity(NamedTuple):
    """A measured quantity: its name, and whether "higher" or "lower" is better."""

    name: str
    better: str = "higher"


_NAMES = {
    "top1": "top-1 accuracy (%)", "top5": "top-5 accuracy (%)", "map": "mean average precision (%)",
    "ap50": "average precision at IoU 0.50 (%)", "ap75": "average precision at IoU 0.75 (%)",
    "box_map": "mean average precision of boxes (%)", "box_ap50": "average precision of boxes at IoU 0.50 (%)",
    "box_ap75": "average precision of boxes at IoU 0.75 (%)", "miou": "mean intersection over union (%)",
    "pixels": "pixel accuracy (%)", "cells": "asking cells answered right (%)", "bleu": "BLEU", "chrf": "chrF2",
    "images_per_second": "training samples per second", "inference_per_second": "forward passes of a sample per second",
}  # fmt: skip
_LOWER_IS_BETTER = {
    "loss": "test loss", "train_loss": "training loss", "macs": "MACs per sample", "parameters": "parameters",
    "seconds": "seconds per run", "memory_bytes": "peak memory that a run adds (bytes)",
}  # fmt: skip


def quantity(name: str) -> Quantity:
    """The quantity of a metric; an unknown metric has its key as name, and higher is better."""
    if name in _LOWER_IS_BETTER:
        return Quantity(_LOWER_IS_BETTER[name], "lower")
    return Quantity(_NAMES.get(name, name.replace("_", " ")))


def number(value: float | int | None, digits: int = 1) -> str:
    """A value with a fixed number of decimals and a typographic minus sign; a dash for None."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinity" if value > 0 else "minus infinity"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def signed_number(value: float | int | None, digits: int = 1) -> str:
    """`number` with a plus sign for positive values."""
    text = number(value, digits)
    positive = value is not None and value > 0 and text[0].isdigit() and float(text) != 0
    return f"+{text}" if positive else text


def typeset(sentence: str) -> str:
    """A sentence with typographic signs before its numbers, − and ±; hyphens in names stay."""
    return re.sub(r"(?<![^\s\[])-(?=\d)", "−", re.sub(r"\+-(?=\d)", "±", sentence))


def compact(value: float | int | None) -> str:
    """Three significant figures with a prefix: 141 k, 5.72 M, 1.20 G."""
    if value is None:
        return "–"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def duration(seconds: float | int | None) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def join_with_and(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def count(number_of: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number_of} {noun}{'s' * (number_of != 1)}"
