"""Folders of annotated images as common tools write them: each has the same scenes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 80, 64
NAMES = ("cat", "dog")


def box(number: int) -> list[int]:
    """[left, top, width, height] of the one object of an image."""
    return [10 + number, 20, 20, 30]


def picture(path: Path, number: int = 0, size: tuple[int, int] = (WIDTH, HEIGHT), orientation: int = 0) -> Path:
    """An image, another one for each number; size: (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    exif = Image.Exif()
    if orientation:
        exif[274] = orientation
    Image.fromarray(pixels).save(path, exif=exif)
    return path


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def polygon(number: int) -> list[list[float]]:
    left, top, width, height = box(number)
    return [[left, top, left + width, top, left + width, top + height, left, top + height]]


def coco(numbers: range, name: Callable[[int], str] = "{}.jpg".format, **fields: Any) -> dict[str, Any]:
    """COCO's content; fields: of each annotation, None = left out."""
    images = [{"id": n, "file_name": name(n), "width": WIDTH, "height": HEIGHT} for n in numbers]
    annotations = []
    for n in numbers:
        entry = {"id": n, "image_id": n, "category_id": 1 + n % 2, "bbox": box(n), "segmentation": polygon(n)} | fields
        annotations.append({key: value for key, value in entry.items() if value is not None})
    categories = [{"id": label, "name": text} for label, text in enumerate(NAMES, 1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def pictures(folder: Path, numbers: range, end: str = ".jpg") -> None:
    for number in numbers:
        picture(folder / f"{number}{end}", number)


TRAIN, VAL = range(4), range(4, 6)
SPLITS = (("train", TRAIN), ("val", VAL))
VALID = (("train", TRAIN), ("valid", VAL))
ALL = (("default", range(6)),)
"""Names of splits, and the numbers of their images."""
Splits = tuple[tuple[str, range], ...]


def coco_files(root: Path, images: str, file: str, splits: Splits = SPLITS, **fields: Any) -> None:
    """images: their folder, file: of the annotations, with {} for the split. fields: as for `coco`."""
    for split, numbers in splits:
        pictures(root / images.format(split), numbers)
        write(root / file.format(split), coco(numbers, **fields))


def standard(root: Path, **fields: Any) -> None:
    coco_files(root, "images", "{}.json", **fields)


def cvat_with_points(root: Path) -> None:
    for kind in ("instances", "person_keypoints"):
        coco_files(root, "images", f"annotations/{kind}_{{}}.json", ALL)


def ids_of_other_kinds(root: Path) -> None:
    """Whole numbers with a point, texts, null."""
    standard(root)
    for file in root.glob("*.json"):
        content = json.loads(file.read_text())
        for entry in content["images"]:
            entry |= {"id": f"image-{entry['id']}", "width": 80.0, "height": None if entry["id"] == 0 else 64.0}
            entry |= {"width": None} if entry["height"] is None else {}
        for entry in content["categories"]:
            entry["id"] = float(entry["id"])
        for entry in content["annotations"]:
            entry |= {"image_id": f"image-{entry['image_id']}", "category_id": str(entry["category_id"])}
            entry |= {"iscrowd": None, "id": None, "area": None}
        write(file, content)


def voc_xml(number: int, size: bool = True) -> str:
    left, top, width, height = box(number)
    sides = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>" * size
    corners = zip(("xmin", "ymin", "xmax", "ymax"), (left + 1, top + 1, left + width, top + height), strict=True)
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in corners)
    return f"<annotation>{sides}<object><name>{NAMES[number % 2]}</name><bndbox>{inside}</bndbox></object></annotation>"


def voc_files(
    root: Path, images: str, annotations: str, splits: Splits = ALL, name: str = "{}", size: bool = True
) -> None:
    """images, annotations: folders, with {} for the split. name: of each file, with {} for the number."""
    for split, part in splits:
        for number in part:
            picture(root / images.format(split) / f"{name.format(number)}.jpg", number)
            write(root / annotations.format(split) / f"{name.format(number)}.xml", voc_xml(number, size))


def voc(root: Path, lists: dict[str, list[str]], images: str = "JPEGImages", **options: Any) -> None:
    voc_files(root, images, "Annotations", **options)
    for split, lines in lists.items():
        write(root / "ImageSets" / "Main" / f"{split}.txt", "\n".join(lines) + "\n")


def numbers(which: range, ending: str = "") -> list[str]:
    return [f"{number}{ending}" for number in which]


def yolo_line(number: int, polygons: bool = False) -> str:
    left, top, width, height = box(number)
    if polygons:
        values = [v / (HEIGHT if i % 2 else WIDTH) for i, v in enumerate(polygon(number)[0])]
    else:
        values = [(left + width / 2) / WIDTH, (top + height / 2) / HEIGHT, width / WIDTH, height / HEIGHT]
    return " ".join(map(str, (number % 2, *values))) + "\n"


def yolo(root: Path, images: str, labels: str, names: tuple[str, str] | None, polygons: bool = False) -> None:
    """images, labels: folders, with {} for the split. names: a file with the names of the classes, and its content."""
    for split, part in SPLITS:
        for number in part:
            picture(root / images.format(split) / f"{number}.jpg", number)
            write(root / labels.format(split) / f"{number}.txt", yolo_line(number, polygons))
    if names is not None:
        write(root / names[0], names[1])


LIST = ("data.yaml", "train: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]\n")
MAPPING = ("coco8.yaml", "path: ../x\ntrain: images/train\nnames:\n  0: cat\n  1: dog\n")
LINES = ("data.yaml", "names:\n- cat\n- dog\n")


def yolo_lists(root: Path) -> None:
    yolo(root, "images", "labels", LIST)
    for split, part in SPLITS:
        write(root / f"{split}.txt", "".join(f"./images/{number}.jpg\n" for number in part))


def labelme(root: Path, kind: str = "polygon", folder: str = "", split: bool = False) -> None:
    for number in range(6):
        left, top, width, height = box(number)
        corners = [[left, top], [left + width, top + height]]
        points = corners if kind == "rectangle" else np.reshape(polygon(number)[0], (-1, 2)).tolist()
        shapes = [{"label": NAMES[number % 2], "points": points, "shape_type": kind}]
        place = root / (("train" if number in TRAIN else "val") if split else folder)
        picture(place / f"{number}.jpg", number)
        content = {"shapes": shapes, "imagePath": f"C:\\x\\{number}.jpg", "imageData": None}
        write(place / f"{number}.json", content | {"imageWidth": WIDTH, "imageHeight": HEIGHT})


def csv_rows(part: range) -> str:
    rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
    for number in part:
        left, top, width, height = box(number)
        rows.append(f"{number}.jpg,80,64,{NAMES[number % 2]},{left},{top},{left + width},{top + height}")
    return "\n".join(rows) + "\n"


def csv_files(root: Path, images: str, file: str, splits: Splits = SPLITS) -> None:
    for split, part in splits:
        pictures(root / images.format(split), part)
        write(root / file.format(split), csv_rows(part))


def hub_metadata(root: Path, one_by_one: bool = False) -> None:
    for split, part in SPLITS:
        pictures(root / split, part)
        for n in part:
            joined = {"bbox": [box(n)], "categories": [NAMES[n % 2]]}
            objects = [{"bbox": box(n), "category": NAMES[n % 2]}] if one_by_one else joined
            with (root / split / "metadata.jsonl").open("a") as stream:
                stream.write(json.dumps({"file_name": f"{n}.jpg", "objects": objects}) + "\n")


def with_marks(root: Path) -> None:
    yolo(root, "images/{}", "labels/{}", LIST)
    for file in root.glob("labels/*/*.txt"):
        write(file, "\ufeff" + file.read_text())


WITH_SPLITS: dict[str, Callable[[Path], object]] = {
    "COCO": standard,
    "COCO as it is published": lambda root: coco_files(root, "{}2017", "annotations/instances_{}2017.json"),
    "COCO, names without a year": lambda root: coco_files(root, "{}2017", "{}.json"),
    "COCO of Roboflow": lambda root: coco_files(root, "{}", "{}/_annotations.coco.json", VALID),
    "COCO, backslashes": lambda root: coco_files(root, "images/a", "{}.json", name="a\\{}.jpg".format),
    "COCO without boxes": lambda root: standard(root, bbox=None),
    "COCO without ids": lambda root: standard(root, id=None),
    "COCO, ids of other kinds": ids_of_other_kinds,
    "YOLO, images/train": lambda root: yolo(root, "images/{}", "labels/{}", LIST),
    "YOLO, train/images": lambda root: yolo(root, "{}/images", "{}/labels", MAPPING),
    "YOLO, names in lines": lambda root: yolo(root, "images/{}", "labels/{}", LINES),
    "YOLO, classes.txt": lambda root: yolo(root, "images/{}", "labels/{}", ("classes.txt", "cat\ndog\n")),
    "YOLO of polygons": lambda root: yolo(root, "images/{}", "labels/{}", LIST, polygons=True),
    "YOLO with lists": yolo_lists,
    "VOC": lambda root: voc(root, {"train": numbers(TRAIN), "val": numbers(VAL)}),
    "VOC with flags": lambda root: voc(root, {"train": numbers(TRAIN, "  1"), "val": numbers(VAL, " -1")}),
    "VOC, trainval and val": lambda root: voc(root, {"trainval": numbers(range(6)), "val": numbers(VAL)}),
    "VOC of Roboflow": lambda root: voc_files(root, "{}", "{}", VALID),
    "table of Roboflow": lambda root: csv_files(root, "{}", "{}/_annotations.csv", VALID),
    "tables": lambda root: csv_files(root, "images", "{}.csv"),
    "table of the Hub": hub_metadata,
    "table of the Hub, object by object": lambda root: hub_metadata(root, one_by_one=True),
    "YOLO with byte order marks": with_marks,
    "labelme in splits": lambda root: labelme(root, split=True),
}
"""Six scenes, four for training and two for validation."""
WHOLE: dict[str, Callable[[Path], object]] = {
    "COCO of CVAT": lambda root: coco_files(root, "images", "annotations/instances_{}.json", ALL),
    "COCO of CVAT with key points": cvat_with_points,
    "COCO of Label Studio": lambda root: coco_files(
        root, "images", "result.json", ALL, name="../../label-studio/data/media/{}.jpg".format, area=1.0
    ),
    "COCO, train alone": lambda root: coco_files(root, "images", "train.json", ALL),
    "VOC of CVAT": lambda root: voc(root, {"default": numbers(range(6))}),
    "VOC, trainval alone": lambda root: voc(root, {"trainval": numbers(range(6))}),
    "VOC, names with spaces": lambda root: voc(
        root, {"train": [f"my photo {n}.x" for n in range(6)]}, name="my photo {}.x"
    ),
    "VOC without lists": lambda root: voc(root, {}),
    "VOC without sizes": lambda root: voc(root, {}, size=False),
    "VOC, images in images": lambda root: voc(root, {}, images="images"),
    "VOC beside the images": lambda root: voc_files(root, "", ""),
    "YOLO without splits": lambda root: yolo(root, "images", "labels", LIST),
    "YOLO beside the images": lambda root: yolo(root, "", "", ("classes.txt", "cat\ndog\n")),
    "labelme": labelme,
    "labelme, rectangles": lambda root: labelme(root, "rectangle", "photos"),
}
"""The six scenes in one split."""
LAYOUTS = {**WITH_SPLITS, **WHOLE}
