"""Semantic segmentation: a class for each pixel, on the user's images and masks, with any host."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from regard.core import ConfigError, DataError, MixerConfig
from regard.images.augment import scaled_pixels
from regard.images.cores import loaders
from regard.images.digest import forget_if_changed
from regard.images.feed import to_tensor
from regard.images.images import read_image
from regard.images.normalise import Statistics
from regard.images.order import Part, check_parts
from regard.images.rows import Subset
from regard.lab.data import cued
from regard.lab.data.generated import with_revision
from regard.measure.mean_iou import margins, miou
from regard.models.segmentation import Segmenter, make_segmenter
from regard.swapping.inspect import input_channels

from ..base import Prediction, Record, Samples, Score, Training, Trial
from ..image_task import ImageTask, is_copy, same_data
from ..validation import ValidationPart
from .data import CAMVID, NAMED, MaskSet, Photos, Sample, load, own_digest, own_set, path_of, with_classes
from .feed import AUGMENTS, Batches, fitted_size, pad
from .pictures import mask_of, runs, sheet
from .score import confusion, score_of
from .windows import classes_of

_CUED: dict[str, dict[str, Any]] = {
    "task": {"host": "vit_desk(patch=7, dim=64, depth=4, heads=2)", "size": cued.SIZE, "head": "pixels"},
    "recipe": {"epochs": 1, "batch": 32, "lr": 2e-3, "augment": "none", "smoothing": 0.0},
}
_OWN: dict[str, dict[str, Any]] = {
    "task": {"host": "vit_desk(patch=16, dim=96, depth=4, heads=3)", "size": (224, 224)},
    "recipe": {"epochs": 30, "batch": 8, "lr": 1e-3, "augment": "scale", "smoothing": 0.0},
}
_CAMVID = {**_OWN, "task": {**_OWN["task"], "size": (176, 240)}}


@dataclass(frozen=True, kw_only=True)
class Segmentation(ValidationPart, ImageTask):
    """Mean IoU of a host with a head, at the original resolution of the images.

    size: (height, width) of the crops of training and of the windows of the test. head: a name of
    `regard.models.segmentation.HEADS`, with options: "cbt(heads=6)". shorter: side to which the shorter side of each
    image is resized first, 0 = that of `size`. stride: between windows, as a fraction of their side; scores of
    windows that overlap are averaged. scales: random factors of augment "scale". void: the label of pixels that do not
    count; with 0 the classes start at label 1. classes: of the user's own data, 0 = the lines of their classes.txt, or
    the labels of the training masks. exif: "keep" takes the user's own pictures as they are stored, "turn" as their
    EXIF data say, "" = as their masks were made. split: that is evaluated, "test", "val", or "held" for the validation
    part. val, val_seed: the validation part, see `regard.lab.tasks.validation.ValidationPart`; a split "val" beside
    "test" is reserved for it. limit: number of images of each split, 0 = all: the first ones.
    Raises: ConfigError.
    """

    name: ClassVar[str] = "segmentation"
    metric: ClassVar[str] = "miou"
    further: ClassVar[tuple[str, ...]] = ("pixels",)
    example_data: ClassVar[str] = "cued-digits"
    model_fields: ClassVar[tuple[str, ...]] = ("head",)
    sets: ClassVar[Mapping[str, str]] = NAMED

    head: str = "linear"
    shorter: int = 0
    stride: float = 1.0
    scales: tuple[float, float] = (0.75, 1.5)
    void: int = 255
    classes: int = 0
    exif: Literal["", "keep", "turn"] = ""
    split: Literal["test", "val", "held"] = "test"
    limit: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scales[0] <= self.scales[1]:
            raise ConfigError(f"scales are the smallest and the largest factor, such as 0.5,2.0, not {self.scales}")
        if not 0 < self.stride <= 1:
            raise ConfigError(f"stride is a fraction of a window, above 0 and at most 1, not {self.stride}")
        if not 0 <= self.void <= 255:
            raise ConfigError(f"void is a label between 0 and 255, not {self.void}")
        if min(self.shorter, self.classes, self.limit) < 0:
            raise ConfigError(
                f"shorter, classes and limit are 0 or more, not {self.shorter}, {self.classes} and {self.limit}"
            )

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        return _CUED if data in cued.CUED else _CAMVID if data == "camvid" else _OWN

    def check(self, recipe: Training) -> None:
        self.check_recipe(recipe, AUGMENTS, without=("mixup", "cutmix", "erasing"))

    def identity(self) -> "Segmentation":
        if self.data in NAMED:
            return dataclasses.replace(self, data=with_revision(self.data), digest="", extra=())
        path = path_of(self.data)
        forget_if_changed(path, own_digest, own_set)
        total = own_digest(path, self.digest)
        return dataclasses.replace(self, data=f"own:{total}", digest="", extra=())

    def data_set(self) -> MaskSet:
        """The data set. Raises: DataError."""
        return load(self.data, self.void, self.classes, self.digest, self.exif)

    def part(self, split: str) -> Sequence[Sample]:
        """A split, at most `limit` images of it. Raises: DataError if the data do not have it."""
        return self._part(self.data_set(), split)

    def _part(self, mask_set: MaskSet, split: str) -> Sequence[Sample]:
        drawn = bool(self.val) and mask_set.reserved is None
        name = split if split != "held" else "train" if drawn else mask_set.reserved or "held"
        if name not in mask_set.splits:
            raise DataError(f"{mask_set.name} has no split {name!r}; it has {', '.join(mask_set.splits)}")
        images = mask_set.splits[name]
        if self.limit:
            images = Subset(images, range(min(self.limit, len(images))))
        if drawn and name == "train":
            images = Subset(images, self.divide(len(images))[split == "held"])
        return images

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> nn.Module:
        names = self.data_set().classes if record is None else record["class_names"]
        channels = self.channels if record is None else len(record["normal"][0])
        return self._build(mixer, len(names), channels, removed)

    def _build(
        self, mixer: MixerConfig | None, classes: int, channels: int, removed: bool = False, pretrained: bool = True
    ) -> Segmenter:
        return make_segmenter(
            self.host, mixer, self.head, classes=classes, size=self.size, channels=channels, removed=removed,
            pretrained=pretrained, extra=self.extra,
        )  # fmt: skip

    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        """As in `Task`; nothing is augmented."""
        generated = self.data in cued.CUED
        classes = outputs or self.classes or (len(cued.CLASSES) if generated else len(CAMVID))
        model = self._build(mixer, classes, 1 if generated else 3, removed, pretrained=False)
        channels = input_channels(model)

        def loss(n: int) -> Tensor:
            masks = torch.randint(0, classes, (n, *self.size), dtype=torch.uint8)
            return model(torch.randn(n, channels, *self.size), masks)

        inputs = (torch.randn(1, channels, *self.size),)
        return Trial(model, inputs, loss, lambda n: model(torch.randn(n, channels, *self.size)))

    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> Batches:
        train = self.part("train")
        check_parts(len(train), recipe.batch, part)
        return Batches(train, self.size, self._shorter, self.scales, recipe.batch, recipe.augment, seed, part)

    def usual_workers(self, recipe: Training) -> int:
        """As in `Task`: for photographs that are decoded when they are used."""
        split = self.part("train")
        while isinstance(split, Subset):
            split = split.items
        if not isinstance(split, Photos) or split.decoded is not None:
            return 0
        return loaders(recipe.batch * 4 * self.size[0] * self.size[1])

    @property
    def _shorter(self) -> int:
        return self.shorter or min(self.size)

    def own_statistics(self) -> Statistics:
        return self.data_set().statistics

    def loss(
        self, model: nn.Module, batch: Samples, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """Cross-entropy of the pixels that are not void, plus 0.4 times that of the auxiliary head of "conv"."""
        return model(self.prepare(batch[0], device), batch[1].to(device), recipe.smoothing)

    def predict_masks(
        self, model: nn.Module, device: torch.device, part: Sequence[Sample], statistics: Statistics, together: int = 32
    ) -> Iterator[np.ndarray]:
        """The classes (height, width) uint8 of each image of a split; neighbours of one size share a forward pass."""
        model.eval()
        group: list[np.ndarray] = []
        for image in (sample.image for sample in part):
            if group and (image.shape != group[0].shape or len(group) == together):
                yield from self._classes(model, group, statistics, device)
                group = []
            group.append(image)
        yield from self._classes(model, group, statistics, device)

    def _classes(
        self, model: nn.Module, images: list[np.ndarray], statistics: Statistics, device: torch.device
    ) -> np.ndarray:
        """The classes (n, h, w) of images of one size."""
        height, width = images[0].shape[:2]
        target = fitted_size((height, width), self._shorter)
        small = to_tensor(np.stack([scaled_pixels(image, target) for image in images]))
        return classes_of(model, small, statistics, self.size, self.stride, (height, width), device).numpy()

    def _score(
        self, model: nn.Module, device: torch.device, images: Sequence[Sample], mask_set: MaskSet, normal: Statistics
    ) -> Score:
        number = len(mask_set.classes)
        together = 32 if self.data in cued.CUED else 4
        rows = [
            margins(confusion(sample.mask, classes, number))
            for sample, classes in zip(images, self.predict_masks(model, device, images, normal, together), strict=True)
        ]
        return score_of(np.stack(rows), mask_set.classes, mask_set.ignored)

    def score(self, model: nn.Module, device: torch.device) -> Score:
        return self._score(model, device, self.part(self.split), self.data_set(), self.statistics())

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """Score on the test split of other data, normalised like the training images.

        The user's own are scored whole if they have no splits, and may have fewer classes than the run, by their names.

        Raises: DataError if they have other classes, or another number of channels.
        """
        own = data not in NAMED and not same_data(self.data, data)
        other = replace(self.on(data), limit=0 if own else self.limit)
        mask_set = load(data, self.void, self.classes, self.digest, self.exif, own) if own else other.data_set()
        if own and is_copy(mask_set, record):
            mask_set = other.data_set()
        mask_set = with_classes(data, mask_set, record["class_names"])
        self.check_fits(data, mask_set, record)
        names = (self.split, "test", "val", "all", "train")
        split = next(name for name in names if name in mask_set.splits) if own else self.split
        images = other._part(mask_set, split)
        return other._score(model, device, images, mask_set, self.statistics(record))

    @property
    def chance(self) -> float:
        """The metric of the most frequent class of the evaluated split, predicted everywhere."""
        mask_set, images = self.data_set(), self.part(self.split)
        counts = np.zeros(len(mask_set.classes), np.int64)
        for sample in images:
            counts += np.bincount(sample.mask.ravel(), minlength=256)[: len(counts)]
        both, predicted = np.zeros_like(counts), np.zeros_like(counts)
        best = int(counts.argmax())
        both[best], predicted[best] = counts[best], counts.sum()
        return miou(np.concatenate([both, counts, predicted]), mask_set.ignored)

    def example(self) -> tuple[Tensor]:
        image = self.part(self.split)[0].image
        small = scaled_pixels(image, fitted_size(image.shape[:2], self._shorter))
        crop = pad(small, self.size, 0)[: self.size[0], : self.size[1]]
        return (self.prepare(to_tensor(crop[None]), torch.device("cpu")),)

    def record(self) -> dict[str, Any]:
        return self.record_of(len(self.part("train")), len(self.part(self.split)))

    def predict(
        self, model: nn.Module, sources: Sequence[str | Path], device: torch.device, record: Record
    ) -> list[Prediction]:
        """For each image {"file", "size", "shares", "runs", "class_names"}.

        shares: of the pixels of each class in percent; runs: [class, number of pixels] of each run of equal classes,
        row by row.
        """
        names, statistics = list(record["class_names"]), self.statistics(record)
        predictions = []
        for source in sources:
            image = read_image(source, None, len(statistics[0]))
            mask = self._classes(model, [image], statistics, device)[0]
            counts = np.bincount(mask.ravel(), minlength=len(names))
            order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
            shares = {names[index]: round(100 * int(counts[index]) / mask.size, 3) for index in order}
            more = {"size": list(mask.shape), "shares": shares, "runs": runs(mask), "class_names": names}
            predictions.append({"file": str(source), **more})
        return predictions

    def draw(self, source: str | Path, prediction: Mapping[str, Any]) -> Image:
        mask = mask_of(prediction["runs"], prediction["size"])
        hidden = (0,) if self.data in cued.CUED else ()
        return sheet(read_image(source, None, 3), [("prediction", mask)], prediction["class_names"], hidden)
