"""The sixteen small models of the static-key paper as rows: Table 1 trains them all, Table 8 twelve of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.lab.study import Row
from regard.mixers.spelling import parse_mixer
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.ska import SKA
from regard.studies.published_sizes import Printed, printed_rows
from regard.train.recipe import Recipe

NAMES = {"ViT": "ViT-S", "CaiT": "CaiT-S", "Swin": "Swin-T", "CvT": "CvT-13"}
"""Hosts, as rows are called here and in the paper."""
RECIPE = Recipe(
    epochs=400,
    batch=512,
    optimizer="adam",
    lr=1e-4,
    betas=(0.9, 0.999),
    weight_decay=0.0,
    warmup=0.0,
    clip=0.0,
    smoothing=0.0,
    augment="randaugment+crop",
    precision="16-mixed",
)
"""Of the authors' scripts; the paper states none. Rows with fewer epochs say so."""
RECIPE_NOTE = (
    "The paper states no recipe; the paper scale follows the authors' scripts: torchvision's RandAugment, then padded "
    "crops and flips. They keep the best test accuracy over the epochs, this study reports the last."
)
_PRINTED = {row.label: row for row in printed_rows() if row.table == "SKA Table 1"}
_NOTES = {
    "SKA-ViT-S a": (
        "The printed 8.1M is not reached, with temperatures or without.",
        "The printed 1.25 GFLOPs are those of model b.",
    ),
    "SKA-ViT-S b": ("Ten heads of width 64, read from the authors' code; the paper does not say how b is enlarged.",),
}


def printed(host: str, kind: str) -> Printed:
    """What Table 1 prints for a host of `NAMES` and a kind: "" (attention of its own), "SKA a", "SKA b", "CSKA"."""
    mechanism, _, size = kind.partition(" ")
    return _PRINTED["-".join(filter(None, (mechanism, NAMES[host]))) + (f" {size}" if size else "")]


def model_row(
    label: str,
    host: str,
    kind: str,
    paper: Mapping[str, int | float],
    *,
    classes: int = 10,
    task: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Row:
    """One model as a row, with the number of its parameters. classes: 10 or 100. Mechanisms start as in the paper."""
    row = printed(host, kind)
    mixer = parse_mixer(row.mixer) if row.mixer else None
    params = row.ours[0 if classes == 10 else 1]
    return Row(
        label,
        replace(mixer, init="paper") if isinstance(mixer, SKA | CSKA) else None,
        host=row.host,
        paper=paper,
        exact={"params": params} if params is not None else {},
        notes=(*_NOTES.get(row.label, ()), *([f"{row.note[0].upper()}{row.note[1:]}."] if row.note else [])),
        task=task or {},
        recipe=recipe or {},
    )
