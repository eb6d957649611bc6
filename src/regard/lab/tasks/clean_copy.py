"""A clean copy of the user's own images: one layout, upright pictures, without what no training can use.

What the readers of data mend with a warning, such as boxes that leave their image, lists, nested exports and masks in
colours, is written as they read it.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import ConfigError, DataError, StoreError
from regard.core.validation import short_repr
from regard.files.atomic import json_text, write_atomically
from regard.images import own
from regard.images.images import Source, decode, header, open_image
from regard.lab.data.streamed.names import is_stream

from .check_data import TASK_OF, kind_of, path_to_check
from .detection import data as detection
from .detection import masks
from .detection.coco import beyond, box_of
from .detection.scenes import Scene
from .detection.score import as_coco
from .segmentation import data as segmentation

UNCHANGED = {"JPEG": ".jpg", "PNG": ".png"}
"""Formats of files that are copied as they are, if they are upright and grey or RGB."""
LONGEST = 255
"""Bytes of the name of a folder."""


def write_clean_copy(
    data: str, out: Path, kind: str = "", void: int | None = None, classes: int | None = None, exif: str | None = None
) -> list[str]:
    """Write images with their classes, boxes or masks to a new folder; returns what was written, and a line for each
    image that was left out.

    The arguments beside `out` are those of `check_data`. Class folders: OUT/SPLIT/CLASS; boxes: OUT/SPLIT.json of
    COCO's format with OUT/images, named as they were, or with `original` in the JSON where a name occurs twice; masks:
    OUT/images/SPLIT, OUT/masks/SPLIT and OUT/classes.txt. Data without a test, or validation, get the division that a
    training would make. Images that cannot be read are left out, but not beside masks.
    Raises: ConfigError for data that are no images, and for a folder that has something in it or lies in the data;
    DataError for what a training refuses; StoreError.
    """
    if is_stream(data):
        raise ConfigError(f"--fix writes images of files, not of the stream {data}")
    path = path_to_check(data, kind)
    kind = kind or kind_of(path)
    if kind not in ("classification", "segmentation", *TASK_OF):
        raise ConfigError(f"--fix writes images with classes, boxes or masks, not {data}")
    inside = out.resolve().is_relative_to(path)
    if inside or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        reason = f"lies in {path}" if inside else "is in use"
        raise ConfigError(f"--fix writes to a new folder outside of the data: {out} {reason}")
    try:
        if kind == "classification":
            written = _write_classes(path, out)
        elif kind == "segmentation":
            written = _write_masks(path, out, 255 if void is None else void, classes or 0, exif or "")
        else:
            choices = detection.Choices(TASK_OF[kind].kind == "segm", "skip", exif or "", outlines=True)
            written = _write_boxes(path, out, choices)
        lines = list(written)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
    left_out = [f"left out: {line}" for line in lines if line]
    return [f"{out}: {len(lines) - len(left_out)} images written", *left_out]


def _write_classes(path: Path, out: Path) -> Iterator[str]:
    """Writes each image; yields "", or why it is left out."""
    classes, splits = own.read_splits(path, True)
    for name in classes:
        if Path(name).name != name or name.startswith(".") or "\0" in name or len(name.encode()) > LONGEST:
            raise DataError(f"the class {short_repr(name)} of {path} cannot be the name of a folder: rename it")
    for split, (sources, names, labels) in splits.items():
        for row, (source, label) in enumerate(zip(sources, labels.tolist(), strict=True)):
            try:
                _write_image(source, out / split / classes[label] / f"{row:05d}")
                yield ""
            except DataError as error:
                yield f"{names[row]} {error}"


def _write_masks(path: Path, out: Path, void: int, classes: int, exif: str) -> Iterator[str]:
    found = segmentation.own_set(path, void, classes, "", exif=exif)
    out.mkdir(parents=True, exist_ok=True)
    (out / "classes.txt").write_text("".join(f"{name}\n" for name in found.classes), encoding="utf-8")
    for split, photos in found.splits.items():
        if split == "val" and photos is found.splits.get("test"):
            continue
        images, labels = (out / part / split for part in ("images", "masks"))
        for row, photo in enumerate(photos):
            assert isinstance(photo, segmentation.Photo)
            _write_png(photo.mask, labels / f"{row:05d}.png")
            _write_image(photo.image_file, images / f"{row:05d}")
            yield ""


def _write_boxes(path: Path, out: Path, choices: detection.Choices) -> Iterator[str]:
    found = detection.own_splits(path, choices)
    categories = [
        {"id": number, "name": name}
        for number, name in zip(found.categories.ids, found.categories.names, strict=True)
    ]  # fmt: skip
    stems = [Path(scene.name).stem.lower() for scenes in found.splits.values() for scene in scenes]
    keep = len(set(stems)) == len(stems)
    for split, scenes in found.splits.items():
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for row, scene in enumerate(scenes):
            try:
                stem = Path(scene.name).stem if keep else f"{split}-{row:05d}"
                file = _write_image(scene.source, out / "images" / stem)
            except DataError as error:
                yield f"{scene.name} {error}"
                continue
            height, width = scene.size
            entry = {"id": row + 1, "file_name": file.name, "height": height, "width": width}
            images.append(entry | ({} if keep else {"original": os.path.relpath(scene.name, path)}))
            annotations += _annotations(scene, row + 1, len(annotations), found.categories.ids)
            yield ""
        content = {"images": images, "annotations": annotations, "categories": categories}
        write_atomically(out / f"{split}.json", json_text(content))


def _annotations(scene: Scene, image: int, first: int, ids: Sequence[int]) -> list[dict[str, Any]]:
    """The objects of an image as COCO writes them, numbered behind the first."""
    found, objects = [], scene.objects
    for row, label in enumerate(objects.labels.tolist()):
        entry = as_coco(objects, row, first + row + 1, image, ids[label])
        outline = objects.outlines[row] if objects.outlines else None
        found.append(entry | ({} if outline is None else {"segmentation": _within(outline, scene.size)}))
    return found


def _within(outline: Any, size: tuple[int, int]) -> Any:
    """A polygon or mask as annotated; what reaches beyond its image of that size is clipped, as an encoding."""
    box = box_of(outline)
    if not box or not beyond(box, size):
        return outline
    with suppress(ValueError):  # a polygon that only tasks with masks refuse
        return masks.as_text(masks.from_annotation(outline, size))
    return outline


def _write_image(source: Source, stem: Path) -> Path:
    """The file that was written: its bytes where it is plain, else a PNG. Raises: DataError if it cannot be read."""
    try:
        pixels = decode(source, None, 3)
    except Exception as error:  # Pillow raises various errors for a damaged file
        raise DataError(f"cannot be read as an image: {error}") from error
    stem.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Path):
        with open_image(source) as image:
            suffix = UNCHANGED.get(image.format or "", "") if image.mode in ("L", "RGB") else ""
        if suffix and header(source)[1] == 1:
            return Path(shutil.copyfile(source, f"{stem}{suffix}"))
    return _write_png(pixels, Path(f"{stem}.png"))


def _write_png(pixels: np.ndarray, file: Path) -> Path:
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file
