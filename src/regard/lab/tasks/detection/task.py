"""Object detection and instance segmentation: Faster, Mask and Cascade R-CNN with any host as their backbone."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from regard.core import ConfigError, DataError, MixerConfig
from regard.core.eval_mode import eval_mode
from regard.images.cores import loaders
from regard.images.feed import to_tensor
from regard.images.images import read_image
from regard.images.normalise import Statistics
from regard.images.order import Part, check_parts
from regard.images.rows import Subset
from regard.images.streams import generator
from regard.swapping.inspect import explain_inputs

from ..base import Prediction, Record, Score, Training, Trial
from ..image_task import ImageTask, is_copy, same_data
from ..validation import ValidationPart
from . import data as data_sets
from . import presets
from .data import tiny, with_classes
from .feed import AUGMENTS, Batch, Batches, Split, canvas, read_pixels, readable, resize_image, scaled_size
from .networks import Detector, Heads, detection_backbone, make_detector
from .networks.padding import cannot_hide
from .networks.rcnn import Targets
from .predictions import Frame, as_json, found_in, predictions_of
from .scenes import Scene, SceneSet
from .score import Found, evaluate
from .trivial import components

log = logging.getLogger("regard.data")


@dataclass(frozen=True, kw_only=True)
class Boxes(ValidationPart, ImageTask):
    """What detection and instance segmentation have in common; the defaults are for images of about 256 pixels.

    size: (height, width) to which images are resized. resize: "stretch", to exactly this size, so that attention sees
    no padding; "fit", inside this size without a change of shape; "sides", so that the shorter side is that of size
    and the longer one at most that of size, as in torchvision, detectron2 and mmdetection: tensors have the size of
    the largest image of a batch. Padding is hidden from attention; a mechanism that takes no padding mask is refused.
    scales: factors of the size for training, one at random for each batch.
    width: channels of the feature pyramid. strides: of its maps in pixels. anchor, ratios, proposals, candidates, rois,
    head, mask_head: see `regard.lab.tasks.detection.networks.Heads`. detections: the largest number in an image, 0 =
    100, or one and a half of the largest number of objects in a training image where that is above 100. split: that is
    evaluated, "val", "test", or "held" for the validation part. limit: number of images of each split, 0 = all: the
    first ones. corrupt: stop at an image or annotation that is wrong, or skip it with a warning. exif: "keep" takes the
    user's own pictures as they are stored, "turn" as their EXIF data say, "" = as they were annotated. val, val_seed:
    the validation part, see `regard.lab.tasks.validation.ValidationPart`; it is always drawn from the training images.
    Raises: ConfigError.
    """

    metric: ClassVar[str] = "map"
    further: ClassVar[tuple[str, ...]] = ("ap50", "ap75")
    example_data: ClassVar[str] = "cued-digits"
    sets: ClassVar[Mapping[str, str]] = data_sets.NAMED
    no_export: ClassVar[str] = "the numbers of proposals and of boxes depend on the image"
    model_fields: ClassVar[tuple[str, ...]] = ("detector", "width", "strides", "anchor", "ratios", "head", "mask_head")
    trivial: ClassVar[str] = "what a threshold of brightness parts"
    kind: ClassVar[str]
    detectors: ClassVar[tuple[str, ...]]

    detector: str
    resize: Literal["stretch", "fit", "sides"] = "stretch"
    scales: tuple[float, ...] = ()
    width: int = 96
    strides: tuple[int, ...] = (8, 16, 32)
    anchor: float = 3.0
    ratios: tuple[float, ...] = (0.75, 1.0, 1.33)
    proposals: tuple[int, int] = (500, 200)
    candidates: int = 0
    rois: int = 64
    head: int = 192
    mask_head: tuple[int, int] = (64, 2)
    detections: int = 0
    split: Literal["val", "test", "held"] = "val"
    limit: int = 0
    corrupt: Literal["stop", "skip"] = "stop"
    exif: Literal["", "keep", "turn"] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.detector not in self.detectors:
            raise ConfigError(f"detector is one of {', '.join(self.detectors)}, not {self.detector!r}")
        if min(self.limit, self.detections, self.candidates) < 0:
            given = f"{self.limit}, {self.detections} and {self.candidates}"
            raise ConfigError(f"limit, detections and candidates are 0 or more, not {given}")
        if any(not scale > 0 for scale in (*self.scales, *self.ratios, self.anchor)):
            raise ConfigError("scales, ratios and anchor are positive numbers")
        if not self.strides or any(2 * fine != coarse for fine, coarse in pairwise(self.strides)):
            raise ConfigError(f"strides are each the double of the one before, such as 8,16,32, not {self.strides}")
        counts = (*self.proposals, *self.mask_head, self.width, self.rois, self.head)
        if min(counts) < 1:
            raise ConfigError(f"proposals, mask_head, width, rois and head are at least 1, not {counts}")

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        images = 0
        if data and data not in cls.sets:
            with suppress(DataError):  # which the run itself will name; annotations alone are read
                choices = data_sets.Choices(cls.kind == "segm")
                images = len(data_sets.present_splits(data_sets.path_of(data), choices).splits["train"])
        return presets.defaults(data, images)

    def in_host(self, host: str, size: tuple[int, int] | None = None) -> "Boxes":
        """As in `Task`; the size stays if none is given."""
        return dataclasses.replace(self, host=host, size=size or self.size)

    def check(self, recipe: Training) -> None:
        self.check_recipe(recipe, AUGMENTS, without=("smoothing", "mixup", "cutmix", "erasing"))
        if recipe.precision == "bf16-true":
            raise ConfigError(
                "with bf16-true boxes are rounded to several pixels; bf16-mixed and 16-mixed keep them exact"
            )

    def identity(self) -> "Boxes":
        name = data_sets.identity(self.data, self.kind == "segm", self.corrupt, self.digest, self.exif)
        return dataclasses.replace(self, data=name, digest="", extra=())

    # data

    def data_set(self) -> SceneSet:
        """The data set. Raises: DataError."""
        return self._load()

    def _load(self, whole: bool = False) -> SceneSet:
        return data_sets.load(self.data, self.kind == "segm", self.corrupt, self.digest, self.exif, whole)

    def part(self, split: str) -> Split:
        """Images and targets of a split: "train", "val", "test" or "held", at most `limit`. Raises: DataError."""
        return _split(self, split, self.data_set())

    def test_scenes(self) -> Sequence[Scene]:
        """The scenes of the split that is evaluated."""
        return self.part(self.split).scenes

    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> Batches:
        images = self.part("train")
        check_parts(len(images), recipe.batch, part)
        return Batches(images, min(recipe.batch, len(images)), recipe.augment, seed, self.scales, part)

    def usual_workers(self, recipe: Training) -> int:
        """As in `Task`: for photographs that are decoded when they are used. Masks are counted as ten in an image."""
        train = self.part("train")
        if train.in_memory or not train.key:
            return 0
        return loaders(recipe.batch * self.size[0] * self.size[1] * (13 if self.kind == "segm" else 3))

    def own_statistics(self) -> Statistics:
        """As in `ImageTask`, of at most 500 training images."""
        return _statistics(self.part("train"))

    def record(self) -> dict[str, Any]:
        """As in `ImageTask.record_of`, and category_ids, and the number of detections."""
        scene_set = self.data_set()
        return {
            **self.record_of(len(self.part("train")), len(self.test_scenes())),
            "category_ids": list(scene_set.category_ids),
            "detections": _most(self, scene_set),
        }

    # the model

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> Detector:
        record = self.record() if record is None else record
        channels = len(record["normal"][0])
        model = self.build(mixer, len(record["class_names"]), channels, record["detections"], removed)
        self._try(model, channels)
        return model

    def build(
        self,
        mixer: MixerConfig | None,
        classes: int,
        channels: int,
        detections: int,
        removed: bool = False,
        *,
        pretrained: bool = True,
    ) -> Detector:
        """The detector as its parts initialise it; no data are read. pretrained: as in `detection_backbone`."""
        backbone = detection_backbone(
            self.host, mixer, size=self.size, channels=channels, width=self.width, strides=self.strides,
            removed=removed, pretrained=pretrained, extra=self.extra,
        )  # fmt: skip
        heads = Heads(
            classes=classes, anchor=self.anchor, ratios=self.ratios, proposals=self.proposals,
            candidates=self.candidates, rois=self.rois,
            head=self.head, mask_head=self.mask_head, detections=detections,
        )  # fmt: skip
        reason = cannot_hide(backbone) if self.resize != "stretch" else ""
        if reason:
            raise ConfigError(f'resize="{self.resize}" leaves padding, and {reason}; use resize="stretch"')
        return make_detector(self.detector, backbone, heads)

    def _try(self, model: Detector, channels: int) -> None:
        """One forward pass of the backbone at every size. Raises: ConfigError if the host takes one size only."""
        whole = canvas(self.size, self.size, self.resize)
        sizes = {scaled_size(whole, scale): None for scale in (1.0, *self.scales)}
        if self.resize == "sides":
            sizes[whole[::-1]] = None
        for size in sizes:
            image = torch.zeros(1, channels, *size)
            padding = [(size[0], max(size[1] - 1, 1))] if self.resize != "stretch" else None
            with torch.inference_mode(), explain_inputs(model, image), eval_mode(model):
                try:
                    model(image, None, padding, True)
                except (AssertionError, RuntimeError, ValueError) as error:
                    if size == whole:
                        raise
                    why = f"scales={self.scales}" if self.scales else f'resize="{self.resize}"'
                    raise ConfigError(
                        f"{self.host} does not take images of {size[0]}x{size[1]} ({why}): {error}"
                    ) from error

    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        """As in `Task`; three objects in an image. inputs: operations are counted on the largest number of boxes."""
        classes, channels = (1, 1) if self.data.startswith("cued") else ({"bccd": 3, "nuclei": 1}.get(self.data, 80), 3)
        model = self.build(mixer, outputs or classes, channels, self.detections or 100, removed, pretrained=False)
        rng = generator("trial")
        height, width = self.size

        def target() -> dict[str, Tensor]:
            first = rng.uniform(0, 0.5, (3, 2)) * (width, height)
            sides = rng.uniform(0.1, 0.5, (3, 2)) * (width, height)
            boxes = torch.from_numpy(np.concatenate([first, first + sides], 1).astype(np.float32))
            one = {"boxes": boxes, "labels": torch.ones(3, dtype=torch.int64)}
            return one | ({"masks": torch.ones(3, height, width, dtype=torch.uint8)} if self.kind == "segm" else {})

        def loss(n: int) -> Tensor:
            model.train()
            losses = model(torch.randn(n, channels, *self.size), [target() for _ in range(n)])
            return sum(losses.values(), torch.zeros(()))

        def forward(n: int) -> Any:
            model.eval()
            return model(torch.randn(n, channels, *self.size))

        return Trial(model, (torch.randn(1, channels, *self.size), None, None, True), loss, forward)

    def example(self) -> tuple[Any, ...]:
        """As in `Task`: an image, and the request to count operations on the largest number of boxes."""
        image = to_tensor(self.part(self.split).pixels(0)[None])
        if self.resize == "sides":  # its size depends on the image
            image = image.new_zeros(1, self.channels, *canvas(self.size, self.size, self.resize))
        return (self.prepare(image, torch.device("cpu")), None, None, True)

    def loss(
        self, model: nn.Module, batch: Batch, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """The sum of the losses of torchvision's detectors: objectness, proposals, classes, boxes, masks."""
        images, targets, sizes = batch
        moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
        losses: dict[str, Tensor] = model(self.frame().pad(images, sizes, device), Targets(moved), sizes)
        return torch.stack([value.float() for value in losses.values()]).sum()

    def frame(self, record: Mapping[str, Any] | None = None) -> Frame:
        """How a model takes images. record: as for `score_on`; None = the task's own data."""
        return Frame(self.size, self.resize, self.statistics(record))

    # evaluation

    def score(self, model: nn.Module, device: torch.device) -> Score:
        """Average precision of boxes (masks) in the original images; `Score.samples` are jackknife values."""
        part, scene_set = self.part(self.split), self.data_set()
        found = predictions_of(self.frame(), model, part, device)
        return self._score(part.scenes, found, scene_set.classes, _most(self, scene_set))

    def _score(self, scenes: Sequence[Scene], found: list[Found], classes: tuple[str, ...], most: int) -> Score:
        score = evaluate(scenes, found, classes, self.kind, most).score()
        if self.kind == "bbox":
            return score
        boxes = evaluate(scenes, found, classes, "bbox", most).metrics()
        return replace(score, metrics=score.metrics | {f"box_{name}": value for name, value in boxes.items()})

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """As in `Task`; the classes are those of the run, of which the user's own data may have some.

        Their split of the name `split` is scored, else their only one, which may be all images, else the one for the
        test or the validation.
        """
        own = data not in self.sets and not same_data(self.data, data)
        other = replace(self.on(data), limit=0 if own else self.limit)
        scene_set = other._load(whole=own)
        split: str = other.split
        if own:
            if is_copy(scene_set, record):
                scene_set = other._load()
            scene_set = with_classes(data, scene_set, record["class_names"])
            if split not in scene_set.splits:
                split = next(name for name in ("test", "val", "train") if name in scene_set.splits)
        self.check_fits(data, scene_set, record)
        part = _split(other, split, scene_set)
        found = predictions_of(self.frame(record), model, part, device)
        return self._score(part.scenes, found, scene_set.classes, record["detections"])

    @property
    def chance(self) -> float:
        return _trivial_map(self, self.data_set())

    def predict(
        self, model: nn.Module, sources: Sequence[str | Path], device: torch.device, record: Record
    ) -> list[Prediction]:
        """For each image its file, size and objects, see `as_json`; objects with scores below 0.05 are left out."""
        frame = self.frame(record)
        predictions = []
        for source in sources:
            pixels = read_image(source, None, len(frame.statistics[0]))
            original = (pixels.shape[0], pixels.shape[1])
            image = to_tensor(resize_image(pixels, self.size, self.resize)[None])
            (found,) = found_in(frame, model, image, [original], device)
            predictions.append(as_json(str(source), original, found, record["class_names"], record["category_ids"]))
        return predictions

    def draw(self, source: str | Path, prediction: Mapping[str, Any]) -> Image:
        """The objects with scores of at least 0.5, in the colours of their classes."""
        from .pictures import draw_prediction

        return draw_prediction(read_image(source, None, 3), prediction)


@dataclass(frozen=True, kw_only=True)
class Detection(Boxes):
    """Average precision of boxes. detector: "faster" or "cascade", of `networks.DETECTORS`."""

    name: ClassVar[str] = "detection"
    kind: ClassVar[str] = "bbox"
    detectors: ClassVar[tuple[str, ...]] = ("faster", "cascade")

    detector: str = "faster"


@dataclass(frozen=True, kw_only=True)
class Instances(Boxes):
    """Average precision of masks, and of boxes as `box_map`. detector: "mask" or "cascade_mask", of
    `networks.DETECTORS`.
    """

    name: ClassVar[str] = "instances"
    further: ClassVar[tuple[str, ...]] = (*Boxes.further, "box_map", "box_ap50", "box_ap75")
    kind: ClassVar[str] = "segm"
    detectors: ClassVar[tuple[str, ...]] = ("mask", "cascade_mask")

    detector: str = "mask"


@lru_cache(maxsize=8)
def _split(task: Boxes, split: str, scene_set: SceneSet) -> Split:
    name = "train" if split == "held" and task.val else split
    if name not in scene_set.splits:
        there = ", ".join(scene_set.splits)
        raise DataError(f"{task.data} has no split {split!r} (it has {there}); choose with --set task.split=...")
    scenes = scene_set.splits[name]
    if task.corrupt == "skip" and not task.data.startswith("cued"):
        scenes = readable(scenes, scene_set.channels, f"{scene_set.checksum[:16]}-{name}")
    if task.limit and task.limit < len(scenes):
        scenes = [scenes[row] for row in range(task.limit)]
    if name == "train" and task.data not in task.sets and (said := tiny(name, scenes, task.size, task.resize)):
        log.warning("%s", said)
    key = "" if task.data.startswith("cued") else f"{scene_set.checksum[:16]}-{split}-{task.limit}-{task.corrupt}"
    if task.val and name == "train":
        scenes = Subset(scenes, task.divide(len(scenes))[split == "held"])
        key += f"-{task.val:g}-{task.val_seed}" if key else ""
    return Split(scenes, task.size, scene_set.channels, task.resize, key)


@lru_cache(maxsize=8)
def _statistics(train: Split) -> Statistics:
    rows = range(0, len(train), -(-len(train) // 500))
    values = [np.asarray(train.pixels(row), np.float32)[: inside[0], : inside[1]].reshape(-1, train.channels) / 255
              for row in rows for inside in [train.inside(train.scenes[row])]]  # fmt: skip
    means = np.stack([value.mean(0, dtype=np.float64) for value in values]).mean(0)
    squares = np.stack([(value.astype(np.float64) ** 2).mean(0) for value in values]).mean(0)
    std = np.sqrt(np.maximum(squares - means**2, 1e-6))
    return [round(float(value), 6) for value in means], [round(float(value), 6) for value in std]


@lru_cache(maxsize=8)
def _most(task: Boxes, scene_set: SceneSet) -> int:
    """The task's own, else 100, as COCO counts, or one and a half of the largest number in a training image where that
    is above 100."""
    if task.detections or task.data.startswith("cued"):
        return task.detections or 100
    most = max(len(scene.objects) for scene in task.part("train").scenes)
    return 100 if most <= 100 else -(-most * 3 // 2 // 50) * 50


@lru_cache(maxsize=8)
def _trivial_map(task: Boxes, scene_set: SceneSet) -> float:
    scenes = task.part("train").scenes
    for first in range(0, len(scenes), 1000):  # of the first images, unless these have no objects
        labels = np.concatenate([scenes[row].objects.labels for row in range(first, min(first + 1000, len(scenes)))])
        if len(labels):
            break
    most, label = _most(task, scene_set), int(np.bincount(labels, minlength=1).argmax())
    scenes = task.test_scenes()
    pixels = (read_pixels(scene, scene_set.channels) for scene in scenes)
    found = [components(image, label, most, task.kind == "segm") for image in pixels]
    return evaluate(scenes, found, scene_set.classes, task.kind, most).mean() or 0.0
