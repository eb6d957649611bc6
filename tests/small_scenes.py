"""Generated images with rectangles, and folders of them in the format of COCO."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = (48, 64)
"""(height, width) of the images."""


def content(images: int, masks: bool, first: int) -> dict[str, Any]:
    """The content of an annotation file: image i has i rectangles of category 3 or 7, so that the first has none."""
    rng = np.random.default_rng(first)
    annotations = []
    for image in range(images):
        for _ in range(image):
            left, top = rng.integers(0, 40), rng.integers(0, 28)
            width, height = rng.integers(8, 20), rng.integers(8, 18)
            box = [int(value) for value in (left, top, width, height)]
            entry = {"id": len(annotations) + 1, "image_id": first + image, "category_id": int(rng.choice([3, 7]))}
            entry |= {"bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            if masks:
                right, bottom = box[0] + box[2], box[1] + box[3]
                entry["segmentation"] = [[box[0], box[1], right, box[1], right, bottom, box[0], bottom]]
            annotations.append(entry)
    entries = [
        {"id": first + i, "file_name": f"{first + i}.png", "height": SIZE[0], "width": SIZE[1]} for i in range(images)
    ]
    return {
        "images": entries,
        "annotations": annotations,
        "categories": [{"id": 7, "name": "dark"}, {"id": 3, "name": "bright"}],
    }


def draw(made: dict[str, Any], folder: Path) -> None:
    """The images: bright or dark rectangles on grey noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in made["images"]:
        rng = np.random.default_rng(entry["id"])
        pixels = rng.integers(110, 140, (*SIZE, 3)).astype(np.uint8)
        for annotation in made["annotations"]:
            if annotation["image_id"] == entry["id"]:
                left, top, width, height = annotation["bbox"]
                pixels[top : top + height, left : left + width] = 240 if annotation["category_id"] == 3 else 10
        Image.fromarray(pixels).save(folder / entry["file_name"])


def coco_folder(path: Path, *, masks: bool = False, train: int = 6) -> Path:
    """A folder of COCO's format with train.json and val.json."""
    for split, images, first in (("train", train, 1), ("val", 4, 101)):
        made = content(images, masks, first)
        draw(made, path / "images")
        (path / f"{split}.json").write_text(json.dumps(made))
    return path
