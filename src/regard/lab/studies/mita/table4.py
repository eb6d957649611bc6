"""Mixture-of-Top-k Attention, Table 4: semantic segmentation with plain ViTs and four decoders."""

from regard.core import MixerConfig
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.papers import MITA_SOURCE
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.train.recipe import Recipe
from regard.mixers.mita.mita import MiTA

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
            macs, miou = values[index]
            rows.append(
                Row(f"ViT-{model[0].upper()} {label}", mixer, host=host, paper={"miou": miou, "macs": 1e9 * macs},
                    task={"head": head, "size": (side, side)})
            )  # fmt: skip
    return (*rows, *CONTROLS)


def _small_rows(m: int) -> tuple[Row, ...]:
    """The decoders on softmax attention, and MiTA with the last one."""
    return (
        Row("Mask Transformer", None, task={"head": "mask"}),
        Row("DEPICT", None, task={"head": "depict"}),
        Row("CBT", None, task={"head": "cbt"}),
        Row("MiTA, CBT", MiTA(m=m, k=m), task={"head": "cbt"}),
        Row("linear", None),
        Row("MiTA, linear", MiTA(m=m, k=m)),
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
            task=Segmentation(host="vit_desk(patch=14, dim=16, depth=1, heads=2)", data="cued-digits", size=(84, 84),
                              limit=16),
            recipe=Recipe(epochs=1, batch=8, lr=2e-3, smoothing=0.0, augment="none"),
            seeds=2,
            rows=_small_rows(4),
        ),
        "desk": Setting(
            task=Segmentation(host="vit_desk(patch=7, dim=64, depth=4, heads=2)", data="cued", size=(84, 84),
                              head="pixels"),
            recipe=Recipe(epochs=1, batch=32, lr=2e-3, smoothing=0.0, augment="none"),
            seeds=4,
            rows=_small_rows(16),
        ),
        "paper": Setting(
            task=Segmentation(host="vit_small_patch16_384.augreg_in21k_ft_in1k(pretrained=True, img_size=512)",
                              data="ade20k", size=(512, 512), scales=(0.5, 2.0), void=0, classes=150, split="val"),
            recipe=Recipe(epochs=64, batch=8, optimizer="momentum", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0,
                          warmup=0.0, schedule="poly", floor=0.01, clip=0.0, smoothing=0.0, augment="scale+colour"),
            seeds=3,
            rows=(*_paper_rows(), Row("linear", None)),
        ),
    },
    claims=(
        Claim("MiTA, CBT", "CBT", "miou", within=1.5),
        Claim("MiTA, linear", "linear", "miou", within=1.5),
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
