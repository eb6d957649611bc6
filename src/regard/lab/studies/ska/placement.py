"""Static Key Attention in Vision, Tables 2 and 5 and Figure 3: static keys in the stages of a MetaFormer."""

from dataclasses import replace

from regard.lab.engine.study import Claim, Row, Setting, Study, paper_claims
from regard.lab.studies.controls import CONTROLS, DIGITS_RECIPE, small_settings
from regard.lab.studies.papers import SKA_PAPER
from regard.lab.tasks.classification import Classification
from regard.lab.train.recipe import Recipe
from regard.mixers import CSKA

from .models import (
    B36,
    METAFORMER_NOTE,
    METAFORMER_RECIPE,
    METAFORMER_TASK,
    PARAMS_CSKA_S18,
    S18,
    START_NOTE,
    metaformer,
    paper_stages,
)

_ATTENTION, _SKA, _CSKA = (("conv", kind, "attn", "attn") for kind in ("conv", "ska", "cska"))
# label -> (stages; options of the size; millions of parameters, GFLOPs and top-1 as printed; parameters by hand)
_TABLE2 = {
    "CAFormer-S18": (_ATTENTION, S18, (26, 8.2, 83.3), 26_341_656),
    "SKAFormer-S18": (_SKA, S18, (26, 8.0, 82.3), 26_555_922),
    "CSKAFormer-S18": (_CSKA, S18, (28, 8.2, 83.4), PARAMS_CSKA_S18),
    "CAFormer-B36": (_ATTENTION, B36, (99, 46.4, 85.5), 98_753_614),
    "SKAFormer-B36": (_SKA, B36, (97, 45.6, 83.9), 100_074_550),
    "CSKAFormer-B36": (_CSKA, B36, (119, 48.4, 85.7), 119_417_398),
}
_NOTES = {
    "CAFormer-S18": ("Its source prints 83.6 for this model.",),
    "SKAFormer-S18": ("The paper does not say which stages; here the second.",),
}


# networks of others in Table 2, which the paper cites: the host, and top-1 as printed
_FOREIGN = tuple(Row(label, None, host=host, paper={"top1": top1}) for label, host, top1 in (
    ("RSB-ResNet-50", "resnet50", 79.8), ("RegNetY-4G", "regnety_040", 81.3), ("ConvNeXt-T", "convnext_tiny", 82.1),
    ("ConvFormer-S18", f"convformer_s18({S18})", 83.0), ("DeiT-S", "deit_small_patch16_224", 79.8),
    ("Swin-T", "swin_tiny_patch4_window7_224", 81.3), ("MViTv2-T", "mvitv2_tiny", 82.3),
    ("CoAtNet-0", "coatnet_0_224", 81.6), ("RegNetY-16G", "regnety_160", 82.2), ("RegNetY-32G", "regnety_320", 82.4),
    ("ConvNeXt-B", "convnext_base", 83.8), ("ConvNeXt-L", "convnext_large", 84.3),
    ("DeiT-B", "deit_base_patch16_224", 81.8), ("Swin-B", "swin_base_patch4_window7_224", 83.5),
    ("MViTv2-L", "mvitv2_large", 85.3), ("CoAtNet-3", "coatnet_3_224", 84.5),
))  # fmt: skip


def _row2(label: str) -> Row:
    """A row of Table 2; the paper counts two FLOPs per multiply-accumulate."""
    stages, options, (millions, gflops, top1), params = _TABLE2[label]
    name = label.lower().replace("-", "_")
    host = f"{name}({options})" if stages is _ATTENTION else metaformer(paper_stages(stages), name, options)
    paper = {"params": millions * 1e6, "macs": gflops * 1e9 / 2, "top1": top1}
    base = "CAFormer-B36" if label.endswith("B36") else "CAFormer-S18"
    return Row(label, None, host=host, paper=paper, exact={"params": params}, notes=_NOTES.get(label, ()),
               against="" if label == base else base)  # fmt: skip


_ROWS2 = tuple(map(_row2, _TABLE2))
# top-1 as printed in Table 5
_TOP1 = {
    "C, C, A, A": 77.6, "C, SKA, A, A": 77.6, "C, C, SKA, A": 77.0, "C, C, A, SKA": 76.7, "C, CSKA, A, A": 77.8,
    "C, C, CSKA, A": 77.4, "C, C, A, CSKA": 76.7,
}  # fmt: skip
_STAGES = {
    label: tuple({"C": "conv", "A": "attn"}.get(stage, stage.lower()) for stage in label.split(", "))
    for label in _TOP1
}  # fmt: skip
_TABLE5 = tuple(
    Row(label, None, host=metaformer(paper_stages(stages), "cskaformer_s18", S18), paper={"top1": _TOP1[label]})
    for label, stages in _STAGES.items()
)
_STAGES2 = {label: stages for label, (stages, *_) in _TABLE2.items() if label.endswith("S18")}
_SMALL5, _SMALL2 = (
    (*(Row(label, None, host=metaformer(stages, "skaformer_desk")) for label, stages in rows.items()), *CONTROLS)
    for rows in (_STAGES, _STAGES2)
)


def _heads(host: str, numbers: tuple[int, ...]) -> tuple[Row, ...]:
    rows = (Row(f"{heads} heads", CSKA(), host=f"vit_desk({host}, heads={heads})") for heads in numbers)
    return (*rows, *CONTROLS)


# one head more has 784 further biases in each of 3 layers
_PAPER_HEADS = tuple(
    Row(f"{heads} heads", None, host=metaformer(paper_stages(_CSKA), "cskaformer_s18", f"heads={heads}", S18),
        exact={"params": PARAMS_CSKA_S18 + 3 * 784 * (heads - 4)})
    for heads in (2, 1, 4, 8, 16)
)  # fmt: skip
_SMOKE = Classification(host="skaformer_desk", data="digits", size=(32, 32))
_SMOKE_RECIPE = replace(DIGITS_RECIPE, epochs=3, lr=1e-3)
_NETTE = Classification(host="skaformer_desk", data="imagenette_small", size=(128, 128))
_NETTE_RECIPE = Recipe(epochs=60, batch=32, lr=1e-3, precision="bf16-mixed")
_STOP_NOTE = (
    "77.6 is low for a whole schedule of 160 epochs, and the paper's Figure 3 speaks of 160 epochs of a full training "
    "of 310: here networks are stopped after epoch 160 of 310."
)
_DESK_NOTE = "Small scales train a small CAFormer (widths 32 to 128, 5 blocks) on Imagenette at 128 pixels."


def _settings(small: tuple[Row, ...], paper: tuple[Row, ...], recipe: Recipe, seeds: int) -> dict[str, Setting]:
    """seeds: at desk scale."""
    return {
        "smoke": Setting(_SMOKE, _SMOKE_RECIPE, small, seeds=2),
        "desk": Setting(_NETTE, _NETTE_RECIPE, small, seeds),
        "paper": Setting(METAFORMER_TASK, recipe, paper),
    }


TABLE2 = Study(
    name="ska_table2",
    title="SKAFormer and CSKAFormer on ImageNet",
    source=f"{SKA_PAPER}, Table 2",
    question="Do static keys in the second stage of CAFormer keep or raise its accuracy?",
    baseline="CAFormer-S18",
    settings=_settings(_SMALL2, (*_ROWS2, *_FOREIGN), METAFORMER_RECIPE, 5),
    claims=paper_claims(_ROWS2),
    notes=(
        *(METAFORMER_NOTE, START_NOTE, _DESK_NOTE),
        "The printed FLOPs of the CSKA rows are impossible; see the analysis `errata`.",
        "The rows below those of the paper are networks that it cites from others, whose own recipes differ: here they "
        "are trained as the paper's are. docs/papers.md has the networks that no installed package has.",
    ),
)
TABLE5 = Study(
    name="ska_table5",
    title="Stages of a MetaFormer with static keys",
    source=f"{SKA_PAPER}, Table 5",
    question="In which stages of a MetaFormer do static keys keep the accuracy?",
    baseline="C, C, A, A",
    settings=_settings(_SMALL5, _TABLE5, replace(METAFORMER_RECIPE, stop_after=160), 3),
    claims=(
        Claim("C, CSKA, A, A", "C, C, A, A", "top1"),
        Claim("C, CSKA, A, A", "C, C, CSKA, A", "top1"),
        Claim("C, CSKA, A, A", "C, C, A, CSKA", "top1"),
        Claim("C, C, A, A", "C, C, SKA, A", "top1"),
        Claim("C, SKA, A, A", "C, C, A, A", "top1", within=1.0),
        Claim("C, C, A, SKA", "C, C, A, CSKA", "top1", within=1.0),
    ),
    notes=(
        "C is a separable convolution, A attention; the letters are the four stages.",
        *(_STOP_NOTE, _DESK_NOTE, METAFORMER_NOTE, START_NOTE),
    ),
)
FIGURE3 = Study(
    name="ska_fig3",
    title="How many heads a convolutional static key needs",
    source=f"{SKA_PAPER}, Figure 3",
    question="How does the number of heads (groups of the convolution) change CSKA?",
    baseline="2 heads",
    settings={
        **small_settings(
            _heads("size=8, patch=2, dim=32, depth=2", (2, 1)),
            _heads("size=32, patch=4, dim=64, depth=4", (2, 1, 4, 8)),
            seeds=(3, 3),
        ),
        "paper": Setting(METAFORMER_TASK, replace(METAFORMER_RECIPE, stop_after=160), _PAPER_HEADS),
    },
    claims=(Claim("8 heads", "1 heads", "top1"),),
    notes=(
        "Heads share the width: parameters and multiply-accumulates do not change, except for the biases of the keys. "
        "The figure's speed is `images_per_second` (training) and `inference_per_second` of each run.",
        "The paper's figure is of CSKAFormer-S18 on ImageNet, after 160 of 310 epochs, and prints no numbers, not "
        "even those of heads.",
        METAFORMER_NOTE,
        START_NOTE,
    ),
)
