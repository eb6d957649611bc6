"""Settings of detectors: for the data sets that Regard names, and those of papers for COCO."""

from typing import Any

COCO: dict[str, Any] = {
    "size": (800, 1333),
    "resize": "sides",
    "width": 256,
    "strides": (4, 8, 16, 32, 64),
    "anchor": 8.0,
    "ratios": (0.5, 1.0, 2.0),
    "proposals": (2000, 1000),
    "rois": 512,
    "head": 1024,
    "mask_head": (256, 4),
    "detections": 100,
}
"""Fields of the tasks at paper scale: Faster and Mask R-CNN with FPN as in torchvision, detectron2 and mmdetection."""

_TASKS: dict[str, dict[str, Any]] = {
    "bccd": {"size": (192, 256)},
    "nuclei": {"host": "attended_resnet18(mixer='Softmax()', channels=(32, 64, 128, 256))", "size": (320, 320),
               "strides": (4, 8, 16, 32), "proposals": (1000, 600), "candidates": 2000, "rois": 128, "width": 64},
    "cued": {"host": "vit_desk(patch=7)", "size": (84, 84), "strides": (7, 14), "anchor": 2.0, "width": 64, "head": 128,
             "proposals": (100, 50), "rois": 16, "limit": 3200},
}  # fmt: skip
_RECIPES: dict[str, dict[str, Any]] = {
    "nuclei": {"epochs": 8, "batch": 2, "lr": 6e-4},
    "cued": {"augment": "none", "batch": 16, "epochs": 6, "lr": 1e-3},
}


STEPS, MOST_EPOCHS = 840, 70
"""At least, on the user's own data: with 48 pictures 12 minutes on two cores. From random weights 540 steps gave an AP
of 23 on nuclei, an AP50 of 59."""


def defaults(data: str, images: int = 0) -> dict[str, dict[str, Any]]:
    """Fields of task and recipe for a data set: small enough for minutes on a CPU.

    images: to train on, 0 = a named set, whose epochs are known; few images get more epochs, up to 70.
    """
    name = data.partition("-")[0] if data.startswith("cued") else data
    task = {"host": "attended_resnet18(mixer='Softmax()')", "size": (256, 256), **_TASKS.get(name, {})}
    recipe = {"augment": "flips" if name in ("bccd", "nuclei") else "flip", "batch": 4, "epochs": 9, "lr": 4e-4,
              "betas": (0.9, 0.999), "weight_decay": 1e-4, "clip": 5.0, "smoothing": 0.0}  # fmt: skip
    if images:
        recipe["epochs"] = min(MOST_EPOCHS, max(9, -(-STEPS * 4 // images)))
    return {"task": task, "recipe": {**recipe, **_RECIPES.get(name, {})}}
