"""Clips: short videos as folders of frames, or as video files, which are read like images.

A clip of T frames of C channels is an image of T * C channels, frame by frame: sets, caches, crops, flips and
normalisation of images serve clips, and change all frames alike. `frames_apart` gives a model its frames. Of each clip
T frames are read, those in the middle of T equal parts of it (Wang et al. 2016, Temporal Segment Networks).
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from regard.core import DataError, Problems, require
from regard.files.paths import files_below, printable, subfolders, visible

from . import digest as digests
from .folders import BESIDE, NOTES, Split, split_folders
from .images import SUFFIXES, ImageSet, Several, Source, check_labels, size_before_crop, size_of
from .own import DIVIDED, RESERVED, check_classes, check_readable, divide, from_files

log = logging.getLogger("regard.data")

VIDEOS = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".gif"})
"""Of files that PyAV reads, extra "video"."""
COLOURS = 3
"""Channels of the user's own clips."""
LAYOUT = "one folder for each class, and in it a folder of frames or a video file for each clip"


@dataclass(frozen=True)
class Clip(Several):
    """A folder of frames, in the order of the numbers in their names, or a video file; `frames` of it are read."""

    path: Path
    frames: int

    def __str__(self) -> str:
        return str(self.path)

    def parts(self) -> list[Source]:
        """Raises: ValueError for fewer frames, or a file that is no video; MissingExtra for one without PyAV."""
        if not self.path.is_dir():
            return list(_read_video(self.path, self.frames))
        files = frame_files(self.path)
        return [files[row] for row in _spread(len(files), self.frames)]


def frame_files(folder: Path) -> list[Path]:
    """The images in a folder, in the order of the numbers in their names."""
    names = (entry.name for entry in visible(folder) if Path(entry.name).suffix.lower() in SUFFIXES)
    return [folder / name for name in sorted(names, key=_by_numbers)]


def measure(clip: Path) -> tuple[int, tuple[int, int]]:
    """The number of frames of a clip, and (height, width) of its first. Raises: ValueError, DataError."""
    if clip.is_dir():
        files = frame_files(clip)
        return len(files), size_of(files[0])
    require("av", extra="video")
    number, size = 0, (0, 0)
    for number, frame in enumerate(_decoded(clip), 1):
        size = size if number > 1 else (frame.height, frame.width)
    return number, size


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """frame_2 lies before frame_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _spread(number: int, frames: int) -> list[int]:
    """The rows in the middle of equal parts. Raises: ValueError."""
    if number < frames:
        raise ValueError(f"it has {number} frame{'s' * (number != 1)}, {frames} are taken")
    return [(2 * part + 1) * number // (2 * frames) for part in range(frames)]


def _read_video(file: Path, frames: int) -> Iterator[np.ndarray]:
    """The frames (h, w, 3), upright; the file is read twice, since few name their number of frames."""
    require("av", extra="video")
    number = sum(1 for _ in _decoded(file))
    rows = set(_spread(number, frames))
    for row, frame in enumerate(_decoded(file)):
        if row in rows:
            yield np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))


def _decoded(file: Path) -> Iterator:
    """The frames of a video file as PyAV gives them. Raises: ValueError."""
    import av

    try:
        with av.open(str(file)) as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            yield from container.decode(video=0)
    except av.FFmpegError as error:
        raise ValueError(f"it is no video that PyAV reads: {error.strerror}") from error


def clips_below(path: Path) -> list[Path]:
    """The clips in a folder and its subfolders, sorted; `path` itself if it is one. Raises: DataError."""
    if not path.is_dir():
        return [path]
    entries = [path / entry.name for entry in visible(path)]
    if any(entry.suffix.lower() in SUFFIXES - VIDEOS and entry.is_file() for entry in entries):
        return [path]
    found: list[Path] = []
    for entry in entries:
        if entry.is_dir():
            found += clips_below(entry)
        elif entry.suffix.lower() in VIDEOS:
            found.append(entry)
        elif entry.suffix.lower() not in BESIDE and entry.stem.upper() not in NOTES:
            log.warning("%s is neither a frame nor a video, and is not read", printable(str(entry)))
    return found


def read_splits(path: Path, reserved: bool = False) -> tuple[tuple[str, ...], dict[str, tuple[list[Path], np.ndarray]]]:
    """The classes, and clips and labels of "train" and, if there is one, of "test"; no frame is decoded.

    Splits and classes are folders, as of images. reserved: and of "val", if it is beside a test. Raises: DataError.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no folder; expected {LAYOUT}")
    roots = split_folders(path)
    if not reserved:
        roots.pop("val", None)
    classes = tuple(folder.name for folder in subfolders(roots["train"]))
    if len(classes) < 2:
        raise DataError(f"{roots['train']} has {len(classes)} class folders; expected {LAYOUT}, and two classes")
    problems, splits = Problems(), {}
    for split, root in roots.items():
        unknown = [folder.name for folder in subfolders(root) if folder.name not in classes]
        if unknown:
            problems.append(f"{root} has classes that the training split does not have: {', '.join(unknown[:5])}")
        clips, labels = list[Path](), list[int]()
        for label, name in enumerate(classes):
            found = clips_below(root / name) if (root / name).is_dir() else []
            if found == [root / name]:
                problems.append(f"{root / name} has frames itself; expected {LAYOUT}")
            clips += found
            labels += [label] * len(found)
        splits[split] = clips, np.array(labels, np.int64)
    problems.raise_all()
    return classes, splits


@lru_cache(maxsize=16)
def digest(path: Path, kind: str = "", reserved: bool = False) -> str:
    """What stands for the clips in the key of a run, as `own.digest` for images. Raises: DataError."""
    _, splits = read_splits(path, reserved)
    files = digests.relative(path, files_below(path, SUFFIXES | VIDEOS))
    total = digests.identity_of(path, files, kind)
    return f"{DIVIDED * (len(splits) == 1)}{total}{RESERVED * ('val' in splits)}"


def present_digest(path: Path, kind: str = "", reserved: bool = False) -> str:
    """`digest`, computed anew if the files have changed meanwhile. Raises: DataError."""
    digests.forget_if_changed(path, digest)
    return digest(path, kind, reserved)


def load(
    path: Path, frames: int, size: tuple[int, int], corrupt: str, kind: str = "", reserved: bool = False
) -> ImageSet:
    """The user's own clips as images of `frames` * 3 channels and of 8/7 of `size`, which are cropped to `size` later.

    Without a test split every fifth clip of each class is for the test. kind, reserved: as for `own.load`.
    Raises: DataError.
    """
    return _load(path, frames, size, corrupt, digest(path, kind, reserved), kind, reserved)


@lru_cache(maxsize=2)
def _load(
    path: Path, frames: int, size: tuple[int, int], corrupt: str, total: str, kind: str, reserved: bool
) -> ImageSet:
    classes, found = read_splits(path, reserved)
    splits: dict[str, Split] = {}
    for split, (paths, labels) in found.items():
        check_labels(f"the {split} split of {path}", labels, len(classes))
        splits[split] = [Clip(clip, frames) for clip in paths], [str(clip) for clip in paths], labels
    if len(splits) == 1:
        splits = divide(*splits["train"])

    def check() -> None:
        if digest.__wrapped__(path, kind, reserved) != total:
            digest.cache_clear()
            raise DataError(f"the files of {path} have changed since they were first read: start again")

    images = {}
    for split, (sources, names, labels) in splits.items():
        check_classes(path, classes, labels, splits["train"][2])
        key = f"clips-{total}-{split}-{frames}"
        images[split] = from_files(
            sources, names, labels, size_before_crop(size), corrupt, key, check, COLOURS * frames
        )
        check_readable(path, split, classes, labels, images[split].labels)
    own_set = ImageSet(f"own:{total}", classes, images["train"], images["test"], total, images.get("val"))
    return replace(own_set, divided=total.startswith(DIVIDED))


def frames_apart(images: Tensor, frames: int, frames_first: bool = False) -> Tensor:
    """Clips (n, frames * C, h, w), frame by frame, as (n, C, frames, h, w), which video models of torchvision take, or
    as (n, frames, C, h, w), which those of transformers take."""
    apart = images.unflatten(1, (frames, -1))
    return apart if frames_first else apart.transpose(1, 2)


def frames_joined(clips: Tensor, frames_first: bool = False) -> Tensor:
    """The inverse of `frames_apart`."""
    return (clips if frames_first else clips.transpose(1, 2)).flatten(1, 2)


def shared_by_frames(statistics: Sequence[Sequence[float]], frames: int) -> tuple[list[float], list[float]]:
    """Mean and deviation of each colour over all frames, from those of each channel; repeated for each frame."""
    mean, deviation = (np.asarray(part, np.float64).reshape(frames, -1) for part in statistics)
    whole = mean.mean(0)
    spread = np.sqrt((deviation**2 + (mean - whole) ** 2).mean(0))
    return [float(value) for value in np.tile(whole, frames)], [float(value) for value in np.tile(spread, frames)]
