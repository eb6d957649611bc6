"""Annotation files of COCO's format: read, checked, and as `Scene`s."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any
from unicodedata import normalize

from regard.core import DataError
from regard.files.atomic import without_repetition
from regard.files.paths import check_utf8, printable, user_path
from regard.images.images import SUFFIXES, AsStored, kinds_of_images, size_of
from regard.images.lists import images_by_name
from regard.images.notes import ELSEWHERE, Notes

from . import masks
from .scenes import Objects, Rle, Scene, objects_of

log = logging.getLogger("regard.data")

LARGEST = 1e30
"""Numbers of annotations are smaller than this."""
LARGEST_SIDE = 2**20
"""Pixels of the longest side of an image that is read."""
TOLERANCE = 1.0
"""Pixels by which a box may reach beyond its image without a warning: annotations round. All boxes are clipped."""


@dataclass(frozen=True)
class Categories:
    """ids: the numbers in the annotation file, sorted; they need not be contiguous. names: in the order of ids."""

    ids: tuple[int, ...]
    names: tuple[str, ...]


def read_json(file: Path, strict: bool = True) -> Any:
    """The content of a JSON file. strict: refuse a name twice in an object. Raises: DataError with line and column."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise DataError(f"{file} is empty; a file of annotations has JSON")
        return json.loads(text, object_pairs_hook=without_repetition if strict else None)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is no valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, a number of 5,000 digits, 5,000 brackets
        raise DataError(f"{file} cannot be read: {error}") from error


def content_of(file: Path) -> dict[str, Any]:
    """The content of an annotation file. Raises: DataError if it is not that of COCO's format."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise DataError(f"{file} is no object with images, annotations and categories, but a {type(content).__name__}")
    for part in ("images", "annotations", "categories"):
        if not isinstance(content.get(part), list):
            raise DataError(f"{file} has no list {part!r}; expected COCO annotations: images, annotations, categories")
    return content


def scenes_of(
    content: Mapping[str, list[Any]], find: "Finder", places: Sequence[str] = ()
) -> tuple[Categories, list[Scene]]:
    """The categories and scenes of the content of an annotation file, or of what another format's reader made of files.

    places: of the annotations, for messages; without them they are named by their ids.
    Raises: DataError that names the file and the annotation.
    """
    file, reading = find.file, find.reading
    categories, labels = _categories(file, content["categories"])
    images = _by_id(file, "image", content["images"], ("id", "file_name"))
    if not images:
        raise DataError(f"{file} has no images")
    annotations = _by_id(file, "annotation", content["annotations"], ("image_id", "category_id"))
    sources = {number: source for number, image in images.items() if (source := find(number, image))}
    seen: dict[Path, Any] = {}
    for number, source in sources.items():
        if (first := seen.setdefault(source, number)) != number:
            raise DataError(f"{file}: images {first} and {number} have one file, {source}: give its objects one id")
    reading.named |= set(sources.values())
    sizes = {n: _size(file, n, images[n], source, reading) for n, source in sources.items()}
    rows: dict[Any, list[dict[str, Any]]] = {number: [] for number in images}
    boxes: list[tuple[Any, tuple[int, int]]] = []
    outlines: dict[tuple[Any, Any, str], list[Any]] = {}
    for index, (number, annotation) in enumerate(annotations.items()):
        where = places[index] if places else f"{file}: annotation {number}"
        image, category = _plain(annotation["image_id"]), _plain(annotation["category_id"])
        if image is None or category is None:
            wrong = f"image_id {annotation['image_id']!r} and category_id {annotation['category_id']!r}"
            reading.wrong(f"{where} has {wrong}; expected numbers or texts")
        elif image not in images:
            reading.wrong(f"{where} is of image {image}, which is not among the images")
        elif category not in labels:
            known = ", ".join(map(str, list(labels)[:20]))
            reading.wrong(f"{where} has category {category}; the categories are {known}")
        elif image in sources:
            place = f"{where} in {printable(images[image]['file_name'])}"
            boxes.append((annotation.get("bbox"), sizes[image]))
            alike = outlines.setdefault((image, category, str(annotation.get("bbox"))), [])
            if (outline := annotation.get("segmentation")) in alike:
                reading.notes.add(DOUBLED, place)
            alike.append(outline)
            ids = annotation["image_id"], annotation["category_id"]
            reading.mended |= (
                not annotation.get("bbox") or annotation.get("iscrowd", 0) is None or ids != (image, category)
            )
            try:
                row = _check_annotation(place, annotation, sizes[image], reading)
                rows[image].append({**row, "label": labels[category]})
            except ValueError as error:
                reading.wrong(f"{place}: {error}")
    _check_corners(file, boxes)
    reading.summarise(file)
    numbers = {n: n if isinstance(n, int) else index for index, n in enumerate(images, 1)}
    scenes = [
        Scene(str(source), source, sizes[n], _objects(rows[n], reading), numbers[n]) for n, source in sources.items()
    ]
    if not scenes:
        raise DataError(f"{file}: none of its images is there")
    if reading.corrupt == "skip":
        _check_kept(file, categories, labels, annotations.values(), scenes)
    return categories, scenes


Content = tuple[dict[str, Any], list[str]]
"""Images and annotations as in a COCO file, and the place of each annotation, for messages."""


def splits_of(
    path: Path, found: Mapping[str, Content], categories: list[dict[str, Any]], reading: "Reading"
) -> tuple[Categories, dict[str, list[Scene]]]:
    """`scenes_of` each split that another format's reader found, "train" first. Raises: DataError as `scenes_of`."""
    scenes: dict[str, list[Scene]] = {}
    for split in (split for split in ("train", "val", "test") if split in found):
        content, places = found[split]
        find = Finder(path, [path], reading)
        known, scenes[split] = scenes_of({**content, "categories": categories}, find, places)
    return known, scenes


def splits_by_name(
    path: Path, found: Mapping[str, Content], reading: "Reading", order: Callable[[str], Any] = str
) -> tuple[Categories, dict[str, list[Scene]]]:
    """`splits_of` annotations whose category_id is a name: names get numbers from 1, sorted by `order`."""
    entries = [entry for content, _ in found.values() for entry in content["annotations"]]
    numbers = {name: n for n, name in enumerate(sorted({entry["category_id"] for entry in entries}, key=order), 1)}
    for entry in entries:
        entry["category_id"] = numbers[entry["category_id"]]
    return splits_of(path, found, [{"id": n, "name": name} for name, n in numbers.items()], reading)


def _plain(value: Any) -> int | str | None:
    """An id as it is compared: 7, 7.0 and "7" are one; None for what is no id."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19 and str(int(value)) == value:
        value = int(value)
    return value if isinstance(value, int | str) and not isinstance(value, bool) and value != "" else None


def _size(file: Path, number: Any, image: Mapping[str, Any], source: Path, reading: "Reading") -> tuple[int, int]:
    """(height, width) as annotated, or of the image's header where nothing is annotated. Raises: DataError."""
    sides: tuple[Any, Any] = (image.get("height"), image.get("width"))
    if sides == (None, None):
        return reading.measure(source)
    whole = [int(side) if isinstance(side, float) and side.is_integer() else side for side in sides]
    if not all(isinstance(side, int) and not isinstance(side, bool) and 0 < side <= LARGEST_SIDE for side in whole):
        raise DataError(f"{file}: image {number} has no valid file_name, width and height")
    return whole[0], whole[1]


def _check_corners(file: Path, boxes: list[tuple[Any, tuple[int, int]]]) -> None:
    """Raises: DataError if all boxes are in fractions, or most leave their image, and all fit into it as left, top,
    right, bottom."""
    given = [(box, size) for box, size in boxes if _four_numbers(box)]
    if in_fractions([(box[0] + box[2], box[1] + box[3]) for box, _ in given]):
        raise DataError(f"{file}: all boxes, such as {list(given[0][0])}, are {FRACTIONS}")
    beyond = [box for box, (height, width) in given
              if box[0] + box[2] > width + TOLERANCE or box[1] + box[3] > height + TOLERANCE]  # fmt: skip
    if len(beyond) * 2 <= len(given):
        return
    if all(
        box[0] < box[2] <= width + TOLERANCE and box[1] < box[3] <= height + TOLERANCE for box, (height, width) in given
    ):
        raise DataError(
            f"{file}: {len(beyond)} of {len(given)} boxes, such as {list(beyond[0])}, leave their image, and all fit "
            "as [left, top, right, bottom]; a bbox is [left, top, width, height]: correct them"
        )


FRACTIONS = "in fractions of the image; boxes are in pixels"


def in_fractions(corners: Sequence[Sequence[float]]) -> bool:
    """Whether corners of boxes are fractions of an image, not pixels."""
    values = [value for corner in corners for value in corner]
    return max(values, default=2) <= 1 + 1e-6 and any(value % 1 for value in values)


def _check_kept(
    file: Path,
    categories: Categories,
    labels: Mapping[Any, int],
    annotations: Iterable[Mapping[str, Any]],
    scenes: list[Scene],
) -> None:
    """Raises: DataError for a category whose objects were all skipped."""
    kept = {int(label) for scene in scenes for label in scene.objects.labels}
    named = {labels.get(_plain(entry["category_id"])) for entry in annotations}
    lost = [name for label, name in enumerate(categories.names) if label in named - kept]
    if lost:
        raise DataError(f"{file}: all annotations of category {lost[0]} were skipped; correct or remove them")


DOUBLED = "objects that an image has a second time, which count as further ones"
CLIPPED = "boxes that reach beyond their image and are clipped"
APART = "boxes that are not those of their polygons or masks, which are read as they are"


class Reading:
    """How annotations are read: the choices, and what is found on the way.

    corrupt: "stop" at the first wrong annotation or missing image, or "skip" it with a warning. "leave out": wrong
    annotations, with one message about all of them, for COCO itself, of whose boxes two have no height.
    exif: as for `regard.images.turned.annotated_as_stored`. notes: what is unusual and read. mended: whether something
    was read that older versions skipped, so that a run with corrupt="skip" has other data than theirs. renamed: whether
    classes have other names than in older versions. named: images that annotations or lists name. measured: those
    whose size is not annotated, but that of their header. outlines: whether polygons are kept as annotated.
    """

    def __init__(self, corrupt: str = "stop", with_masks: bool = False, exif: str = "", outlines: bool = False) -> None:
        self.corrupt, self.with_masks, self.exif, self.outlines = corrupt, with_masks, exif, outlines
        self.left_out: list[str] = []
        self.notes = Notes()
        self.mended = self.renamed = False
        self.named: set[Path] = set()
        self.measured: set[Path] = set()

    def note(self, kind: str, place: object) -> None:
        """Count something that is read now, and was refused or skipped by older versions."""
        self.notes.add(kind, place)
        self.mended = True

    def measure(self, source: Path) -> tuple[int, int]:
        """(height, width) of an image whose size is not annotated, from its header. Raises: DataError."""
        self.measured.add(source)
        return size_of(AsStored(source) if self.exif == "keep" else source)

    def annotated_size(self, scene: Scene) -> tuple[int, int] | None:
        """(height, width) as annotated; None if nothing is."""
        return None if scene.source in self.measured else scene.size

    def wrong(self, message: str, annotation: bool = True) -> None:
        """annotation: whether an object is wrong, not an image. Raises: DataError."""
        if self.corrupt == "leave out" and annotation:
            self.left_out.append(message)
            return
        if self.corrupt != "skip":
            then = "its object then counts as background" if annotation else "the image is then not used"
            raise DataError(f'{message}; correct or remove it, or pass corrupt="skip" to leave it out ({then})')
        log.warning("skipped: %s", printable(message))

    def summarise(self, file: Path) -> None:
        """One message about the annotations of a file that were left out, with the first of them."""
        if self.left_out:
            log.warning(
                "%s: %d wrong annotations are left out, the first: %s", file, len(self.left_out), self.left_out[0]
            )
        self.left_out = []


def _objects(rows: list[dict[str, Any]], reading: Reading) -> Objects:
    columns = {name: [row[name] for row in rows] for name in ("box", "label", "crowd", "area", "mask", "outline")}
    found: list[Rle] | None = columns["mask"] if reading.with_masks else None
    objects = objects_of(columns["box"], columns["label"], columns["crowd"], columns["area"], found)
    return replace(objects, outlines=tuple(columns["outline"])) if reading.outlines else objects


def _by_id(file: Path, kind: str, entries: list[Any], fields: tuple[str, ...]) -> dict[Any, dict[str, Any]]:
    """The entries by their id, which may be missing where it is not among the fields. Raises: DataError for an entry
    without its fields, or an id that occurs twice."""
    by_id: dict[Any, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{file}: {kind} number {index + 1} is no object")
        missing = [name for name in fields if name not in entry]
        if missing:
            raise DataError(f"{file}: {kind} number {index + 1} (id {entry.get('id')}) has no {', '.join(missing)}")
        number = _plain(entry.get("id"))
        if number is None and "id" in fields:
            raise DataError(f"{file}: {kind} number {index + 1} has the id {entry['id']!r}; expected a number or text")
        number = f"number {index + 1}" if number is None else number
        if number in by_id:
            raise DataError(f"{file}: the {kind} id {number} occurs twice; ids must be unique")
        by_id[number] = entry
    return by_id


def _categories(file: Path, entries: list[Any]) -> tuple[Categories, dict[Any, int]]:
    """The categories, and the label of each id. Ids that are texts are replaced by numbers from 1."""
    by_id = _by_id(file, "category", entries, ("id", "name"))
    if not by_id:
        raise DataError(f"{file} has no categories")
    ids = sorted(by_id, key=lambda number: (isinstance(number, str), number))
    try:
        names = tuple(class_name(by_id[number]["name"]) for number in ids)
    except ValueError as error:
        raise DataError(f"{file}: a category has {error}") from None
    for name in names:
        check_utf8(Path(name), DataError)
    double = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if double is not None:
        raise DataError(f"{file} has two categories {double!r}; their names must differ")
    numbers = tuple(ids) if all(isinstance(number, int) for number in ids) else tuple(range(1, len(ids) + 1))
    return Categories(numbers, names), {number: label for label, number in enumerate(ids)}


def class_name(value: Any) -> str:
    """The name of a class, a text or a number. Raises: ValueError for another value, and for an empty text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"the name {printable(str(value))[:60]!r}; expected a text or a number")
    return str(value)


@dataclass
class Finder:
    """The files of the images of an annotation file. folders: where they may be, and more: where else. root: a folder
    in which an image that is not there is looked for by its name alone."""

    file: Path
    folders: list[Path]
    reading: Reading
    more: Sequence[Path] = ()
    root: Path | None = None

    @cached_property
    def below(self) -> dict[str, list[Path]]:
        """All images below the root, by their names."""
        return {} if self.root is None else images_by_name(self.root)

    def __call__(self, number: Any, image: Mapping[str, Any]) -> Path | None:
        """The path of an image, None if it is skipped. Raises: DataError for one that the digest does not cover."""
        given = image["file_name"]
        if not isinstance(given, str):
            raise DataError(f"{self.file}: image {number} has no valid file_name, width and height")
        name = Path(given.replace("\\", "/"))
        told = f"{self.file}: image {number} has the file_name {printable(given)}"
        if name.is_absolute() or PureWindowsPath(given).drive:
            raise DataError(f"{told}, an absolute path; write it from the folder of the images on")
        hidden = any(part.startswith(".") for part in name.parts if part != "..")
        if hidden or name.suffix.lower() not in SUFFIXES:
            raise DataError(f"{told}; expected an image that is not hidden, {kinds_of_images()}")
        if ".." not in name.parts:
            for folder in (*self.folders, *self.more):
                path = user_path(folder / name, DataError)
                if path.is_file():
                    self.reading.mended |= folder not in self.folders or "\\" in given
                    return path
        elsewhere = self.below.get(normalize("NFC", name.name), [])
        if len(elsewhere) == 1:
            self.reading.note(ELSEWHERE, elsewhere[0])
            return elsewhere[0]
        looked = " or ".join(str(folder) for folder in self.folders)
        near = next((key for key in self.below if key.lower() == name.name.lower()), "")
        more = f", where {len(elsewhere)} images have its name" if elsewhere else f"; there is {near}" if near else ""
        self.reading.wrong(
            f"{self.file}: image {number}, {printable(given)}, is not in {looked}{more}", annotation=False
        )
        return None


def _check_annotation(
    place: str, annotation: Mapping[str, Any], size: tuple[int, int], reading: Reading
) -> dict[str, Any]:
    """Box, crowd, area, mask and outline of an annotation. place: for notes. Raises: ValueError if it is wrong."""
    segmentation = annotation.get("segmentation")
    bbox: Any = annotation.get("bbox")
    outline = box_of(segmentation)
    if bbox in (None, []) and segmentation:
        bbox = outline or masks.box_of(segmentation, size)
    if problem := "it has no bbox" if bbox is None else box_problem(bbox, size):
        raise ValueError(problem)
    apart = outline and _apart(bbox, outline)
    if outline and (apart or not annotation.get("bbox")) and any(0 < len(part) < 6 for part in segmentation or ()):
        reading.mended = True  # older versions read the box
        raise ValueError("a polygon has fewer than three points")
    if apart:
        reading.notes.add(APART, place)
    if beyond(bbox, size):
        reading.note(CLIPPED, place)
    mask = None
    if reading.with_masks:
        if segmentation in (None, [], {}):
            raise ValueError("it has no segmentation; --task detection needs boxes alone")
        mask = masks.from_annotation(segmentation, size)
        if not masks.area(mask):
            raise ValueError("its mask is empty")
        if not outline and (around := masks.box_of(segmentation, size)) and _apart(bbox, around):
            reading.notes.add(APART, place)
    left, top, width, height = map(float, bbox)
    right, bottom = min(left + width, float(size[1])), min(top + height, float(size[0]))
    crowd, area = annotation.get("iscrowd") or 0, annotation.get("area")
    if crowd not in (0, 1):
        raise ValueError(f"it has iscrowd {crowd!r}; expected 0 or 1")
    if not _is_number(area) or not isinstance(area, int | float) or area < 0:
        inside = (right - max(left, 0.0)) * (bottom - max(top, 0.0)) if beyond(bbox, size) else width * height
        area = masks.area(mask) if mask is not None else inside
    box = (max(left, 0.0), max(top, 0.0), right, bottom)
    return {"box": box, "crowd": bool(crowd), "area": float(area), "mask": mask, "outline": segmentation or None}


def _apart(bbox: Sequence[float], outline: Sequence[float]) -> bool:
    """Whether a box differs from that of its object by more than a tenth of a side, and by more than two pixels."""
    sides = (*outline[2:], *outline[2:])
    return any(abs(x - y) > max(2.0, 0.1 * side) for x, y, side in zip(bbox, outline, sides, strict=True))


def box_of(segmentation: Any) -> list[float]:
    """[left, top, width, height] around polygons; [] for what is none."""
    if not isinstance(segmentation, list) or not all(isinstance(part, list) for part in segmentation):
        return []
    xs, ys = ([value for part in segmentation for value in part[first::2]] for first in (0, 1))
    if not xs or len(xs) != len(ys) or not all(map(_is_number, [*xs, *ys])):
        return []
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _is_number(value: Any) -> bool:
    """Whether a value is a number that float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _four_numbers(bbox: Any) -> bool:
    return isinstance(bbox, list | tuple) and len(bbox) == 4 and all(map(_is_number, bbox))


def box_problem(bbox: Any, size: tuple[int, int]) -> str:
    """What is wrong with a box [left, top, width, height] in an image of size (height, width); "" if nothing."""
    if not _four_numbers(bbox):
        return f"its bbox is {bbox}, expected four numbers [left, top, width, height]"
    left, top, width, height = bbox
    if width <= 0 or height <= 0:
        return f"its box {list(bbox)} has no area"
    if left >= size[1] or top >= size[0] or left + width <= 0 or top + height <= 0:
        return f"its box {list(bbox)} (left, top, width, height) is outside the image of {size[1]}x{size[0]} pixels"
    return ""


def beyond(bbox: Sequence[float], size: tuple[int, int]) -> bool:
    """Whether a box reaches beyond its image by more than `TOLERANCE`."""
    left, top, width, height = bbox
    outside = left < -TOLERANCE or top < -TOLERANCE
    return outside or left + width > size[1] + TOLERANCE or top + height > size[0] + TOLERANCE
