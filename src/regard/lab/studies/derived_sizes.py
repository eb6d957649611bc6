"""Sizes that no table prints, computed by hand from the hosts and mechanisms of the SKA and SNE papers.

The models that Regard builds must have them: presets without the errors of the authors' code, mechanisms in timm's
models, and presets of the authors' code that are not rows of a table.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.mixers.spelling import parse_mixer
from regard.models.create import create_model
from regard.swapping.swap import swap

from .published_sizes import parameters


class Derived(NamedTuple):
    """A model and its number of parameters, computed by hand. host, mixer: as in `published_sizes.Printed`.

    bare: whether the host's queries, keys and values have no biases, other than by default.
    """

    table: str
    host: str
    mixer: str
    params: int
    bare: bool = False


TABLE = Path(__file__).with_suffix(".csv")
with TABLE.open(encoding="utf-8", newline="") as _file:
    _ROWS = tuple(csv.DictReader(_file))
UNBUILT = tuple((row["host"], int(row["params"]), row["reason"]) for row in _ROWS if row["reason"])
"""Models that Regard does not build, their numbers of parameters, and why they are not built."""
DERIVED = tuple(
    Derived(row["table"], row["host"], row["mixer"], int(row["params"]), bool(row["bare"]))
    for row in _ROWS
    if not row["reason"]
)
"""All models of `derived_sizes.csv` that are built here, table by table."""


def derived_counts() -> Iterator[tuple[Derived, int]]:
    """Every row with the number of parameters of the model that is built here (on the meta device)."""
    for row in DERIVED:
        with torch.device("meta"):
            params = parameters(build_derived(row))
        yield row, params


def build_derived(row: Derived) -> nn.Module:
    """The model of a row."""
    if not row.bare:
        return create_model(row.host, parse_mixer(row.mixer) if row.mixer else None)
    model: Any = create_model(row.host, None)
    for block in model.blocks:  # class attention keeps its biases
        block.attn.qkv = nn.Linear(block.attn.qkv.in_features, block.attn.qkv.out_features, bias=False)
    return swap(model, row.mixer)
