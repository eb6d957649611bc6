"""The layouts in which images and masks are read: one table, for training and `regard data check`."""

import csv
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from regard.core import DataError, Problems
from regard.files.paths import files_below, subfolders, text_lines, visible
from regard.images.folders import SPLITS, masks_among, split_of_name
from regard.images.images import SUFFIXES, image_errors, kinds_of_images, open_image
from regard.images.notes import Notes
from regard.images.streams import held_out
from regard.models.segmentation import VOID

from ..detection import data as detection
from ..detection import masks as encodings
from ..detection.formats import format_of, has_annotations
from ..detection.scenes import Scene
from ..detection.voc import image_of, listed_images

_MASKS = ("masks", "mask", "annotations", "annotation", "labels", "gtfine", "gtcoarse")
_IMAGES = ("images", "image", "leftimg8bit")
_BESIDE = ("annot", "_masks", "masks", "_labels")
"""Ends of the names of folders of masks beside those of the splits."""
CITYSCAPES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
"""The classes of Cityscapes that are evaluated, with their labels in *_labelIds.png; the others are void."""
COLOURS = ("classes.csv", "class_dict.csv", "labelmap.txt")
"""Files with a name and a colour in each line: name,r,g,b, or of CVAT name:r,g,b:parts:actions."""
_VOID_NAMES = ("void", "ignore", "unlabelled", "unlabeled")
LAYOUT = (
    "train/ with images and trainannot/ (and test/ and testannot/) with a mask of the same name for each, or "
    "images/train/ and masks/train/ (or annotations/)"
)


@dataclass(frozen=True)
class Drawn:
    """The mask of a scene: label 0, and from 1 on the classes of its polygons, later ones over earlier ones; void where
    a crowd alone lies."""

    scene: Scene

    def __str__(self) -> str:
        return f"the polygons of {self.scene.name}"

    def labels(self) -> np.ndarray:
        """Labels (height, width) uint8."""
        objects = self.scene.objects
        mask = np.zeros(self.scene.size, np.uint8)
        for crowd in (True, False):
            for row in np.flatnonzero(objects.crowd == crowd):
                inside = encodings.decode([(objects.masks or ())[row]], self.scene.size)[0] > 0
                mask[inside] = VOID if crowd else objects.labels[row] + 1
        return mask


Mask = Path | Drawn
Colours = Mapping[tuple[int, int, int], int]
"""The label of each colour, red, green and blue."""
NO_COLOURS: Colours = MappingProxyType({})
Pairs = dict[str, list[tuple[Path, Mask]]]
"""Images and masks of splits."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Images and masks of "train" and others, or "all". names, labels: of the classes, where the layout tells them.
    others: whether further labels are void. colours: the label of each colour of masks in colour. texts: files that
    belong to the data besides images. renamed: as in `Reading` of detection."""

    pairs: Pairs
    names: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    others: bool = False
    colours: Colours = field(default_factory=dict)
    texts: Sequence[Path] = ()
    renamed: bool = False


def read_layout(path: Path, notes: Notes, void: int = VOID) -> Layout:
    """The images and masks of a folder, in the first layout that it has. Raises: DataError."""
    known = next((read for has, read in LAYOUTS if has(path)), None)
    if known is None:
        raise DataError(
            f"{path} needs folders of images and masks for training and test; found none: {LAYOUT}; or polygons of "
            "COCO, YOLO or labelme, or JPEGImages/ and SegmentationClass/"
        )
    return known(path, notes, void)


def has_masks(path: Path) -> bool:
    """Whether a folder has files of masks in one of the layouts; polygons are for detection first."""
    return any(has(path) for has, _ in LAYOUTS if has is not has_annotations)


def find_folders(path: Path) -> dict[str, tuple[Path, Path]]:
    """(images, masks) of each split, or of "all"."""
    children = _by_name(path)
    found: dict[str, tuple[Path, Path]] = {}
    images = next((children[name] for name in _IMAGES if name in children), None)
    masks = next((children[name] for name in _MASKS if name in children), None)
    if images is not None and masks is not None:
        of_images, of_masks = _by_name(images), _by_name(masks)
        for split, names in SPLITS.items():
            name = next((name for name in names if name in of_images), None)
            if name is not None and name not in of_masks:
                raise DataError(f"{of_images[name]} has images, but there is no folder {masks / of_images[name].name}")
            if name is not None:
                found[split] = (of_images[name], of_masks[name])
        return found or {"all": (images, masks)}
    for split, names in SPLITS.items():
        for name in (name for name in names if name in children):
            inner = _by_name(children[name])
            pictures = next((inner[part] for part in _IMAGES if part in inner), children[name])
            flat = pictures == children[name] and not _direct_images(pictures)  # class folders, of which one is "mask"
            beside = [] if flat else [inner[part] for part in _MASKS if part in inner]
            beside += [children[name + end] for end in _BESIDE if name + end in children]
            if not beside:
                raise DataError(f"{children[name]} has no masks: there is no folder {path / (name + 'annot')}")
            found.setdefault(split, (pictures, beside[0]))
    return found


def _by_name(folder: Path) -> dict[str, Path]:
    """The folders in a folder, by their names in lower case."""
    return {child.name.lower(): child for child in subfolders(folder)}


def _direct_images(folder: Path) -> bool:
    return any(Path(entry.name).suffix.lower() in SUFFIXES for entry in visible(folder))


def _has_folders(path: Path) -> bool:
    """Whether there are folders of masks; that some lack is said by `find_folders` when they are read."""
    try:
        folders = [masks for _, masks in find_folders(path).values()]
    except DataError:
        splits = [child for child in subfolders(path) if split_of_name(child.name)]
        names = () if splits and all(map(_has_class_folders, splits)) else (*_MASKS, *_BESIDE)
        folders = [child for child in subfolders(path) if child.name.lower() in names or _is_beside(child, path)]
    return any(files_below(masks, SUFFIXES) for masks in folders)


def _has_class_folders(split: Path) -> bool:
    """Whether a split has no images but those of folders, none of which is named after images."""
    return not _direct_images(split) and not any(child.name.lower() in _IMAGES for child in subfolders(split))


def _is_beside(child: Path, path: Path) -> bool:
    """Whether a folder is named after that of a split, with an ending of masks."""
    ends = (end for end in _BESIDE if child.name.endswith(end) and child.name != end)
    return any((path / child.name.removesuffix(end)).is_dir() for end in ends)


def _read_folders(path: Path, notes: Notes, void: int) -> Layout:
    problems = Problems()
    folders = find_folders(path)
    ends: set[str] = set()
    pairs = {split: _pairs(*both, problems, ends) for split, both in folders.items()}
    problems.raise_all()
    if any(end.endswith("_labelIds") for end in ends):
        if "val" in pairs and "test" in pairs:
            notes.add("images of the test of Cityscapes, whose masks are not published, so that val is the test", path)
            del pairs["test"]
        return Layout(pairs, tuple(CITYSCAPES), tuple(CITYSCAPES.values()), others=True)
    if any(end.endswith("_labelTrainIds") for end in ends):
        return Layout(pairs, tuple(CITYSCAPES), tuple(range(len(CITYSCAPES))))
    return _with_colours(path, pairs, void)


def _with_colours(path: Path, pairs: Pairs, void: int, texts: Sequence[Path] = ()) -> Layout:
    file = next((path / name for name in COLOURS if (path / name).is_file()), None)
    if file is None:
        return Layout(pairs, texts=texts)
    rows = colours_of(file)
    first = 1 if void == 0 else 0
    classes = [name for name, _ in rows if name.lower() not in _VOID_NAMES]
    place = {name: label for label, name in enumerate(classes, first)}
    colours = {colour: place.get(name, void) for name, colour in rows}
    return Layout(pairs, tuple(classes), tuple(place.values()), colours=colours, texts=[*texts, file])


def colours_of(file: Path) -> list[tuple[str, tuple[int, int, int]]]:
    """Name and colour of each line of a list of colours; a line without three numbers at its beginning is a header.

    Raises: DataError.
    """
    rows = []
    for number, line in enumerate(text_lines(file), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(":") if file.suffix == ".txt" else [line]
        cells = [parts[0], *parts[1].split(",")] if len(parts) > 1 else next(csv.reader([line]))
        values = [cell.strip() for cell in cells[1:4]]
        if len(values) == 3 and all(value.isdigit() and int(value) < 256 for value in values):
            red, green, blue = map(int, values)
            rows.append((cells[0].strip(), (red, green, blue)))
        elif number > 1:
            raise DataError(f"{file}, line {number}: expected name,r,g,b with numbers from 0 to 255")
    if len({name for name, _ in rows}) < len(rows) or len({colour for _, colour in rows}) < len(rows):
        raise DataError(f"{file} has a name or a colour twice")
    return rows


def _pairs(images: Path, masks: Path, problems: Problems, ends: set[str]) -> list[tuple[Path, Mask]]:
    """Images and masks with the same relative path, without suffix, or with one ending of all masks; files without
    partner are added to the problems, and an ending to `ends`. Raises: DataError.
    """
    of_images, of_masks = _by_stem(images), _by_stem(masks)
    if not of_images.keys() & of_masks.keys():
        base, end = _common_end(images, masks, of_images, of_masks)
        ends.add(end)
        of_masks = {name: of_masks[base[name] + end] for name in of_images}
    for name, file in of_images.items():
        if name not in of_masks:
            problems.append(
                f"{file} has no mask: there is no {masks / name}.png (.png or another image); add or remove it"
            )
    for name, file in of_masks.items():
        if file.suffix.lower() in (".jpg", ".jpeg"):
            problems.append(f"the mask {file} is a JPEG, whose compression changes labels; save masks as PNG")
        if name not in of_images:
            problems.append(f"the mask {file} has no image {images / name}.jpg; add or remove it")
    return [(file, of_masks[name]) for name, file in of_images.items() if name in of_masks]


def _common_end(
    images: Path, masks: Path, of_images: dict[str, Path], of_masks: dict[str, Path]
) -> tuple[dict[str, str], str]:
    """The part of each image's name that its mask has too, and what all masks have behind it. Raises: DataError."""
    tails = {name.rpartition("_")[2] for name in of_images}
    bases = [{name: name for name in of_images}]
    if len(tails) == 1:
        bases.append({name: name.rpartition("_")[0] for name in of_images})
    first = next(iter(of_images))
    for base in bases:
        possible = [name.removeprefix(base[first]) for name in of_masks if name.startswith(base[first])]
        fitting = [end for end in possible if all(name + end in of_masks for name in base.values())]
        for known in ("_labelTrainIds", "_labelIds"):
            fitting = [end for end in fitting if end.endswith(known)] or fitting
        if len(fitting) == 1:
            return base, fitting[0]
        if fitting:
            raise DataError(
                f"the images of {images} have several masks in {masks}, {', '.join(fitting)}: keep one kind"
            )
    raise DataError(
        f"no image of {images} has a mask of its name in {masks}: {of_images[first].name} and "
        f"{next(iter(of_masks.values())).name}; give masks the names of their images, or one ending behind these"
    )


def _by_stem(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for file in files_below(folder, SUFFIXES):
        name = file.relative_to(folder).with_suffix("").as_posix()
        if name in files:
            raise DataError(f"{files[name]} and {file.name} have the same name; remove or rename one of them")
        files[name] = file
    if not files:
        raise DataError(f"{folder} has no images ({kinds_of_images()})")
    return files


def _has_voc(path: Path) -> bool:
    return (path / "JPEGImages").is_dir() and (path / "SegmentationClass").is_dir()


def _read_voc(path: Path, notes: Notes, void: int) -> Layout:
    """Masks of Pascal VOC, by the lists in ImageSets/Segmentation; without train.txt all in the lists are "all"."""
    images, masks = path / "JPEGImages", path / "SegmentationClass"
    folder = path / "ImageSets" / "Segmentation"
    lists = {split: file for split in SPLITS if (file := folder / f"{split}.txt").is_file()}
    texts = [*lists.values()]
    if "train" in lists:
        names = {split: listed_images(file) for split, file in lists.items()}
    else:
        names = {"all": [file.relative_to(masks).with_suffix("").as_posix() for file in files_below(masks, SUFFIXES)]}
    problems = Problems()
    pairs: Pairs = {}
    for split, part in names.items():
        pairs[split] = []
        for name in part:
            image, mask = image_of(images / name), image_of(masks / name)
            if image is None or mask is None:
                problems.append(f"there is no {(images if image is None else masks) / name} ({kinds_of_images()})")
            else:
                pairs[split].append((image, mask))
    problems.raise_all()
    return _with_colours(path, pairs, void, texts)


def _splits_of(path: Path) -> dict[str, Path]:
    children = _by_name(path)
    found = {split: [children[name] for name in names if name in children] for split, names in SPLITS.items()}
    splits = {split: folders[0] for split, folders in found.items() if folders}
    return splits if "train" in splits else {"all": path}


def _has_among(path: Path) -> bool:
    return all(masks_among(folder) for folder in _splits_of(path).values())


def _read_among(path: Path, notes: Notes, void: int) -> Layout:
    problems = Problems()
    pairs: Pairs = {}
    for split, folder in _splits_of(path).items():
        pairs[split] = [*masks_among(folder)]
        paired = {file for pair in pairs[split] for file in pair}
        alone = [file for file in files_below(folder, SUFFIXES) if file not in paired]
        problems += [f"{file} has no mask and is none; add or remove it" for file in alone]
    problems.raise_all()
    return _with_colours(path, pairs, void)


def _read_polygons(path: Path, notes: Notes, void: int) -> Layout:
    """Masks of the polygons of detection, where 0 is the background."""
    own = detection.read_own(path, detection.Choices(with_masks=True, exif="turn", whole=True))
    pairs: Pairs = {split: [(scene.file, Drawn(scene)) for scene in part] for split, part in own.splits.items()}
    if list(pairs) == ["train"]:
        pairs = {"all": pairs["train"]}
    names = own.categories.names
    if void != 0 and "background" in names:
        raise DataError(f"{path} has a class named background, which is the name of what no object covers: rename it")
    known = names if void == 0 else ("background", *names)
    labels = tuple(range(len(names) + 1))[-len(known) :]
    return Layout(pairs, known, labels, texts=format_of(path).files(path), renamed=own.renamed)


LAYOUTS: tuple[tuple[Callable[[Path], bool], Callable[[Path, Notes, int], Layout]], ...] = (
    (_has_folders, _read_folders),
    (_has_voc, _read_voc),
    (has_annotations, _read_polygons),
    (_has_among, _read_among),
)
"""Whether a folder has the layout, and its reader; the first one that fits is taken."""


def is_whole(pairs: Pairs) -> bool:
    """Whether there is one split alone, which is divided."""
    return len(pairs) == 1 and pairs.keys() <= {"all", "train"}


def divide(path: Path, pairs: Pairs) -> Pairs:
    """The splits "train" and "test", and "val" if there is one.

    Without a folder for the test, "test" is "val"; without any other split than "train" a fifth of the images is
    `held_out`. Raises: DataError.
    """
    if is_whole(pairs):
        (both,) = pairs.values()
        if len(both) < 2:
            raise DataError(f"{path} has only one image; training and test need one each")
        held = held_out(path, [image for image, _ in both])
        return {"train": [pair for row, pair in enumerate(both) if row not in held],
                "test": [pair for row, pair in enumerate(both) if row in held]}  # fmt: skip
    if "train" not in pairs:
        found = ", ".join(pairs) or "none"
        raise DataError(f"{path} needs folders of images and masks for training and test; found {found}: {LAYOUT}")
    return {**pairs, "test": pairs["val"]} if "test" not in pairs else pairs


def read_mask(source: Mask, colours: Colours = NO_COLOURS) -> np.ndarray:
    """The labels (height, width) uint8 of a palette or grey image, or of one in these colours. Raises: DataError."""
    from PIL import ImageOps

    if isinstance(source, Drawn):
        return source.labels()
    with image_errors(source, "mask"), open_image(source) as opened:
        image = ImageOps.exif_transpose(opened)
        in_colours = image.mode == "P" or (image.mode in ("L", "1") and grey(colours))
        listed = in_colours and _palette(image) <= colours.keys()
        if image.mode == "F":
            raise DataError(f"{source} has labels in floating-point numbers; save whole ones with 8 bits per pixel")
        if image.mode.partition(";")[0] not in ("L", "P", "1", "I") or listed:
            return _labels_of_colours(source, image.mode, np.asarray(image.convert("RGBA")), colours)
        labels = np.asarray(image)
    if labels.dtype != np.uint8:
        low, high = int(labels.min(initial=0)), int(labels.max(initial=0))
        if low < 0 or high > 255:
            wrong = f"above 255, such as {high}" if high > 255 else f"below 0, such as {low}"
            raise DataError(f"{source} has labels {wrong}; save it with 8 bits per pixel")
        labels = labels.astype(np.uint8)
    return labels


def differing_palettes(masks: Sequence[Mask]) -> tuple[Mask, Mask] | None:
    """Two of the masks, of at most 200, in whose palettes a number has another colour; None if there are none."""
    first: tuple[Mask, bytes] | None = None
    for mask in masks[:: 1 + len(masks) // 200]:
        palette = b""
        if not isinstance(mask, Path):
            continue
        with suppress(DataError), image_errors(mask, "mask"), open_image(mask) as image:
            palette = bytes(image.getpalette() or ()) if image.mode == "P" else b""
        first = first or ((mask, palette) if palette else None)
        if palette and first and any(x != y for x, y in zip(palette, first[1], strict=False)):
            return first[0], mask
    return None


def grey(colours: Colours) -> bool:
    """Whether there are colours, each of them a grey: then the values of a grey image may be colours, not labels."""
    return bool(colours) and all(len(set(colour)) == 1 for colour in colours)


def _palette(image: Any) -> set[tuple[int, ...]]:
    """The colours of a palette or grey image that its pixels have."""
    return {colour for _, colour in image.convert("RGB").getcolors(256) or []}


def _labels_of_colours(file: Path, mode: str, pixels: np.ndarray, colours: Colours) -> np.ndarray:
    """The labels of a mask in colour (height, width, 4). Raises: DataError."""
    if (pixels[..., 3] != pixels[0, 0, 3]).any():
        raise DataError(f"{file} has pixels of several opacities ({mode}); save the mask without transparency")
    if colours:
        labels = np.full(pixels.shape[:2], -1, np.int16)
        for colour, label in colours.items():
            labels[(pixels[..., :3] == colour).all(-1)] = label
        unknown = np.argwhere(labels < 0)
        if len(unknown):
            y, x = unknown[0]
            shown = ",".join(map(str, pixels[y, x, :3].tolist()))
            raise DataError(
                f"{file} has the colour {shown} at row {y}, column {x}, which the list ({', '.join(COLOURS)}) has not"
            )
        return labels.astype(np.uint8)
    if (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all():
        return pixels[..., 0].copy()
    raise DataError(
        f"{file} is a picture in colour ({mode}), not a mask; save it as a palette or grey image with the class number "
        "of each pixel, or list the colours in classes.csv, a class in each line: name,r,g,b"
    )
