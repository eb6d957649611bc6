"""Clips: short videos as folders of frames, or as video files, which are read like images.

A clip of T frames of C channels is an image of T * C channels, frame by frame: sets, caches, crops, flips and
normalisation of images serve clips, and change all frames alike. `frames_apart` gives a model its frames. Of each clip
T frames are read, those in the middle of T equal parts of it (Wang et al. 2016, Temporal Segment Networks).
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.core import DataError, Problems, require
from regard.files.paths import files_below, printable, subfolders, visible

from . import digest as digests
from .folders import BESIDE, NOTES, split_folders, warn_of_alike
from .images import SUFFIXES, Images, ImageSet, Several, Source, Split, check_labels, read_image, size_before_crop
from .own import DIVIDED, RESERVED, divide, from_files, image_set

log = logging.getLogger("regard.data")

VIDEOS = {
    **dict.fromkeys((".mp4", ".m4v", ".mov"), "mov"), **dict.fromkeys((".mkv", ".webm"), "matroska"), ".avi": "avi",
    **dict.fromkeys((".mpg", ".mpeg"), "mpeg"), ".gif": "gif",
}  # fmt: skip
"""Suffix of a file that PyAV reads, extra "video" -> the only format in which it is read, so that none names others."""
FILES = SUFFIXES | VIDEOS.keys()
"""Suffixes of frames and videos."""
WHOLE = 0.9
"""Of the frames that a video file announces; one of fewer is damaged."""
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
    """The images in a folder, in the order of the numbers in their names.

    Raises: DataError where numbers with a point have another order as decimals.
    """
    names = (entry.name for entry in visible(folder) if Path(entry.name).suffix.lower() in SUFFIXES)
    files = [file for name in sorted(names, key=_by_numbers) if (file := folder / name).is_file()]
    _check_decimals(files)
    return files


def _check_decimals(files: Sequence[Path]) -> None:
    """Raises: DataError where times in the names, as 0.15 and 0.2, are out of order; clip.9 and clip.10 are not."""
    found = [re.findall(r"\d+\.\d+", file.stem) for file in files]
    if not found or any(len(numbers) != 1 for numbers in found):
        return
    times, halves = [float(text) for (text,) in found], [text.split(".") for (text,) in found]
    counted = all(a[0] != b[0] or int(b[1]) == int(a[1]) + 1 for a, b in pairwise(halves))
    wrong = next((row for row in range(1, len(times)) if times[row] < times[row - 1]), None)
    if wrong is not None and not counted:
        raise DataError(
            f"{files[wrong - 1]} lies before {files[wrong].name} by whole numbers and behind it by decimals: write as "
            "many digits behind the point in each name"
        )


def measure(clip: Path) -> tuple[int, set[tuple[int, int]], str]:
    """The number of frames of a clip, all of which are read, their (height, width), and a digest of its files.

    Raises: ValueError, DataError.
    """
    if clip.is_dir():
        files = frame_files(clip)
        sizes = {(image.shape[0], image.shape[1]) for image in (read_image(file, None, 3) for file in files)}
        total = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
        return len(files), sizes, total.hexdigest()
    require("av", extra="video")
    frames = [(frame.height, frame.width) for frame in _decoded(clip)]
    return len(frames), set(frames), hashlib.sha256(clip.read_bytes()).hexdigest()


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """frame_2 lies before frame_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _spread(number: int, frames: int) -> list[int]:
    """The rows in the middle of equal parts. Raises: ValueError."""
    if number < frames:
        raise ValueError(f"it has {number} frame{'s' * (number != 1)}, {frames} are taken; frames={number} takes all")
    return [(2 * part + 1) * number // (2 * frames) for part in range(frames)]


def _read_video(file: Path, frames: int) -> Iterator[np.ndarray]:
    """The frames (h, w, 3), upright; the file is read twice, since few name their number of frames."""
    require("av", extra="video")
    number = sum(1 for _ in _decoded(file))
    rows = set(_spread(number, frames))
    for row, frame in enumerate(_decoded(file)):
        if row in rows:
            yield np.ascontiguousarray(_upright(frame.to_ndarray(format="rgb24"), frame.side_data.get("DISPLAYMATRIX")))


def _upright(pixels: np.ndarray, matrix: Any) -> np.ndarray:
    """(h, w, 3) as a player shows it; matrix: what the file says of it, x' = a x + c y, y' = b x + d y, or None."""
    if matrix is None:
        return pixels
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    if abs(b) > abs(a):  # sides are exchanged
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _decoded(file: Path) -> Iterator:
    """The frames of a video file as PyAV gives them. Raises: ValueError."""
    import av

    number, expected, kind = 0, 0.0, VIDEOS.get(file.suffix.lower())
    if kind is None:
        raise ValueError(f"it is no folder of frames, and no video by its name ({', '.join(VIDEOS)})")
    if not (size := file.stat().st_size):
        raise ValueError("it is empty")
    if kind == "gif":
        with file.open("rb") as stream:
            stream.seek(max(size - 64, 0))
            if not stream.read().rstrip(b"\0").endswith(b";"):
                raise ValueError("its end is missing: it is damaged, or cut")
    try:
        with file.open("rb") as stream, av.open(stream, "r", format=kind) as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            video = container.streams.video[0]
            lasts = (container.duration or 0) / av.time_base * float(video.average_rate or 0)
            expected = float(video.frames) or lasts
            for number, frame in enumerate(container.decode(video), 1):  # noqa: B007
                yield frame
    except av.FFmpegError as error:
        raise ValueError(f"it is no video that PyAV reads: {error.strerror}") from error
    if number < WHOLE * expected:
        raise ValueError(f"only {number} of its {expected:.0f} frames can be read: it is damaged, or cut")


def clips_below(path: Path) -> list[Path]:
    """The clips in a folder and its subfolders, sorted; `path` itself if it is one. Raises: DataError."""
    if not path.is_dir():
        return [path]
    entries = [path / entry.name for entry in visible(path)]
    frames = [entry for entry in entries if entry.suffix.lower() in SUFFIXES - VIDEOS.keys() and entry.is_file()]
    if frames:
        if others := [entry for entry in entries if entry not in frames and not _beside(entry)]:
            log.warning("%s lies among the frames of a clip, and is not read", printable(str(others[0])))
        return [path]
    found: list[Path] = []
    for entry in entries:
        if entry.is_dir():
            found += clips_below(entry)
        elif entry.suffix.lower() in VIDEOS:
            found.append(entry)
        elif not _beside(entry):
            log.warning("%s is neither a frame nor a video, and is not read", printable(str(entry)))
    if not entries:
        log.warning("%s is empty", printable(str(path)))
    return found


def _beside(entry: Path) -> bool:
    """Whether a file usually lies beside data."""
    return entry.is_file() and (entry.suffix.lower() in BESIDE or entry.stem.upper() in NOTES)


def read_splits(path: Path, reserved: bool = False) -> tuple[tuple[str, ...], dict[str, tuple[list[Path], np.ndarray]]]:
    """The classes, and clips and labels of "train" and, if there is one, of "test"; no frame is decoded.

    Splits and classes are folders, as of images. reserved: and of "val", if it is beside a test. Raises: DataError.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no folder; expected {LAYOUT}")
    roots = split_folders(path)
    if not reserved and "val" in roots:
        del roots["val"]
        log.warning("val of %s is its validation part, which --val 0.1 takes; the test is test", path)
    classes = tuple(folder.name for folder in subfolders(roots["train"]))
    warn_of_alike(path, classes)
    if len(classes) < 2:
        raise DataError(f"{roots['train']} has {len(classes)} class folders; expected {LAYOUT}, and two classes")
    problems, splits = Problems(), {}
    for entry in (entry for folder in dict.fromkeys((*roots.values(), path)) for entry in visible(folder)):
        if entry.is_file() and Path(entry.name).suffix.lower() in FILES:
            problems.append(f"{printable(entry.path)} lies beside class folders; put it into that of its class")
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
    files = digests.relative(path, files_below(path, frozenset(FILES)))
    total = digests.identity_of(path, files, kind)
    return f"{DIVIDED * (len(splits) == 1)}{total}{RESERVED * ('val' in splits)}"


def present_digest(path: Path, kind: str = "", reserved: bool = False) -> str:
    """`digest`, computed anew if the files have changed meanwhile. Raises: DataError."""
    digests.forget_if_changed(path, digest)
    return digest(path, kind, reserved)


def load_scored(
    path: Path, frames: int, size: tuple[int, int], corrupt: str, kind: str = ""
) -> tuple[tuple[str, ...], Images]:
    """The classes of the user's own clips, and those of their test, or all of them. Raises: DataError."""
    classes, found = read_splits(path)
    part = "test" if "test" in found else "train"
    paths, labels = found[part]
    check_labels(f"the {part} split of {path}", labels, len(classes), least=1)
    split = [Clip(clip, frames) for clip in paths], paths, labels
    key = f"clips-{digest(path, kind)}-scored-{frames}"
    return classes, from_files(split, size_before_crop(size), corrupt, key, channels=COLOURS * frames)


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
    splits: dict[str, Split] = {
        split: ([Clip(clip, frames) for clip in paths], paths, labels) for split, (paths, labels) in found.items()
    }
    if len(splits) == 1:
        splits = divide(*splits["train"])
    key, current = f"clips-{total}-{{}}-{frames}", partial(digest, path, kind, reserved)
    return image_set(path, classes, splits, size, corrupt, total, key, current, COLOURS * frames)


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
