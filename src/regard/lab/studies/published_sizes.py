"""Printed sizes of the SKA and SNE papers beside the sizes of the models that Regard builds, row by row.

Sources: SKA is "Static Key Attention in Vision" (Tables 1 and 2); its code is the repository zizhao-hu/SKA. SNE is
"Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints" (Tables 2 and 4).
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard.measure.cost import count_macs
from regard.mixers.spelling import parse_mixer
from regard.models.create import create_model
from regard.swapping.inspect import example_input


@dataclass(frozen=True, kw_only=True)
class Printed:
    """One row of a paper. host, mixer: how Regard builds it ("" = the host's own attention).

    params, gflops: as printed, "9.6M" and "1.29" ("" = not printed). official, official_100: the counts of the authors'
    code with 10 and with 100 classes, None if there is no code. corrected, corrected_100: the right counts where the
    code has a defect. note: why it differs from Regard's count, or what the paper leaves open.
    """

    table: str
    label: str
    host: str
    mixer: str
    params: str
    gflops: str
    official: int | None
    official_100: int | None
    corrected: int | None
    corrected_100: int | None
    note: str

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """The right counts with 10 and with 100 classes."""
        return self.corrected or self.official, self.corrected_100 or self.official_100


TABLE = Path(__file__).with_suffix(".csv")


def printed_rows() -> tuple[Printed, ...]:
    """All rows of `published_sizes.csv`, in the order of the papers."""
    counts = ("official", "official_100", "corrected", "corrected_100")
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return tuple(Printed(**row | {name: int(row[name]) if row[name] else None for name in counts}) for row in rows)


def build(row: Printed, classes: int = 0) -> nn.Module:
    """The model of a row. classes: 0 = the host's own number."""
    options: dict[str, Any] = {"num_classes": classes} if classes else {}
    return create_model(row.host, parse_mixer(row.mixer) if row.mixer else None, **options)


def parameters(model: nn.Module) -> int:
    """The number of parameters of a model, each number counted."""
    return sum(value.numel() for value in model.parameters())


def verdict(count: int, printed: str) -> str:
    """Whether a count has the digits of a printed number such as "9.6M" or "1.2G".

    "R": when it is rounded; "T": when it is cut off; "R,T": both; "no": neither.
    """
    digits, power = printed[:-1], {"M": 6, "G": 9}[printed[-1]]
    unit = 10 ** (power - len(digits.partition(".")[2]))
    whole = int(digits.replace(".", ""))
    signs = [sign for sign, value in (("R", (count + unit // 2) // unit), ("T", count // unit)) if value == whole]
    return ",".join(signs) or "no"


def gigaflops(model: nn.Module) -> float:
    """Of one image; two for each multiply-accumulate."""
    return 2 * count_macs(model, example_input(model).to("meta")) / 1e9
