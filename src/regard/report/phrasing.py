"""Numbers and verdicts in words: the sentences that a report prints."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """How a measured quantity is called, whether more of it is better, and its unit behind a difference."""

    name: str
    better: str = "higher"
    unit: str = ""


QUANTITIES: Mapping[str, Quantity] = {
    "top1": Quantity("top-1 accuracy (%)", unit="points"),
    "top5": Quantity("top-5 accuracy (%)", unit="points"),
    "loss": Quantity("test loss", "lower"),
    "train_loss": Quantity("training loss", "lower"),
    "map": Quantity("mean average precision (%)", unit="points"),
    "miou": Quantity("mean intersection over union (%)", unit="points"),
    "bleu": Quantity("BLEU", unit="points"),
    "images_per_second": Quantity("training images per second"),
    "macs": Quantity("MACs per image", "lower"),
    "parameters": Quantity("parameters", "lower"),
    "seconds": Quantity("seconds per run", "lower"),
    "peak_memory_bytes": Quantity("peak memory (bytes)", "lower"),
}


def quantity(name: str) -> Quantity:
    """What is known about a metric; an unknown one is called by its key and higher is better."""
    return QUANTITIES.get(name, Quantity(name.replace("_", " ")))


def number(value: float | int | None, digits: int = 1) -> str:
    """A value with a fixed number of decimals and a true minus sign; a dash for nothing, "inf" and "nan" in words."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def signed(value: float | int | None, digits: int = 1) -> str:
    """`number` with its sign, also a plus."""
    text = number(value, digits)
    rises = value is not None and value > 0 and text[0].isdigit() and float(text) != 0
    return f"+{text}" if rises else text


def typeset(sentence: str) -> str:
    """A sentence with true minus signs before its numbers; hyphens inside names stay."""
    return re.sub(r"(?<![^\s\[])-(?=\d)", "−", sentence)


def compact(value: float | int | None) -> str:
    """Three significant figures with a unit of thousands: 141 k, 5.72 M, 1.20 G."""
    if value is None:
        return "–"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def duration(seconds: float | int | None) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def count(number_of: int, one: str, many: str = "") -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number_of} {one if number_of == 1 else many or one + 's'}"


def answer(verdicts: Sequence[str], gate: str, scale: str) -> str:
    """What the claims of a study came to, in one sentence. gate: "passed", "not passed" or "undecided"."""
    if not verdicts:
        return "The study states no claims: the table is its result."
    if scale == "smoke":
        return f"Smoke scale proves that everything runs; its {count(len(verdicts), 'claim')} cannot be judged here."
    if gate == "not passed":
        return f"Because of this, the study's {count(len(verdicts), 'claim')} cannot be judged at this scale."
    groups = [(kind, sum(verdict == kind for verdict in verdicts)) for kind in VERDICTS]
    parts = [f"{n} {'is' if n == 1 else 'are'} {kind}" for kind, n in groups if n]
    return f"Of {count(len(verdicts), 'claim')}, {listed(parts)}."


VERDICTS = ("supported", "contradicted", "undecided", "not judged")
