"""Image classification on any set of `regard.lab.data`, with any host that returns class scores."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from regard.core import ConfigError, DataError, DeviceError, MixerConfig
from regard.core.eval_mode import eval_mode
from regard.images.augment import BATCHWISE, augment_batch, by_image, centre, check_augment, place_on_canvas, transform
from regard.images.cores import loaders
from regard.images.feed import Batches, evaluation_batches, to_tensor
from regard.images.imagenet import NORMAL
from regard.images.images import Images, ImageSet, read_image
from regard.images.normalise import Statistics, is_pretrained
from regard.images.order import Part, check_parts
from regard.images.own import Lazy
from regard.images.streams import generator
from regard.lab.data import catalog
from regard.lab.data.streamed.feed import Stream, StreamBatches
from regard.lab.data.streamed.names import is_stream
from regard.models.catalog import user_ports
from regard.models.create import build_host, further_options, parse_host
from regard.swapping.inspect import explain_inputs, input_channels
from regard.swapping.swap import remove

from ..base import Prediction, Record, Samples, Score, Training, Trial
from ..class_scores import best_classes, check_kept_test, majority, relabelled, top1_score
from ..drawing import add_caption
from ..image_task import ImageTask, same_data
from ..validation import ValidationPart
from ..weights import Init


@dataclass(frozen=True, kw_only=True)
class Classification(ValidationPart, ImageTask):
    """Top-1 accuracy of a host on images.

    size: (height, width) of images. classes: outputs of the host, 0 = as many as the data set has. init: see
    `regard.lab.tasks.weights.redraw`; pretrained hosts need "host". split: "test", "held" for the training images that
    are reserved for tuning, or "val" for the validation part. val: share of the training images that are validated on
    instead, drawn by val_seed; 0 = none. A part "val" beside the test of the user's own data takes the place of the
    share. limit: number of training and test images, 0 = all: the first ones, or evenly spaced ones of a set that is
    sorted by class, as folders are. cut: images keep their own size and are cropped to
    `size` (at random in training, at the centre in the test). corrupt: of your own folders, stop at an image that
    cannot be read, or skip it. download: torchvision's sets. class_weights: factor of each class in the loss, () = all
    1.
    Raises: ConfigError.
    """

    name: ClassVar[str] = "classification"
    reads_streams: ClassVar[bool] = True
    metric: ClassVar[str] = "top1"
    further: ClassVar[tuple[str, ...]] = ("loss",)
    part_name: ClassVar[str] = "val"
    example_data: ClassVar[str] = "digits-canvas"
    sets: ClassVar[Mapping[str, str]] = catalog.NAMED

    classes: int = 0
    init: Init = "zero"
    split: Literal["test", "held", "val"] = "test"
    limit: int = 0
    cut: bool = False
    corrupt: Literal["stop", "skip"] = "stop"
    download: bool = False
    class_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 0 or self.limit < 0:
            raise ConfigError(f"classes and limit are 0 or more, not {self.classes} and {self.limit}")
        if self.split == "val" and not self.val:
            raise ConfigError('split="val" needs a share of the training images: val is 0')
        if any(not weight >= 0 for weight in self.class_weights) or not any(self.class_weights or (1,)):
            raise ConfigError(f"class_weights are 0 or more, one of them more, not {self.class_weights}")
        if is_stream(self.data):
            self._check_stream()
        if is_pretrained(self.host) and self.init != "host":
            raise ConfigError(
                f'a pretrained host keeps its weights with init="host"; init={self.init!r} would lose them'
            )

    def _check_stream(self) -> None:
        """Raises: ConfigError for what needs single training images, which a stream does not have."""
        plain = {
            "val": (0.0, "name a test split of the stream with ?test=NAME"),
            "limit": (0, "make a folder of fewer images"),
            "split": ("test", "the test split is evaluated"),
            "corrupt": ("stop", "write the shards without damaged images"),
        }
        for name, (value, alternative) in plain.items():
            if getattr(self, name) != value:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not possible for a stream: {alternative}")

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        recipe = {"augment": "none"} if data.startswith("digits") else {}
        host = "vit_desk" if data in catalog.SIZES else "vit_desk(patch=16)"  # 196 tokens of an image of 224 pixels
        return {"task": {"host": host, "size": catalog.SIZES.get(data, (224, 224))}, "recipe": recipe}

    def check(self, recipe: Training) -> None:
        check_augment(recipe.augment)
        if self.data == "digits-canvas" and by_image(recipe.augment):
            raise ConfigError(
                f"augment={recipe.augment!r} takes single images, which digits-canvas places in whole batches: use one "
                f"of {', '.join(BATCHWISE)}"
            )

    def identity(self) -> "Classification":
        return dataclasses.replace(
            self, data=catalog.identity(self.data, self.digest, self._reserved), digest="", download=False, extra=()
        )

    def at_most(self, number: int) -> "Classification":
        """The same task with `limit` at most `number`."""
        return dataclasses.replace(self, limit=min(self.limit or number, number))

    def data_set(self) -> ImageSet:
        """The decoded data set. Raises: DataError."""
        image_set = self.read_data()
        if self.classes and self.classes < len(image_set.classes):
            raise DataError(f"{self.data} has {len(image_set.classes)} classes, the task allows {self.classes}")
        return image_set

    def read_data(self) -> ImageSet:
        """`data_set` with any number of classes."""
        return catalog.load(
            self.data, self.size, cut=self.cut, corrupt=self.corrupt, download=self.download, kind=self.digest,
            reserved=self._reserved,
        )  # fmt: skip

    @property
    def _reserved(self) -> bool:
        """Whether a part "val" of the user's own data is read: the validation part, in the place of the share `val`."""
        return bool(self.val) or self.split == "held"

    def train_images(self) -> Images:
        """The training split, at most `limit` images, without the validation part.

        Raises: ConfigError if that part has all images of a class, unless a limit leaves few of them.
        """
        image_set = self.data_set()
        images = self._limit_images(image_set.train)
        if not self.val or _own_part(image_set) is not None:
            return images
        part = images.take(self.divide(len(images))[0])
        lost = np.setdiff1d(images.labels, part.labels)
        if len(lost) and not self.limit:
            raise ConfigError(
                f"val={self.val:g} leaves no training image of class {image_set.classes[lost[0]]}: take a smaller "
                "share or another val_seed, or add images"
            )
        return part

    def test_images(self) -> Images:
        """The split that is evaluated, at most `limit` images. Raises: DataError without a "held" split."""
        image_set = self.data_set()
        if self.split == "val":
            return self._validation_images(image_set)
        images = image_set.test if self.split == "test" else image_set.held
        if images is None:
            part = 'split="val", the part of --val' if self.val else 'split="test"'
            raise DataError(f"{image_set.name} has no images reserved for tuning; use {part}")
        return self._limit_images(images)

    def _validation_images(self, image_set: ImageSet) -> Images:
        """The part of the training images that is not trained on; on a canvas each has one fixed position."""
        if (own := _own_part(image_set)) is not None:
            return self._limit_images(own)
        images = self._limit_images(image_set.train)
        images = images.take(self.divide(len(images))[1])
        if not image_set.canvas:
            return images
        return Images(place_on_canvas(images.pixels, self.size, generator("validation", self.val_seed)), images.labels)

    def _limit_images(self, images: Images) -> Images:
        """The first `limit` images; evenly spaced ones if the set is sorted by class."""
        number = len(images)
        if not self.limit or self.limit >= number:
            return images
        segments = 1 + int(np.count_nonzero(np.diff(images.labels)))
        if segments > len(np.unique(images.labels)):
            return images.take(slice(0, self.limit))
        return images.take(np.arange(self.limit) * number // self.limit)

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> nn.Module:
        outputs = self.outputs if record is None else self.classes or len(record["class_names"])
        channels = self.channels if record is None else len(record["normal"][0])
        colours = self.host_channels(channels)
        model = self.build(mixer, outputs, colours, removed)
        if mixer is None and not removed:  # a swap has checked the inputs already
            image = self.noise(1, colours)
            with explain_inputs(model, image), eval_mode(model):
                model(image)
        return model

    def host_channels(self, channels: int) -> int:
        """Input channels of the host for images of so many."""
        return channels

    def noise(self, number: int, colours: int) -> Tensor:
        """Random prepared images."""
        return torch.randn(number, colours, *self.size)

    @property
    def spelled_host(self) -> str:
        """The host, with what the task adds to its options."""
        return self.host

    def build(
        self, mixer: MixerConfig | None, outputs: int, colours: int, removed: bool = False, *, pretrained: bool = True
    ) -> nn.Module:
        """The host with these numbers of outputs and input channels, for images of `size` if it has such an option.

        Needs no data. The host's spelling has precedence for input channels and image size. pretrained: False ignores
        the pretrained weights that the host's spelling names.
        """
        host = self.spelled_host
        self._check_size(parse_host(host)[1])
        options = {"num_classes": outputs, **further_options(host, colours, pretrained)}
        model = build_host(host, mixer, self.size, self.extra, **options)
        return remove(model, ports=user_ports(self.extra)) if removed else model

    def _check_size(self, options: dict[str, Any]) -> None:
        """Check that a host spelled for one image size gets that size, unless it takes any. Raises: ConfigError."""
        sides = options.get("img_size", options.get("size"))
        sides = (sides, sides) if isinstance(sides, int) else sides
        if not isinstance(sides, tuple) or len(sides) != 2:
            return  # no size, or not one: the host raises an error
        if sides != tuple(self.size) and not options.get("dynamic_img_size") and options.get("strict_img_size", True):
            raise ConfigError(
                f"{self.host} takes images of {sides[0]}x{sides[1]}, the task has {self.size[0]}x{self.size[1]}; "
                "leave the size out of the host's spelling, or make them equal"
            )

    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        """As in `Task`. Augmentations of single images (`by_image`) are left out."""
        classes, channels = self.known_classes_and_channels()
        outputs = outputs or self.classes or classes
        model = self.build(mixer, outputs, self.host_channels(channels), removed, pretrained=False)
        colours = input_channels(model)
        channels = channels // self.host_channels(channels) * colours
        rng = np.random.default_rng(0)

        def loss(n: int) -> Tensor:
            labels = torch.from_numpy(rng.integers(0, outputs, n))
            if not augment or by_image(augment):
                return F.cross_entropy(model(self.noise(n, colours)).float(), labels)
            pixels = rng.integers(0, 256, (n, *self.size, channels), dtype=np.uint8)
            images = to_tensor(augment_batch(pixels, self.size, augment, False, rng))
            return F.cross_entropy(model(self.arrange(images.float() / 255)).float(), labels)

        return Trial(model, (self.noise(1, colours),), loss, lambda n: model(self.noise(n, colours)))

    def known_classes_and_channels(self) -> tuple[int, int]:
        """(classes, channels) of the data without reading them, as far as they are known."""
        return catalog.classes_and_channels(self.data)

    def arrange(self, images: Tensor) -> Tensor:
        """Images (n, C, h, w) as the host takes them."""
        return images

    def prepare(self, images: Tensor, device: torch.device, record: Record | None = None) -> Tensor:
        return self.arrange(super().prepare(images, device, record))

    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> Batches | StreamBatches:
        image_set, images = self.data_set(), self.train_images()
        check_parts(len(images), recipe.batch, part)
        devices, batch = part[1], min(recipe.batch, len(images))
        if (recipe.mixup or recipe.cutmix) and batch // devices % 2:
            error = ConfigError if devices == 1 else DeviceError
            raise error(f"mixup and cutmix need an even number of images on a device, not {batch // devices}")
        change = transform(recipe.augment, self.size, image_set.channels) if by_image(recipe.augment) else None
        if isinstance(images, Stream):
            return StreamBatches(images, self.size, recipe.batch, recipe.augment, seed, change, part)
        return Batches(images, self.size, recipe.batch, recipe.augment, seed, image_set.canvas, change, part)

    def usual_workers(self, recipe: Training) -> int:
        """As many as `loaders` says, if images are decoded when they are used."""
        train = self.data_set().train
        if not (isinstance(train, Stream) or isinstance(train.pixels, Lazy)):
            return 0
        return loaders(recipe.batch * 3 * self.size[0] * self.size[1] * (4 if by_image(recipe.augment) else 1))

    def own_statistics(self) -> Statistics:
        """As in `ImageTask`; ImageNet has the usual ones, and so have streams."""
        return NORMAL if self.data == "imagenet" or is_stream(self.data) else self.data_set().statistics

    def loss(
        self, model: nn.Module, batch: Samples, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """Cross-entropy. With a teacher: its mean with the cross-entropy to the classes that the teacher predicts for
        the same images, after mixup (hard distillation, DeiT Eq. 3, with one head)."""
        images, labels = self.prepare(batch[0], device), batch[1].to(device)
        weights = self._class_weights(device)
        has_zero = not all(self.class_weights)  # else there is nothing to ask the device
        if weights is not None and has_zero and not weights[labels].any():  # their mean would be 0 / 0
            return 0.0 * model(images).float().sum()
        if recipe.erasing:
            from timm.data.random_erasing import RandomErasing

            images = RandomErasing(recipe.erasing, mode="pixel", device=str(device))(images)
        if recipe.mixup or recipe.cutmix:
            from timm.data import Mixup

            options = {"label_smoothing": recipe.smoothing, "num_classes": self.outputs, "correct_lam": True}
            mixup = Mixup(recipe.mixup, recipe.cutmix, **options)
            with torch.device(device):
                images, targets = mixup(images, labels)
            scores = model(images).float()
            loss = _mixed_loss(scores, targets, weights, recipe.smoothing)
        else:
            scores = model(images).float()
            loss = F.cross_entropy(scores, labels, weights, label_smoothing=recipe.smoothing)
        if teacher is None:
            return loss
        with torch.no_grad():
            predicted = teacher(images).argmax(-1)
        return (loss + F.cross_entropy(scores, predicted)) / 2

    def _class_weights(self, device: torch.device) -> Tensor | None:
        """Raises: ConfigError if their number is not that of the outputs."""
        if not self.class_weights:
            return None
        if len(self.class_weights) != self.outputs:
            raise ConfigError(
                f"class_weights has {len(self.class_weights)} numbers, the task has {self.outputs} classes"
            )
        return torch.tensor(self.class_weights, device=device, dtype=torch.float32)

    def check_teacher(self, teacher: nn.Module, student: nn.Module) -> None:
        """Raises: ConfigError if its number of classes is not the task's."""
        with eval_mode(student), eval_mode(teacher):
            classes = student(*self.example())[0].numel()
            try:
                teacher_classes = teacher(*self.example())[0].numel()
            except (AssertionError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"the teacher takes no images of {'x'.join(map(str, self.size))}, the size of the task: {reason}"
                ) from error
        if teacher_classes != classes:
            raise ConfigError(
                f"the teacher has {teacher_classes} classes, the task has {classes}: train the teacher on this task"
            )

    @property
    def outputs(self) -> int:
        """Number of outputs of the host."""
        return self.classes or len(self.data_set().classes)

    def scores(self, model: nn.Module, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Class scores (B, classes) in float32 and labels (B,) of the test images, batch by batch, in their order."""
        return self._scores(model, device, self.test_images(), None)

    def _scores(
        self, model: nn.Module, device: torch.device, test: Images, record: Record | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        model.eval()
        for images, labels in evaluation_batches(test, self.size):
            with torch.inference_mode():
                scores = model(self.prepare(images, device, record)).float()
            yield scores, labels.to(device)

    def score(self, model: nn.Module, device: torch.device) -> Score:
        return top1_score(self.scores(model, device))

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """Score on other data with the same classes, normalised like the training images.

        The user's own, unless they are those of the training, may have fewer classes than the run, by their names, and
        a test split alone; all images are scored if they have no splits. Raises: DataError if there are other classes,
        or another number of channels.
        """
        parts = self._whole(data, record)
        if not parts:
            other = self.on(data).data_set()
            if other.divided:
                check_kept_test(data, other.name, record)
            self.check_fits(data, other, record)
            parts = [self._limit_images(other.test)]
        return top1_score(scores for part in parts for scores in self._scores(model, device, part, record))

    def _whole(self, data: str, record: Record) -> list[Images]:
        """The images of the user's own data that are scored, with the labels of the run; [] for those of the training,
        named sets and streams. Raises: DataError."""
        if data in catalog.NAMED or is_stream(data) or same_data(self.data, data):
            return []
        classes, scored = catalog.load_scored(data, self.size, self.corrupt, self.digest, str(record.get("name")))
        if scored is None:
            return []
        if len(record["normal"][0]) != 3:
            raise DataError(f"the run takes images of {len(record['normal'][0])} channels, {data} has 3")
        return [relabelled(data, scored, classes, record["class_names"])]

    @property
    def chance(self) -> float:
        return majority(self.test_images().labels)

    def example(self) -> tuple[Tensor]:
        images, _ = next(evaluation_batches(self.test_images().take(slice(0, 1)), self.size))
        return (self.prepare(images, torch.device("cpu")),)

    def record(self) -> dict[str, Any]:
        return self.record_of(len(self.train_images()), len(self.test_images()))

    def sample_counts(self) -> tuple[int, int]:
        counts = catalog.known_counts(self.data)
        if counts is None:
            return super().sample_counts()
        limit = self.limit or max(counts)
        train, test = min(counts[0], limit), min(counts[1], limit)
        validated = round(self.val * train)
        return train - validated, validated if self.split == "val" else test

    def predict(
        self, model: nn.Module, sources: Sequence[str | Path], device: torch.device, record: Record
    ) -> list[Prediction]:
        """For each image its five most probable classes: {"file", "label", "probability", "top"}."""
        channels, predictions = len(record["normal"][0]), []
        for source in sources:
            image = self.prepare(to_tensor(self.pixels(source, channels)[None]), device, record)
            with torch.inference_mode():
                scores = model(image)[0].float()
            predictions.append({"file": str(source), **best_classes(scores, record["class_names"])})
        return predictions

    def draw(self, source: str | Path, prediction: Mapping[str, Any]) -> Image:
        lines = [f"{item['label']} {100 * item['probability']:.0f} %" for item in prediction["top"][:3]]
        return add_caption(self.picture(source), lines)

    def picture(self, source: str | Path) -> np.ndarray:
        """The pixels (h, w, 3) on which predictions are drawn."""
        return self.pixels(source, 3)

    def pixels(self, source: str | Path, channels: int) -> np.ndarray:
        """A file's pixels (h, w, channels), cropped at the centre like the test images of the task's data."""
        pixels = read_image(source, catalog.size_before_centre(self.data, self.size, self.cut), channels)
        return centre(pixels[None], self.size)[0]


def _own_part(image_set: ImageSet) -> Images | None:
    """The part "val" of the user's own data."""
    return image_set.held if image_set.name.startswith("own:") else None


def _mixed_loss(
    scores: Float[Tensor, "B K"], targets: Float[Tensor, "B K"], weights: Float[Tensor, " K"] | None, smoothing: float
) -> Float[Tensor, ""]:
    """Cross-entropy to mixed and smoothed labels, divided by the labels' weights as torch does it for whole labels."""
    if weights is None:
        return -(targets * scores.log_softmax(-1)).sum(-1).mean()
    labels = (targets - smoothing / len(weights)) / (1 - smoothing)
    return -(targets * weights * scores.log_softmax(-1)).sum() / (labels @ weights).sum()
