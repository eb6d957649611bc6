"""An Empirical Study of Spatial Attention Mechanisms on images: Figure 3a and 3b, Tables 2 and 3."""

from collections.abc import Mapping
from functools import partial

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.papers import ESA_PAPER
from regard.lab.tasks.base import Task
from regard.lab.tasks.detection import Detection
from regard.lab.tasks.detection.presets import COCO
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.train.recipe import Recipe

from .attended_resnets import deformable
from .costs import factors
from .rows import PAIRS, factor_claims, figure3_rows, pair_rows, values_at, window_rows

SEEDS = {"smoke": 2, "desk": 4, "paper": 3}
SCALES = tuple(SEEDS)
WINDOWS, SMALL_WINDOWS = (31, 25, 19, 13), (13, 7, 5, 3)
"""Widths of Table 3, and those of the small scales, whose maps have 11 x 11 cells."""
_SMALL = "attended_resnet18(channels=({channels}), {more}heads=2)"
_EARLY = "stages=(2, 3), "
"""Attention where the pyramid takes its maps."""
_SMOKE = Recipe(epochs=1, batch=8, lr=1e-3, smoothing=0.0, augment="none")
TASKS: Mapping[str, Mapping[str, Task]] = {
    "detection": {
        "smoke": Detection(
            host=_SMALL.format(channels="8, 16, 16, 16", more=_EARLY), data="cued-digits", size=(84, 84), limit=16,
            strides=(8, 16), width=32, head=32, anchor=2.0, proposals=(60, 40), rois=32,
        ),
        "desk": Detection(
            host=_SMALL.format(channels="16, 32, 64, 64", more=_EARLY), data="cued", size=(84, 84), strides=(8, 16),
            width=64, head=128, anchor=2.0, proposals=(100, 50), rois=32,
        ),
        "paper": Detection(
            host="attended_resnet50(pretrained=True, pretrained_cfg='tv_in1k', frozen=True)", data="coco",
            detector="faster", **COCO,
        ),
    },
    "segmentation": {
        "smoke": Segmentation(
            host=_SMALL.format(channels="8, 8, 16, 16", more="output_stride=8, "), data="cued-digits", size=(84, 84),
            head="conv(attention=True, heads=2)", limit=16,
        ),
        "desk": Segmentation(
            host=_SMALL.format(channels="16, 32, 64, 64", more="output_stride=8, "), data="cued", size=(84, 84),
            head="conv(attention=True, heads=2)",
        ),
        "paper": Segmentation(
            host="attended_resnet50(pretrained=True, pretrained_cfg='tv_in1k', output_stride=8)", data="cityscapes",
            size=(769, 769), shorter=1024, head="conv(attention=True)", scales=(0.7, 2.0), split="val",
        ),
    },
}  # fmt: skip
RECIPES = {
    "detection": {
        "smoke": _SMOKE,
        "desk": Recipe(epochs=1, batch=32, lr=2e-3, weight_decay=1e-4, clip=5.0, smoothing=0.0, augment="none"),
        "paper": Recipe(epochs=12, batch=16, optimizer="momentum", lr=0.02, betas=(0.9, 0.999), weight_decay=1e-4,
                        warmup=500 / 88_000, schedule="step", milestones=(8 / 12, 11 / 12), clip=0.0, smoothing=0.0,
                        augment="flip"),
    },
    "segmentation": {
        "smoke": _SMOKE,
        "desk": Recipe(epochs=1, batch=32, lr=2e-3, smoothing=0.0, augment="none"),
        "paper": Recipe(epochs=161, batch=8, optimizer="momentum", lr=0.005, betas=(0.9, 0.999), weight_decay=1e-4,
                        warmup=0.0, schedule="poly", clip=0.0, smoothing=0.0, augment="scale"),
    },
}  # fmt: skip
_METRIC = {"detection": "map", "segmentation": "miou"}
_TITLE = {"detection": "object detection", "segmentation": "semantic segmentation"}
NOTES = {
    "detection": (
        "Small scales are `cued`: boxes of the items that match a cue, with a narrow attended ResNet-18 and two maps "
        "of features. Paper scale is COCO 2017 with Faster R-CNN, FPN and ResNet-50 with attention in conv4 and conv5; "
        "the stem, conv2 and all batch normalisation keep their weights, as is usual with published ones. Images "
        "without objects are trained on, too.",
    ),
    "segmentation": (
        "Small scales are `cued`: pixels of the items that match a cue, with a narrow attended ResNet-18 of stride 8; "
        "the metric is the IoU of these pixels. Paper scale is Cityscapes with ResNet-50 of stride 8, attention in "
        "conv4 and conv5, and one more module between the convolutions of the head. The paper's batch normalisation "
        "is synchronised over 8 GPUs with one image each, here a device has all images of its part of the batch.",
    ),
}
_COMMON = (
    "The digits are E1 to E4: query and key content, query content and relative position, key content alone, relative "
    "position alone.",
    "gamma of an attended block starts at zero.",
)


def _deformable(task: str, scale: str, terms: str, values: Mapping[str, int | float]) -> Row:
    host = deformable(TASKS[task][scale].host)
    return Row(f"{terms} + deformable", factors(terms), host=host, removed=terms == "w/o", paper=dict(values))


def settings(task: str, rows: Mapping[str, tuple[Row, ...]]) -> dict[str, Setting]:
    """The settings of "detection" or "segmentation". rows: by scale."""
    return {scale: Setting(TASKS[task][scale], RECIPES[task][scale], rows[scale], SEEDS[scale]) for scale in SCALES}


def _figure3(task: str, panel: str) -> Study:
    metric = _METRIC[task]
    rows = {scale: figure3_rows(values_at(metric, scale), partial(_deformable, task, scale)) for scale in SCALES}
    return Study(
        name=f"esa_fig3_{task}", title=f"Which of the four factors does {_TITLE[task]} need?",
        source=f"{ESA_PAPER}, Figure 3{panel}", baseline="1111", metric=metric,
        question="What do query content, key content and relative position each add to attention?",
        settings=settings(task, rows), notes=(*NOTES[task], *_COMMON),
        claims=(*factor_claims(metric), Claim("0010 + deformable", "1111", metric)),
    )  # fmt: skip


def _table2(task: str) -> Study:
    metric = _METRIC[task]
    rows = {scale: pair_rows(values_at(metric, scale), partial(_deformable, task, scale)) for scale in SCALES}
    return Study(
        name=f"esa_table2_{task}",
        title=f"Deformable convolution, or query content and relative position, in {_TITLE[task]}",
        source=f"{ESA_PAPER}, Table 2",
        question="Does deformable convolution do the work of query content and relative position (E2), and more?",
        baseline="1111",
        metric=metric,
        settings=settings(task, rows),
        claims=(
            *(Claim(f"{after} + deformable", before, metric) for before, after in PAIRS),
            Claim("0010 + deformable", "1111 + deformable", metric, within=1.0),
        ),
        notes=("The offsets start at zero and learn at a tenth of the learning rate.", *NOTES[task], *_COMMON),
    )


def _table3(task: str) -> Study:
    metric = _METRIC[task]
    small = window_rows(SMALL_WINDOWS, 2)
    paper = window_rows(WINDOWS, 2, metric, kernel_bias=False)
    return Study(
        name=f"esa_table3_{task}",
        title=f"Dynamic convolution, or E2 in the same window, in {_TITLE[task]}",
        source=f"{ESA_PAPER}, Table 3",
        question="In the same window, is dynamic convolution worse on images than attention by E2?",
        baseline="0100 in 13x13",
        metric=metric,
        settings=settings(task, {"smoke": small, "desk": small, "paper": paper}),
        claims=(
            *(Claim(f"0100 in {n}x{n}", f"dynamic {n}x{n}", metric) for n in dict.fromkeys((*WINDOWS, *SMALL_WINDOWS))),
            *(
                Claim(f"{mechanism} {wide}x{wide}", f"{mechanism} {narrow}x{narrow}", metric)
                for wide, *_, narrow in (WINDOWS, SMALL_WINDOWS)
                for mechanism in ("0100 in", "dynamic")
            ),
        ),
        notes=(*NOTES[task], *_COMMON),
    )


FIGURE3_DETECTION, FIGURE3_SEGMENTATION = _figure3("detection", "a"), _figure3("segmentation", "b")
TABLE2_DETECTION, TABLE2_SEGMENTATION = _table2("detection"), _table2("segmentation")
TABLE3_DETECTION, TABLE3_SEGMENTATION = _table3("detection"), _table3("segmentation")
