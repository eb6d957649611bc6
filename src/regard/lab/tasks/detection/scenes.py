"""Scenes: images with the boxes and masks of their objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from regard.images.images import Source

Rle = dict[str, Any]
"""A mask as a compressed run-length encoding of COCO: size [height, width] and counts, bytes."""


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of an image, in pixels of the original image.

    boxes: left, top, right, bottom. labels: from 0. crowd: a box or mask of several objects, which is no target in
    training, and no error of a prediction that lies in it. areas: of the masks, or as annotated. masks: None without.
    outlines: polygons or masks as annotated, None for an object without; read for `regard data check` alone.
    """

    boxes: Float[np.ndarray, "n 4"]
    labels: Int64[np.ndarray, " n"]
    crowd: Bool[np.ndarray, " n"]
    areas: Float[np.ndarray, " n"]
    masks: tuple[Rle, ...] | None = None
    outlines: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Scene:
    """An image with its objects. name: for messages. source: its file or pixels. size: (height, width). number: the id
    of the image in its annotation file."""

    name: str
    source: Source
    size: tuple[int, int]
    objects: Objects
    number: int

    @property
    def file(self) -> Path:
        """The source, of a scene that was read from a file."""
        assert isinstance(self.source, Path)
        return self.source


@dataclass(frozen=True, eq=False)
class SceneSet:
    """A data set for detection.

    category_ids: the numbers of the classes in the annotation files. splits: "train", and "val" or "test" or both.
    checksum: 64 hexadecimal digits of a digest of the data.
    """

    name: str
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    channels: int
    splits: Mapping[str, Sequence[Scene]]
    checksum: str


def objects_of(
    boxes: Sequence[Sequence[float]],
    labels: Sequence[int],
    crowd: Sequence[bool] = (),
    areas: Sequence[float] = (),
    masks: Sequence[Rle] | None = None,
) -> Objects:
    """`Objects` of lists; without crowd there is none, without areas they are those of the boxes."""
    array = np.asarray(boxes, np.float32).reshape(-1, 4)
    own = (array[:, 2] - array[:, 0]) * (array[:, 3] - array[:, 1])
    return Objects(
        array,
        np.asarray(labels, np.int64).reshape(-1),
        np.asarray(crowd, bool) if len(crowd) else np.zeros(len(array), bool),
        np.asarray(areas, np.float32) if len(areas) else own.astype(np.float32),
        None if masks is None else tuple(masks),
    )
