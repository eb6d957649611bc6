"""Checking the user's own data before training: counts, sizes, modes, unreadable files, duplicates between splits."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.core import ConfigError, DataError, nearest
from regard.files.paths import files_below, user_path
from regard.images import clips, lists, own, tables
from regard.images.images import SUFFIXES, check_labels
from regard.lab.data.moving import FRAMES
from regard.lab.data.streamed import load as streamed
from regard.lab.data.streamed.names import is_stream

from . import TASKS
from .data_report import DataReport, Pictures, collect_into, different_sizes, join_places, ranges
from .detection import data as detection
from .detection import formats
from .detection.task import Boxes
from .segmentation import data as segmentation
from .segmentation import layouts
from .sequences import text
from .translation import texts

KINDS = ("classification", "segmentation", "detection", "instances", "sequences", "translation", "video")
"""The tasks whose data are checked; those of instances are the data of detection, with masks."""
TASK_OF: Mapping[str, type[Boxes]] = {task.name: task for task in TASKS if issubclass(task, Boxes)}
MANY = 200
"""Classes above which those without an image have no row."""
UNEQUAL = 4
"""Of the lengths of clips in one set, without a warning."""
_WITH_EXIF = ("segmentation", "detection", "instances")
ONLY_FOR = {
    "source": ("translation",), "target": ("translation",), "void": ("segmentation",), "classes": ("segmentation",),
    "exif": _WITH_EXIF,
}  # fmt: skip
"""The tasks that an option is for."""


def check_data(
    data: str,
    kind: str = "",
    source: str | None = None,
    target: str | None = None,
    void: int | None = None,
    classes: int | None = None,
    exif: str | None = None,
) -> DataReport:
    """Check a folder, a table or a stream. kind: one of `KINDS`, "" = recognised from the files.

    source, target: languages of a translation, by default "en" and "de". void, classes: of a segmentation, by default
    255 and those of the files, see its task. exif: "keep" or "turn", as for the tasks with boxes or masks. Every file
    is read.
    Raises: DataError if the data have no known layout, a DataProblems if files in it do not fit together; ConfigError
    for an unknown kind, and for an option of another task.
    """
    given = {"source": source, "target": target, "void": void, "classes": classes, "exif": exif}
    if exif not in (None, "", "keep", "turn"):
        raise ConfigError(f"--exif is keep or turn, not {exif!r}")
    source, target = source or "en", target or "de"
    if kind not in ("", *KINDS):
        raise ConfigError(f"there is no task {kind!r} with data of its own; {nearest(kind, KINDS)}")
    if is_stream(data):
        _refuse_unused(data, "classification", given)
        return _stream(data, kind)
    path = path_to_check(data, kind)
    kind = kind or kind_of(path, source, target)
    _refuse_unused(data, kind, given)
    report = DataReport(kind)
    with collect_into(report):
        if kind == "translation":
            _translation(path, source, target, report)
        elif kind in ("detection", "instances"):
            _detection(path, TASK_OF[kind], exif or "", report)
        elif kind == "segmentation":
            _segmentation(path, 255 if void is None else void, classes or 0, exif or "", report)
        elif kind == "sequences":
            _sequences(path, report)
        elif kind == "video":
            _video(path, report)
        else:
            _classification(path, report)
    return report


def path_to_check(data: str, kind: str) -> Path:
    """The folder or table of the user's own data. Raises: DataError if there is none, or for the name of a set."""
    path = user_path(data, DataError)
    if not path.exists():
        raise DataError(f"{data} does not exist; expected a folder or a table")
    if any(data in task.sets for task in TASKS if kind in ("", task.name)):
        raise DataError(f"{data} is the name of a built-in set, which training takes; for the folder write ./{data}")
    if path.is_file() and path.suffix.lower() == ".json":
        raise DataError(f"{data} is a file of annotations; give the folder in which it and its images are")
    return path.resolve()


def _refuse_unused(data: str, kind: str, given: Mapping[str, object]) -> None:
    """Raises: ConfigError for an option that is given and is for another task."""
    for name, value in given.items():
        if value is not None and kind not in ONLY_FOR[name]:
            raise ConfigError(
                f"--{name} is for --task {' or '.join(ONLY_FOR[name])}, but {data} is checked as data of {kind}: "
                f"leave --{name} out, or give --task"
            )


def kind_of(path: Path, source: str = "en", target: str = "de") -> str:
    """The task that a folder or table is for, by its files; class folders and tables of images if nothing else fits."""
    if path.is_dir():
        if any(known.files(path) for known in formats.FORMATS[:2]):
            return "detection"
        if any((path / f"train.{language}{end}").exists() for language in (source, target) for end in ("", ".gz")):
            return "translation"
        if layouts.has_masks(path):
            return "segmentation"
        if formats.has_annotations(path):
            return "detection"
        if files_below(path, frozenset(clips.VIDEOS.keys() - SUFFIXES)):
            return "video"
    if lists.list_files(path) or lists.unread(path):
        return "classification"
    if text.is_table(path):
        try:
            files = text.tables(path).values()
        except DataError:  # named as on the Hub
            return "classification"
        return "sequences" if all(_has_text(file) for file in files) else "classification"
    return "classification"


def _has_text(file: Path) -> bool:
    return file.suffix.lower() != ".parquet" or {"text", "text1"} & set(tables.read_table(file).column_names) != set()


def _classification(path: Path, report: DataReport) -> None:
    classes, splits = own.read_splits(path)
    pictures = Pictures(report, sum(len(labels) for _, _, labels in splits.values()))
    for split, (sources, names, labels) in splits.items():
        for label, name in enumerate(classes):
            rows = np.flatnonzero(labels == label)
            if not len(rows) and len(classes) > MANY:
                continue
            where = f"{split}, {name}"
            found = [one for row in rows.tolist() if (one := pictures.add(split, sources[row], str(names[row]), where))]
            line = {"split": split, "class": name, "images": len(rows), "unreadable": len(rows) - len(found)}
            report.rows.append(line | ranges(found))
        try:
            check_labels(f"the {split} split", labels, len(classes))
        except DataError as error:
            report.problems.append(str(error))
    _warn_of_empty(report, len(classes), {label for *_, labels in splits.values() for label in labels.tolist()})
    _only_in_test(report, "images")
    pictures.compare()


def _warn_of_empty(report: DataReport, classes: int, present: Collection[int]) -> None:
    if len(present) < classes:
        report.warnings.append(
            f"{classes - len(present)} of {classes} classes have no image, and a network has outputs for them: look "
            "for a wrong label, or for gaps in their numbers"
        )


def _video(path: Path, report: DataReport) -> None:
    classes, splits = clips.read_splits(path)
    lengths: list[int] = []
    copies: dict[str, dict[str, str]] = defaultdict(dict)
    for split, (paths, labels) in splits.items():
        for label, name in enumerate(classes):
            found, frames = [], list[int]()
            rows = np.flatnonzero(labels == label).tolist()
            for clip in (paths[row] for row in rows):
                try:
                    number, sizes, total = clips.measure(clip)
                except (ValueError, OSError, DataError) as error:
                    report.problems.append(f"{clip} cannot be read as a clip: {error}")
                    continue
                copies[total].setdefault(split, str(clip))
                found += [(size, "file" if clip.is_file() else "frames") for size in sorted(sizes)[:1]]
                frames.append(number)
                if number == 1:
                    report.warnings.append(f"{clip} has one frame, in which nothing moves")
                if len(sizes) > 1:
                    report.warnings.append(
                        different_sizes(f"frames of {clip}, each cropped for itself,", *sorted(sizes))
                    )
            line = {"split": split, "class": name, "clips": len(rows), "unreadable": len(rows) - len(frames)}
            span = f"{min(frames)} to {max(frames)}" if len(set(frames)) > 1 else str(*set(frames))
            report.rows.append(line | {"frames": span} | ranges(found))
            lengths += frames
    if short := sum(number < FRAMES for number in lengths):
        report.problems.append(
            f"{short} of {len(lengths)} clips have fewer frames than the {FRAMES} of task.frames, at which a training "
            f"stops: --set task.frames={min(lengths)}, or task.corrupt=skip, which leaves them out"
        )
    if lengths and max(lengths) > UNEQUAL * min(lengths):
        report.warnings.append(
            f"clips have {min(lengths)} to {max(lengths)} frames, and as many of each are taken: time runs faster in "
            "the long ones"
        )
    report.warnings += [f"the same clip in {join_places(where)}" for where in copies.values() if len(where) > 1]
    _only_in_test(report, "clips")


def _stream(data: str, kind: str) -> DataReport:
    """A stream, read in order. Raises: ConfigError for another task than classification; DataError."""
    if kind not in ("", "classification"):
        raise ConfigError(f"--task {kind} does not read streams ({data}): give a folder of files")
    report = DataReport("classification")
    classes, splits = streamed.splits(data)
    pictures = Pictures(report, sum(shards.images for shards in splits.values()))
    present: set[int] = set()
    for split, shards in splits.items():
        found: dict[int, list[Any]] = defaultdict(list)
        labels = Counter[int]()
        for shard in range(len(shards)):
            for name, image, label in shards.read(shard):
                labels[label] += 1
                found[label] += [one] if (one := pictures.add(split, image, f"{name} in {shards.name(shard)}")) else []
        for label, name in enumerate(classes):
            if not labels[label] and len(classes) > MANY:
                continue
            line = {"split": split, "class": name, "images": labels[label]}
            report.rows.append(line | {"unreadable": labels[label] - len(found[label])} | ranges(found[label]))
        present |= labels.keys()
    _warn_of_empty(report, len(classes), present)
    _only_in_test(report, "images")
    pictures.compare()
    return report


def _only_in_test(report: DataReport, unit: str) -> None:
    """Add a problem for each class without samples for training."""
    trained = {row["class"] for row in report.rows if row["split"] == "train" and row[unit]}
    tested = dict.fromkeys(row["class"] for row in report.rows if row["split"] != "train" and row[unit])
    report.problems += [f"class {name} has no {unit} for training" for name in tested if name not in trained]


def _segmentation(path: Path, void: int, classes: int, exif: str, report: DataReport) -> None:
    layout, pairs = segmentation.layout_of(path, void, exif)
    pictures = Pictures(report, sum(map(len, pairs.values())))
    masks: dict[str, list[_Mask]] = {}
    for split, files in pairs.items():
        if split == "val" and files == pairs["test"]:
            continue
        masks[split] = []
        for image, file in files:
            read = pictures.add(split, image, str(image))
            try:
                mask = layouts.read_mask(file, layout.colours)
            except DataError as error:
                report.problems.append(str(error))
                continue
            if read is not None and mask.shape != read[0]:
                report.problems.append(different_sizes(f"{file} and its image", mask.shape, read[0]))
            if read is not None:
                masks[split].append(_Mask(file, set(np.unique(mask).tolist()), read))
    if masks["train"]:  # else the cause has been told
        _labels(path, layout, masks, void, classes, report)
    pictures.compare()


@dataclass(frozen=True)
class _Mask:
    """A mask with its labels, and size and mode of its image."""

    file: layouts.Mask
    labels: set[int]
    image: tuple[tuple[int, int], str]


def _labels(
    path: Path, layout: layouts.Layout, masks: dict[str, list[_Mask]], void: int, classes: int, report: DataReport
) -> None:
    """The classes of the masks of each split, and what a training would refuse in them."""
    folder = segmentation.place_of(masks["train"][0].file)
    train = set[int]().union(*(mask.labels for mask in masks["train"]))
    names: dict[int, str] = {}
    unused: int | None = void
    try:
        spelled, labels, unused = segmentation.class_labels(path, folder, lambda: train, layout, void, classes)
        names = dict(zip(labels, spelled, strict=True))
    except DataError as error:
        report.problems.append(str(error))
    if names and len(train & set(names)) < 2:
        learned = ", ".join(names[label] for label in sorted(train & set(names))) or "no class"
        hint = f"; label {void} is void and does not count" if void in train else ""
        report.problems.append(f"the training masks of {path} have pixels of {learned} alone{hint}")
    known = {*names, *([] if unused is None else [unused])}
    for split, part in masks.items():
        present = set[int]().union(*(mask.labels for mask in part))
        for label in sorted(present):
            found = [mask.image for mask in part if label in mask.labels]
            is_void = label == unused or (layout.others and label not in names)
            name = f"{label} (void)" if is_void else names.get(label, str(label))
            report.rows.append({"split": split, "class": name, "images": len(found), **ranges(found)})
        report.problems += [
            segmentation.unknown_label(mask.file, layouts.read_mask(mask.file, layout.colours), list(names), unused)
            for mask in part
            if names and not layout.others and not mask.labels <= known
        ]
        report.problems += [
            f"class {names[label]} has no images for training" for label in sorted(present & set(names) - train)
        ]


def _detection(path: Path, task: type[Boxes], exif: str, report: DataReport) -> None:
    choices = detection.Choices(task.kind == "segm", "skip", exif, outlines=True)
    formats.format_of(path)
    try:
        own_data = detection.read_own(path, choices)
    except DataError as error:
        report.problems.append(str(error))
        return
    classes, splits = own_data.categories.names, own_data.splits
    pictures = Pictures(report, sum(map(len, splits.values())))
    any_crowd = any(scene.objects.crowd.any() for scenes in splits.values() for scene in scenes)
    for split, scenes in splits.items():
        objects, images, crowds, found = Counter[int](), Counter[int](), Counter[int](), []
        for scene in scenes:
            read = pictures.add(split, scene.source, scene.name)
            if read is not None and read[0] != scene.size:
                report.problems.append(different_sizes(f"{scene.name} and its annotation", read[0], scene.size))
            found += [read] if read is not None else []
            single = scene.objects.labels[~scene.objects.crowd].tolist()
            objects.update(single)
            images.update(set(single))
            crowds.update(scene.objects.labels[scene.objects.crowd].tolist())
        for label, name in enumerate(classes):
            line = {"split": split, "class": name, "objects": objects[label], "images": images[label]}
            report.rows.append(line | ({"crowds": crowds[label]} if any_crowd else {}) | ranges(found))
        empty = sum(not len(scene.objects) for scene in scenes)
        if 0 < empty < len(scenes):
            report.warnings.append(f"{empty} of {len(scenes)} images of {split} have no object")
    outlines = [outline for scenes in splits.values() for scene in scenes for outline in scene.objects.outlines]
    if task.kind == "bbox" and outlines and all(outlines):
        report.hints.append(
            f"all {len(outlines)} objects have polygons or masks, for --task instances or --task segmentation too"
        )
    report.problems += detection.training_problems(path, classes, splits)
    usual = task.defaults("")["task"]["size"]
    report.warnings += [said for said in [detection.tiny("train", splits["train"], usual, task.resize)] if said]
    pictures.compare()


def _lengths(lengths: Sequence[int] | np.ndarray) -> dict[str, int | None]:
    ordered = np.sort(np.asarray(lengths, np.int64))
    if not len(ordered):
        return {"shortest": None, "median": None, "longest": None}
    return {"shortest": int(ordered[0]), "median": int(ordered[len(ordered) // 2]), "longest": int(ordered[-1])}


def _sequences(path: Path, report: DataReport) -> None:
    found = text.own(path)
    splits = {"train": found.train, "test": found.test} | ({"val": found.held} if found.held is not None else {})
    seen: dict[bytes, dict[str, str]] = defaultdict(dict)
    for split, samples in splits.items():
        step = 1 + samples.pairs
        starts, lengths = samples.tokens.starts, samples.tokens.lengths.reshape(-1, step).sum(1)
        for label, name in enumerate(found.classes):
            rows = np.flatnonzero(samples.labels == label)
            line = {"split": split, "class": name, "texts": len(rows)}
            report.rows.append(line | _lengths(lengths[rows]))
        for row in range(len(samples)):
            part = samples.tokens.symbols[starts[row * step] : starts[(row + 1) * step]].tobytes()
            seen[hashlib.sha256(part).digest()].setdefault(split, f"sample {row + 1}")
    report.warnings += [f"the same text in {join_places(places)}" for places in seen.values() if len(places) > 1]
    _only_in_test(report, "texts")


def _translation(path: Path, source: str, target: str, report: DataReport) -> None:
    corpus = texts.load(str(path), source, target)
    seen: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for split, sentences in corpus.splits.items():
        for language, lines in ((source, sentences.source), (target, sentences.target)):
            lengths = _lengths([len(line.split()) for line in lines])
            report.rows.append({"split": split, "language": language, "sentences": len(lines), **lengths})
        for number, both in enumerate(zip(sentences.source, sentences.target, strict=True), 1):
            seen[both].setdefault(split, f"line {number}")
    report.warnings += [f"the same sentences in {join_places(places)}" for places in seen.values() if len(places) > 1]
