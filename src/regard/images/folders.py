"""Folders of class folders: their splits, classes and images, and what lies beside them."""

import logging
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from regard.core import DataError, Problems
from regard.files.paths import files_below, subfolders, visible

from .images import SUFFIXES, Split, kinds_of_images

log = logging.getLogger("regard.data")

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
"""Names of splits in upper or lower case; the first one that is present is used."""
TRAINS, TESTS = SPLITS["train"], (*SPLITS["test"], *SPLITS["val"])
"""Of data with two splits, whose test may be called a validation."""
BESIDE = frozenset({
    ".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".html", ".pdf", ".db", ".ini",
    ".log", ".md5", ".sha1", ".sha256", ".lnk", ".url",
})  # fmt: skip
"""Suffixes of files that are no data and lie in class folders, without a warning."""
NOTES = ("README", "LICENSE", "LICENCE", "COPYING", "CHECKSUMS", "MD5SUMS", "SHA256SUMS")
"""The same, of names without a suffix."""
OTHER_TASKS = ("mask", "masks", "annotation", "annotations", "label", "labels", "segmentation", "segmentations", "gt")
"""Names of folders beside the splits whose images are no data of a classification."""


_ENDS = ("_mask", "_masks", "_label", "_labels", "_gt", "_seg")
"""Ends of the names of masks that lie among the images."""


def masks_among(folder: Path) -> list[tuple[Path, Path]]:
    """Images with the masks that lie beside them: 1.jpg and 1_mask.png."""
    files = {file.relative_to(folder).with_suffix("").as_posix(): file for file in files_below(folder, SUFFIXES)}
    return [(image, files[name + end]) for name, image in files.items() for end in _ENDS if name + end in files]


def split_of_name(name: str) -> str:
    """The split that a folder or file is named after, also with a year behind it ("train2017"); "" for none."""
    word = name.lower().rstrip("0123456789")
    return next((split for split, names in SPLITS.items() if word in names), "")


def check_column(place: str, given: object, split: str) -> None:
    """Raises: DataError where the column `split` of a table says another split than the name of its file."""
    if given and split_of_name(str(given)) != split:
        raise DataError(
            f"{place}: the column split of such tables is not read, and says {str(given)!r}: write each split into a "
            "file of its own, named train, val or test"
        )


def warn_of_other_files(path: Path) -> None:
    """Warn of files in class folders that are no images by their names, but for those that usually lie beside them, and
    of images in `OTHER_TASKS` beside the splits."""
    roots = split_folders(path).values()
    others = [] if path in roots else [folder for folder in subfolders(path) if folder.name.lower() in OTHER_TASKS]
    for folder in others:
        if images := files_below(folder, SUFFIXES):
            text = "%s lies beside the splits as data of another task: its images are not used: %d, the first: %s"
            log.warning(text, folder, len(images), images[0])
    files = [file for root in roots for folder in subfolders(root) for file in other_files(folder)]
    if files:
        log.warning("%d files in class folders are not read as images, such as %s", len(files), files[0])


def other_files(folder: Path) -> Iterator[Path]:
    """Files in a folder and its subfolders that are no images by their names, but for those that usually lie there."""
    for entry in visible(folder):
        path = folder / entry.name
        if entry.is_dir():
            yield from other_files(path)
        elif path.suffix.lower() not in SUFFIXES | BESIDE and path.stem.upper() not in NOTES:
            yield path


def image_files(path: Path) -> list[Path]:
    """The images in a folder and its subfolders, sorted. Raises: DataError if there is none."""
    files = files_below(path, SUFFIXES)
    if not files:
        raise DataError(f"{path} has no images ({kinds_of_images()}); expected one folder for each class")
    return files


def from_folders(path: Path, reserved: bool = False) -> tuple[tuple[str, ...], dict[str, Split]]:
    """The classes and the splits of a folder, "train" alone where there is no test split.

    reserved: also "val" where it is beside a test; it is not read otherwise. Raises: DataError.
    """
    if not path.is_dir():
        packed = path.suffix.lower() in (".zip", ".gz", ".tgz", ".7z", ".rar")
        remedy = "; unpack it, and give the folder" if packed else ""
        raise DataError(f"{path} is neither a folder of class folders nor a table{remedy}")
    images = image_files(path)
    masked = masks_among(path) if any(image.stem.endswith(_ENDS) for image in images) else []
    if len(masked) * 3 > len(images):
        image, mask = masked[0]
        raise DataError(
            f"{mask} is a mask by its name, of {image.name} beside it: add --task segmentation, or remove the masks"
        )
    roots = split_folders(path)
    if not reserved:
        roots.pop("val", None)
    for folder in (folder for root in roots.values() for folder in subfolders(root)):
        if folder.name.lower() in (*TRAINS, *TESTS) and subfolders(folder):
            raise DataError(
                f"{folder} has the name of a split and subfolders, but is where class folders are expected; "
                f"expected {path}/train/CLASS and, if there is a test, {path}/test/CLASS (or val)"
            )
        inside = {inner.name.lower() for inner in subfolders(folder)}
        if not inside.isdisjoint(TRAINS) and not inside.isdisjoint(TESTS):
            raise DataError(
                f"{folder} has the splits of its class inside; expected {path}/train/{folder.name} and "
                f"{path}/test/{folder.name}, so that no image of a test is trained on"
            )
    classes = tuple(folder.name for folder in subfolders(roots["train"]))
    if len(classes) < 2:
        folders = f"only one class folder ({classes[0]})" if classes else "no class folders"
        raise DataError(f"{roots['train']} has {folders}; classification needs at least two, each with its images")
    problems = Problems()
    splits = {split: _from_class_folders(root, classes, problems) for split, root in roots.items()}
    problems.raise_all()
    return classes, splits


def _from_class_folders(root: Path, classes: tuple[str, ...], problems: Problems) -> Split:
    """The images of one split; what is wrong in it is added to the problems."""
    for entry in visible(root):
        if Path(entry.name).suffix.lower() in SUFFIXES:
            problems.append(
                f"{root / entry.name} lies beside the class folders; put it into the folder of its class, or elsewhere"
            )
    unknown = [folder.name for folder in subfolders(root) if folder.name not in classes]
    if unknown:
        problems.append(f"{root} has classes that the training split does not have: {', '.join(unknown[:5])}")
    files: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        with problems.collect():
            files += [(file, label) for file in image_files(root / name)] if (root / name).is_dir() else []
    return [f for f, _ in files], [str(f) for f, _ in files], np.array([y for _, y in files], np.int64)


def split_folders(path: Path) -> dict[str, Path]:
    """The folders of the training and test splits; `path` itself is the training split if it has no such folder.

    A folder "train" that has images but no class folders, beside folders of other names, is a class.
    """
    folders = {folder: folder.name.lower() for folder in subfolders(path)}
    splits = by_split(folders)
    if "train" in splits and (subfolders(splits["train"]) or set(folders.values()) <= {*TRAINS, *TESTS}):
        _refuse_others(path, [folder for folder, name in folders.items() if name not in (*TRAINS, *TESTS)], splits)
        return splits
    return {"train": path}


def _refuse_others(path: Path, others: list[Path], splits: dict[str, Path]) -> None:
    """Raises: DataError for images beside the folders of splits, and for other folders with images."""
    train = splits["train"].name
    for entry in visible(path):
        if Path(entry.name).suffix.lower() in SUFFIXES:
            raise DataError(
                f"{path / entry.name} lies beside {train}; put it into the folder of its class, or elsewhere"
            )
    for folder in others:
        if folder.name.lower() in OTHER_TASKS or not files_below(folder, SUFFIXES):
            continue
        test = "" if "test" in splits else f"call it test (or {', '.join(TESTS[1:])}), or "
        raise DataError(
            f"{folder} lies beside {train} and has images, but not the name of a split: {test}put it elsewhere"
        )


def by_split(paths: dict[Path, str]) -> dict[str, Path]:
    """The paths of training and test, from paths with their lower-case names, and of "val" beside a test.

    Raises: DataError if two names clash.
    """
    splits: dict[str, Path] = {}
    for split, group in (("train", TRAINS), *(("test", (name,)) for name in TESTS)):
        matches = [path for path, name in paths.items() if name in group]
        if len(matches) > 1:
            raise DataError(f"{matches[0]} and {matches[1].name} name the same split; remove or rename one of them")
        for path in matches:
            if split not in splits:
                splits[split] = path
            elif "val" not in splits and group[0] in SPLITS["val"] and paths[splits["test"]] in SPLITS["test"]:
                splits["val"] = path
            else:
                log.warning("%s is not used: the test is %s", path, splits["test"].name)
    return splits


def warn_of_alike(path: Path, classes: Sequence[str]) -> None:
    """Warn of names of classes that a reader cannot tell apart, or that differ in case alone."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        seen = "".join(sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) != "Cf")
        alike.setdefault(seen.strip().casefold(), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            text = "%s has the classes %s, which differ in case or in invisible signs alone: join them if they are one"
            log.warning(text, path, " and ".join(map(ascii, names)))
