"""Static Key Attention in Vision, Table 3: detection and instance segmentation with CSKAFormer as the backbone."""

from dataclasses import replace

from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.papers import SKA_PAPER
from regard.lab.tasks.detection import Instances
from regard.lab.tasks.detection.presets import COCO
from regard.lab.train.recipe import Recipe
from regard.mixers import CSKA, SKA

from .placement import TABLE2

# backbone -> (host, printed GFLOPs, images a second, box AP, AP50 and AP75, the same of masks); weights of ImageNet-1k;
# the baseline, softmax, is CAFormer-S18
PRINTED = {
    "ResNet-50": ("resnet50.tv_in1k", 376, 24.0, 38.2, 60.3, 41.2, 34.1, 56.5, 36.9),
    "ResNet-101": ("resnet101.tv_in1k", 518, 17.1, 40.1, 61.6, 44.2, 35.7, 57.6, 38.5),
    "Swin-T": ("swin_tiny_patch4_window7_224.ms_in1k", 534, 19.0, 46.0, 68.1, 50.3, 41.6, 65.1, 44.9),
    "ConvNeXt-T": ("convnext_tiny.fb_in1k", 524, 22.1, 46.2, 67.9, 50.8, 41.7, 65.0, 44.9),
    "ConvFormer-S18": ("convformer_s18.sail_in1k", 502, 18.3, 47.7, 69.6, 52.3, 42.6, 66.3, 45.9),
    "ViT-B": ("vit_base_patch16_224.augreg_in1k", 670, 15.5, 45.5, 67.4, 49.8, 40.9, 63.7, 44.2),
    "EfficientNet-B7": ("tf_efficientnet_b7.aa_in1k", 444, 21.8, 45.0, 67.1, 49.3, 41.0, 63.9, 44.1),
    "softmax": ("caformer_s18", 508, 18.0, 48.6, 70.5, 53.4, 43.7, 67.5, 47.4),
    "CSKAFormer-S18": ("cskaformer_s18(img_size=224, resize='window')", 512, 17.6, 48.7, 70.7, 53.4, 43.8, 67.6, 47.5),
}
_METRICS = ("inference_per_second", "box_map", "box_ap50", "box_ap75", "map", "ap50", "ap75")
_STARTS = {"softmax": "CAFormer-S18", "CSKAFormer-S18": "CSKAFormer-S18"}
"""The rows that are compared, with the row of Table 2 whose trained weights they start from."""
_SMALL = "vit_desk(patch=7, dim={dim}, depth={depth}, heads=2)"


def _paper_rows() -> tuple[Row, ...]:
    return tuple(
        Row(label, None, host=host if label in _STARTS else f"{host}(pretrained=True)",
            paper={"macs": 1e9 * flops / 2, **dict(zip(_METRICS, printed, strict=True))},
            start=(TABLE2, _STARTS[label]) if label in _STARTS else None,
            notes=() if "cska" not in host else (
                "Its keys, of 28 x 28 cells, cover maps in windows: keys of 100 x 160 cells take 295 GMAC a layer. The "
                "paper does not say what it did.",
            ))
        for label, (host, flops, *printed) in PRINTED.items()
    )  # fmt: skip


_SMALL_ROWS = (Row("softmax", None), Row("SKA", SKA()), Row("CSKA", CSKA()), *CONTROLS)
STUDY = Study(
    name="ska_table3",
    title="Static keys in a backbone for instance segmentation",
    source=f"{SKA_PAPER}, Table 3",
    question="Do static keys find objects as well as attention whose keys depend on the image?",
    baseline="softmax",
    metric="map",
    settings={
        "smoke": Setting(
            Instances(host=_SMALL.format(dim=16, depth=1), data="cued-digits", size=(84, 84), limit=16,
                      strides=(7, 14), anchor=2.0, width=16, head=32, proposals=(60, 40), rois=32, mask_head=(16, 1)),
            Recipe(epochs=1, batch=8, lr=1e-3, smoothing=0.0, augment="none"), _SMALL_ROWS, seeds=2,
        ),
        "desk": Setting(
            Instances(host=_SMALL.format(dim=64, depth=4), data="cued", size=(84, 84), strides=(7,), anchor=2.0,
                      width=64, head=128, proposals=(100, 50), rois=32),
            Recipe(epochs=1, batch=32, lr=2e-3, weight_decay=1e-4, clip=5.0, smoothing=0.0, augment="none"),
            _SMALL_ROWS, seeds=4,
        ),
        "paper": Setting(
            Instances(host="caformer_s18", data="coco",
                      **{**COCO, "size": (800, 1280), "resize": "stretch"}, scales=(0.6, 0.7, 0.8, 0.9, 1.0)),
            Recipe(epochs=36, batch=16, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05, warmup=500 / 264_000,
                   schedule="step", milestones=(27 / 36, 33 / 36), clip=0.0, smoothing=0.0, augment="flip"),
            (*_paper_rows(), *(replace(row, start=(TABLE2, "CAFormer-S18")) for row in CONTROLS)),
        ),
    },
    claims=(
        *(Claim(row, "softmax", "map", within=1.0) for row in ("SKA", "CSKA")),
        *(Claim("CSKAFormer-S18", "softmax", metric, within=0.5) for metric in ("map", "box_map")),
    ),
    notes=(
        "At paper scale CAFormer and CSKAFormer start from their runs of `ska_table2`, so that equals are compared; "
        "the other backbones start from weights that timm publishes for ImageNet-1k.",
        "Small scales are `cued` with a plain ViT and a simple feature pyramid: boxes and masks of the items that "
        "match a cue in the first slot, where static keys can find it.",
        "The caption names Mask and Cascade Mask R-CNN and prints one set of rows, whose values look like Mask "
        "R-CNN's; `--set task.detector=cascade_mask` trains the other. The optimizer is not printed: AdamW and the 36 "
        "epochs with steps at 27 and 33 are conventional.",
        "Static keys cannot hide padding, so that at paper scale every image is stretched to 800 x 1280 pixels, in all "
        "rows; the paper's detectors keep the aspect ratio and pad.",
        "The printed FLOPs are two for each multiply-accumulate of the whole detector at 800 x 1280 pixels, by the "
        "rows of Swin-T, ConvNeXt-T and ConvFormer-S18.",
        "The main metric is the mAP of masks; `box_map`, `box_ap50` and `box_ap75` are those of boxes. The printed "
        "images a second are of a V100; here they are of one image a pass, on the machine of the run.",
    ),
)  # fmt: skip
