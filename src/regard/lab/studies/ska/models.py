"""Networks and recipes of the SKA paper: sixteen small models (Tables 1, 8) and MetaFormers (Tables 2, 4, 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.lab.engine.study import Row
from regard.lab.studies.controls import DEIT_RECIPE, imagenet
from regard.lab.studies.published_sizes import Printed, printed_rows
from regard.lab.train.recipe import Recipe
from regard.mixers import CSKA, SKA
from regard.mixers.spelling import parse_mixer

NAMES = {"ViT": "ViT-S", "CaiT": "CaiT-S", "Swin": "Swin-T", "CvT": "CvT-13"}
"""Hosts, as rows are called here and in the paper."""
RECIPE = Recipe(
    epochs=400, batch=512, optimizer="adam", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, warmup=0.0, clip=0.0,
    smoothing=0.0, augment="randaugment+crop", precision="16-mixed",
)  # fmt: skip
"""The recipe of the authors' scripts; the paper states none. Rows with fewer epochs change it."""
RECIPE_NOTE = (
    "The paper states no recipe; the paper scale follows the authors' scripts: torchvision's RandAugment, then padded "
    "crops and flips. They keep the best test accuracy over the epochs, this study reports the last."
)
METAFORMER_RECIPE = replace(
    DEIT_RECIPE, epochs=310, batch=4096, optimizer="lamb", lr=8e-3, warmup=20 / 310, floor=1e-5 / 8e-3,
    cooldown=10 / 310,
)  # fmt: skip
S18, B36 = "drop_path_rate=0.15", "drop_path_rate=0.6, drop_rate=0.5"
"""Stochastic depth of S18; B36 has more, and dropout before its classifier."""
METAFORMER_TASK = imagenet(f"caformer_s18({S18})")
METAFORMER_NOTE = (
    "Paper scale follows the scripts of MetaFormer: 300 epochs and 10 at the lowest rate, random erasing, and "
    "stochastic depth 0.15 (S18), or 0.6 with dropout 0.5 of the head (B36). There are no controls at paper scale: the "
    "gate is judged at the small scales."
)
START_NOTE = (
    "At paper scale static keys start as in the paper, in all its tables (Algorithm 1: standard normal; Algorithm 2: "
    "as a convolution of PyTorch). At the small scales they start with deviation 0.02, since keys of deviation 1 are "
    "worse there (`ska_table1`). Logits have the factor d^-0.5 of the authors' code unless a row says otherwise; "
    "Section 4.1 and Algorithm 1 have none."
)
PARAMS_CSKA_S18 = 28_973_778
"""CSKAFormer-S18 with CSKA of 4 heads of width 32 in its second stage."""
_PRINTED = {row.label: row for row in printed_rows() if row.table == "SKA Table 1"}
_NOTES = {
    "SKA-ViT-S a": (
        "The printed 8.1M is not reached, with temperatures or without.",
        "The printed 1.25 GFLOPs are those of model b.",
    ),
    "SKA-ViT-S b": ("Ten heads of width 64, read from the authors' code; the paper does not say how b is enlarged.",),
}


def metaformer(stages: Sequence[str], name: str = "skaformer_s18", *options: str) -> str:
    """The host of a MetaFormer with "conv", "attn" or a mechanism in each of its four stages."""
    return f"{name}({', '.join((f'mixers={tuple(stages)!r}', *options))})"


def paper_stages(stages: Sequence[str]) -> tuple[str, ...]:
    """The stages with "ska" and "cska" spelled out, with the initial weights of the paper."""
    return tuple(f"{stage.upper()}(init='paper')" if stage.endswith("ska") else stage for stage in stages)


def printed_row(host: str, kind: str) -> Printed:
    """The row of Table 1 of a host of `NAMES` and a kind: "" (the host's own attention), "SKA a", "SKA b", "CSKA"."""
    mechanism, _, size = kind.partition(" ")
    return _PRINTED["-".join(filter(None, (mechanism, NAMES[host]))) + (f" {size}" if size else "")]


def model_row(
    label: str, host: str, kind: str, paper: Mapping[str, int | float], against: str, *, classes: int = 10,
    task: Mapping[str, Any] = {}, recipe: Mapping[str, Any] = {},
) -> Row:  # fmt: skip
    """A model of Table 1 as a row, with its number of parameters. classes: 10 or 100. Keys start as in the paper.

    against: the row of the same host with its own attention.
    """
    row = printed_row(host, kind)
    mixer = parse_mixer(row.mixer) if row.mixer else None
    params = row.counts[0 if classes == 10 else 1]
    return Row(
        label, replace(mixer, init="paper") if isinstance(mixer, SKA | CSKA) else None, host=row.host, paper=paper,
        exact={"params": params} if params is not None else {}, task=task, recipe=recipe,
        notes=(*_NOTES.get(row.label, ()), *([f"{row.note[0].upper()}{row.note[1:]}."] if row.note else [])),
        against="" if label == against else against,
    )  # fmt: skip
