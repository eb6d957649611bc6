"""Mixture-of-Top-k Attention, Table 4: semantic segmentation with plain ViTs and four decoders."""

from dataclasses import replace

from regard.core import MixerConfig
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.focus_vit.network import focus_backbone
from regard.lab.studies.papers import MITA_SOURCE
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.train.recipe import Recipe
from regard.mixers import MiTA

# printed (GMACs, mIoU) of ViT-T, -S, -B at 512 and -L at 640 pixels
PRINTED = {
    "Mask Transformer": ((13, 38.1), (38, 45.3), (128, 48.5), (667, 51.8)),
    "DEPICT": ((13, 39.3), (35, 46.7), (111, 49.2), (628, 52.9)),
    "CBT": ((12, 39.1), (33, 45.8), (111, 49.3), (622, 53.3)),
    "MiTA, CBT": ((7, 36.5), (25, 44.5), (95, 48.1), (508, 50.5)),
}
_MODELS = ("tiny", "small", "base", "large")
# heads of 100 channels in the decoders of DEPICT and CBT, from the printed MACs
_DEPICT_HEADS, _CBT_HEADS = (3, 3, 3, 6), (3, 3, 6, 9)


def _paper_rows() -> tuple[Row, ...]:
    rows = []
    for index, model in enumerate(_MODELS):
        side = 640 if model == "large" else 512
        host = f"vit_{model}_patch16_384.augreg_in21k_ft_in1k(pretrained=True, drop_path_rate=0.1, img_size={side})"
        heads = ("mask", f"depict(heads={_DEPICT_HEADS[index]})", f"cbt(heads={_CBT_HEADS[index]})")
        mixers: tuple[MixerConfig | None, ...] = (None, None, None, MiTA(m=49, k=49))
        for (label, values), head, mixer in zip(PRINTED.items(), (*heads, heads[2]), mixers, strict=True):
            paper = {"miou": values[index][1], "macs": 1e9 * values[index][0]}
            task = {"head": head, "size": (side, side)}
            rows.append(Row(f"ViT-{model[0].upper()} {label}", mixer, host=host, paper=paper, task=task))
    return (*rows, *CONTROLS)


_HOST = "vit_desk(patch={}, dim={}, depth={}, heads=2)"


def _small_rows(m: int) -> tuple[Row, ...]:
    """The decoders on softmax attention, and MiTA with the last one."""
    mita, heads = MiTA(m=m, k=m), {"Mask Transformer": "mask", "DEPICT": "depict", "CBT": "cbt"}
    return (
        *(Row(label, None, task={"head": head}) for label, head in heads.items()),
        Row("MiTA, CBT", mita, task={"head": "cbt"}),
        *(Row("linear", None), Row("MiTA, linear", mita)),
        *CONTROLS,
    )


STUDY = Study(
    name="mita_table4",
    title="MiTA in plain ViTs for semantic segmentation",
    source=f"{MITA_SOURCE}, Table 4",
    question="How much does a mixture of top-k experts lose in a segmentation backbone, and what does it save?",
    baseline="linear",
    metric="miou",
    settings={
        "smoke": Setting(
            Segmentation(host=_HOST.format(14, 16, 1), data="cued-digits", size=(84, 84), limit=16),
            Recipe(epochs=1, batch=8, lr=2e-3, smoothing=0.0, augment="none"), _small_rows(4), seeds=2,
        ),
        "desk": Setting(
            Segmentation(host=_HOST.format(7, 64, 4), data="cued", size=(84, 84), head="pixels"),
            Recipe(epochs=1, batch=32, lr=2e-3, smoothing=0.0, augment="none"), _small_rows(16), seeds=4,
        ),
        "paper": Setting(
            Segmentation(host="vit_small_patch16_384.augreg_in21k_ft_in1k(pretrained=True, img_size=512)",
                         data="ade20k", size=(512, 512), scales=(0.5, 2.0), void=0, classes=150, split="val"),
            Recipe(epochs=64, batch=8, optimizer="momentum", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0,
                   warmup=0.0, schedule="poly", floor=0.01, clip=0.0, smoothing=0.0, augment="scale+colour"),
            (*_paper_rows(), Row("linear", None)),
        ),
    },
    claims=(
        *(Claim(f"MiTA, {head}", head, "miou", within=1.5) for head in ("CBT", "linear")),
        *(Claim(f"ViT-{m} CBT", f"ViT-{m} MiTA, CBT", "miou") for m in "TSBL"),
    ),
    notes=(
        "Small scales are `cued`: the pixels of the items that match a cue, whose IoU is the metric. A linear layer is "
        "the head of the gate; the decoders have attention of their own, which could match the items without the "
        "backbone.",
        "The paper prints 12 G for CBT with ViT-T; its formulas give 11.2. Widths of DEPICT and CBT are those that "
        "the printed MACs need: 300 channels, but 600 of DEPICT-L and CBT-B, 900 of CBT-L.",
        "ViTs are pretrained on ImageNet-21k and, as all published weights for 384 pixels, fine-tuned on ImageNet-1k; "
        "MiTA replaces their attention without pretraining.",
        "Random crops are taken as they come; the published ones are drawn again where one class has more than 75 % of "
        "the pixels (`cat_max_ratio`). The published jitter of hue is left out, that of brightness, contrast and "
        "saturation is there.",
        "Windows of the test are crops of the trained size without overlap, at one scale, as published.",
    ),
)  # fmt: skip


def _tuned_rows(m: int) -> tuple[Row, ...]:
    """Without the decoders that the paper compares with its own."""
    return tuple(row for row in _small_rows(m) if row.label not in ("Mask Transformer", "DEPICT"))


TUNED = Study(
    name="mita_table4_tuned",
    title="MiTA in a trained backbone for segmentation",
    source=STUDY.source,
    question="What does a trained backbone lose in segmentation when it is fine-tuned with MiTA?",
    baseline="linear",
    metric="miou",
    settings={
        "smoke": replace(STUDY.setting("smoke"), rows=_tuned_rows(4)),
        "desk": Setting(
            Segmentation(host="focus_backbone(pretrained=True)", data="camvid", size=(224, 308),
                         extra=(focus_backbone,)),
            Recipe(epochs=12, batch=8, lr=2e-4, betas=(0.9, 0.999), smoothing=0.0, augment="scale",
                   precision="bf16-mixed"),
            _tuned_rows(36),
        ),
    },
    claims=STUDY.claims[:2],
    notes=(
        "The backbone is that of focus_vit, a DINOv2 ViT-S/14, on the street scenes of camvid: 352 tokens, where "
        "the paper's ViTs have 1,024. The head is new; controls start from the same backbone.",
        *STUDY.notes[-1:],
    ),
)  # fmt: skip
