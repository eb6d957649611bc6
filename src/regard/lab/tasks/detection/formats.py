"""The formats in which annotations of boxes and masks are read: one table, for training and `regard data check`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.core import DataError
from regard.files.paths import subfolders, visible
from regard.images.folders import SPLITS, split_of_name

from . import coco, labelme, tables, voc, yolo
from .coco import Categories, Reading
from .scenes import Scene

Splits = Mapping[str, Sequence[Scene]]


@dataclass(frozen=True)
class Format:
    """A format. files: the annotation files of a folder, in the order of the digest; none if it has another format.
    read: the categories, and the scenes of each split ("train" alone where the data are not divided)."""

    name: str
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, Reading], tuple[Categories, Splits]]


def format_of(path: Path) -> Format:
    """The format of a folder, the first one whose files it has. Raises: DataError."""
    found = next((known for known in FORMATS if known.files(path)), None)
    if found is None:
        raise DataError(
            f"{path} has no annotations of boxes: no train.json (or annotations/instances_train*.json, or another "
            ".json of COCO's format), and no files of Pascal VOC, YOLO or labelme; docs/tasks.md has the layouts"
        )
    return found


def has_annotations(path: Path) -> bool:
    """Whether a folder has annotations in one of the formats."""
    return any(known.files(path) for known in FORMATS)


def annotation_files(path: Path) -> dict[str, Path]:
    """The annotation files of a folder of COCO's format by split, in the folder or in `annotations`.

    A file has the name of its split, or this name and a year at its end: "instances_val2017.json".
    """
    for folder in (path, path / "annotations"):
        entries = visible(folder) if folder.is_dir() else ()
        files = [folder / entry.name for entry in entries if entry.name.endswith(".json") and entry.is_file()]
        found: dict[str, Path] = {}
        for split, names in SPLITS.items():
            for name in names:
                stems = {file.stem.lower(): file for file in files}
                matches = [stem for stem in stems if stem == name or stem.rstrip("0123456789") == f"instances_{name}"]
                if len(matches) > 1:
                    raise DataError(f"{folder} has several annotation files of {split}: {', '.join(matches)}.json")
                if matches:
                    found.setdefault(split, stems[matches[0]])
        if found:
            return found
    return {}


def exported_files(path: Path) -> dict[str, Path]:
    """The annotation files of tools that write COCO's format under names of their own: one in the folder of each split
    (Roboflow), else a single one with all data (CVAT, Label Studio). Raises: DataError for several."""
    found: dict[str, Path] = {}
    for folder in subfolders(path):
        split = split_of_name(folder.name)
        if split and (file := _only(folder)) is not None:
            found.setdefault(split, file)
    if found:
        return found
    single = next((file for folder in (path, path / "annotations") if (file := _only(folder)) is not None), None)
    return {} if single is None else {"train": single}


def _only(folder: Path) -> Path | None:
    """The file of a folder that has COCO's annotations. Raises: DataError for several."""
    files = [file for file in sorted(folder.glob("[!.]*.json")) if file.is_file() and _is_coco(file)]
    objects = [file for file in files if "instance" in file.stem.lower()]
    if len(files) > 1 and len(objects) != 1:
        raise DataError(
            f"{folder} has several annotation files: {', '.join(file.name for file in files[:5])}; call them "
            "train.json and val.json, or keep one"
        )
    return next(iter(objects if len(files) > 1 else files), None)


def _is_coco(file: Path) -> bool:
    """Whether a file names the parts of COCO's format."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return all(part in content for part in (b'"images"', b'"annotations"', b'"categories"'))


def _read_coco(files: Callable[[Path], dict[str, Path]]) -> Callable[[Path, Reading], tuple[Categories, Splits]]:
    def read(path: Path, reading: Reading) -> tuple[Categories, Splits]:
        splits: dict[str, Sequence[Scene]] = {}
        categories: Categories | None = None
        given = files(path)
        for split, file in given.items():
            end = file.stem.removeprefix("instances_")
            folders = [path / "images", path / "images" / end, path / end, path]
            named = [folder for parent in (path, path / "images") if parent.is_dir() for folder in subfolders(parent)
                     if split_of_name(folder.name) == split]  # fmt: skip
            more = [file.parent, file.parent / "images", *named]
            folders, more = ([folder for folder in part if folder.is_dir()] for part in (folders, more))
            find = coco.Finder(file, folders, reading, more, path)
            found, splits[split] = coco.scenes_of(coco.content_of(file), find)
            if categories is not None and found != categories:
                raise DataError(
                    f"{file} has other categories than {next(iter(given.values()))}: {_difference(found, categories)}"
                )
            categories = found
        assert categories is not None
        return categories, splits

    return read


def _difference(one: Categories, other: Categories) -> str:
    pairs = [dict(zip(part.ids, part.names, strict=True)) for part in (one, other)]
    number = next(n for n in sorted({*pairs[0], *pairs[1]}) if pairs[0].get(n) != pairs[1].get(n))
    return f"category {number} is {pairs[0].get(number)!r} here and {pairs[1].get(number)!r} there"


FORMATS = (
    Format("Pascal VOC", lambda path: voc.texts(path) if voc.is_voc(path) else [], voc.read_lists),
    Format("COCO", lambda path: [*annotation_files(path).values()], _read_coco(annotation_files)),
    Format("COCO, as exported", lambda path: [*exported_files(path).values()], _read_coco(exported_files)),
    Format("Pascal VOC without lists", voc.xml_files, voc.read_files),
    Format("YOLO", yolo.label_files, yolo.read),
    Format("tables of objects", tables.table_files, tables.read),
    Format("labelme", labelme.shape_files, labelme.read),
)
"""The first one whose files a folder has is taken."""
