"""Image classification on any set of `regard.tasks.data`, in any host that returns class scores."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import ConfigError, DataError, MixerConfig
from regard.core.eval_mode import resting
from regard.models.create import build_sized, create_model, parse_host
from regard.swapping.inspect import taking
from regard.swapping.swap import remove
from regard.tasks.data.augment import by_image, check_augment, transform
from regard.tasks.data.catalog import identity, load
from regard.tasks.data.feed import Batches, evaluation_batches
from regard.tasks.data.imagenet import NORMAL
from regard.tasks.data.images import Images, ImageSet
from regard.tasks.data.streams import number

from .base import Score, Task, Training
from .weights import Init, redraw


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Top-1 accuracy of a host on images.

    classes: outputs of the host, 0 = as many as the set has. init: see `regard.tasks.weights.redraw`; pretrained hosts
    need "host". split: "test", or "held" for the rows kept back for tuning. limit: images of training and test that are
    used, 0 = all: the first, or evenly spread ones of a set that lies sorted by class, as folders do. cut: images keep
    their own size and windows of `size` are cut from them (random ones in training, the centre in the test). corrupt:
    stop at an image that cannot be read, or skip it. download: fetch torchvision's sets.
    Raises: ConfigError.
    """

    metric: ClassVar[str] = "top1"

    classes: int = 0
    init: Init = "zero"
    split: Literal["test", "held"] = "test"
    limit: int = 0
    cut: bool = False
    corrupt: Literal["stop", "skip"] = "stop"
    download: bool = False

    def __post_init__(self) -> None:
        for name in ("host", "data"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is a name or a spelling, not {getattr(self, name)!r}")
        if (
            not isinstance(self.size, tuple)
            or len(self.size) != 2
            or not all(isinstance(side, int) and side > 0 for side in self.size)
        ):
            raise ConfigError(f"size is (height, width) in whole pixels, not {self.size}")
        choices = (("init", ("zero", "fan_in", "host")), ("split", ("test", "held")), ("corrupt", ("stop", "skip")))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.classes < 0 or self.limit < 0:
            raise ConfigError(f"classes and limit are 0 or more, not {self.classes} and {self.limit}")
        if self._pretrained and self.init != "host":
            raise ConfigError(
                f'a pretrained host keeps its weights with init="host"; init={self.init!r} would lose them'
            )

    def identity(self) -> "Classification":
        return dataclasses.replace(self, data=identity(self.data), download=False)

    def at_most(self, number: int) -> "Classification":
        """The same task on at most so many training and test images, as `limit` takes them."""
        return dataclasses.replace(self, limit=min(self.limit or number, number))

    def images_of(self) -> ImageSet:
        """The decoded set. Raises: DataError."""
        found = load(self.data, self.size, cut=self.cut, corrupt=self.corrupt, download=self.download)
        if self.classes and self.classes < len(found.classes):
            raise DataError(f"{found.name} has {len(found.classes)} classes, the task allows {self.classes}")
        return found

    def train_images(self) -> Images:
        """The training split, as far as `limit` goes."""
        return self._limited(self.images_of().train)

    def test_images(self) -> Images:
        """The split that is evaluated. Raises: DataError if rows for tuning are asked for and none are kept back."""
        found = self.images_of()
        images = found.test if self.split == "test" else found.held
        if images is None:
            raise DataError(f'{found.name} keeps no rows back for tuning; use split="test"')
        return self._limited(images)

    def _limited(self, images: Images) -> Images:
        """The first `limit` images, or as many evenly spread ones where every class lies in one piece."""
        number = len(images)
        if not self.limit or self.limit >= number:
            return images
        pieces = 1 + int(np.count_nonzero(np.diff(images.labels)))
        if pieces > len(np.unique(images.labels)):
            return images.take(slice(0, self.limit))
        return images.take(np.arange(self.limit) * number // self.limit)

    def model(self, mixer: MixerConfig | None, seed: int, removed: bool = False) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number("host", seed))
            model = self.network(mixer, removed)
            redraw(model, seed, self.init)
        return model

    def network(self, mixer: MixerConfig | None, removed: bool) -> nn.Module:
        """The host with the mechanism in it, as the host initialises it."""
        if removed and mixer is not None:
            raise ConfigError(f"removed=True takes attention out; it goes with mixer=None, not {mixer}")
        found = self.images_of()
        model = self.built(mixer, self.outputs, found.channels, removed)
        if mixer is None and not removed:  # a swap has looked already
            image = torch.zeros(1, found.channels, *self.size)
            with taking(model, image), resting(model):
                model(image)
        return model

    def built(
        self, mixer: MixerConfig | None, outputs: int, channels: int, removed: bool = False, *, pretrained: bool = True
    ) -> nn.Module:
        """Input channels and img_size only where the host's spelling does not say them."""
        given = parse_host(self.host)[1]
        options: dict[str, Any] = {"num_classes": outputs}
        if "in_chans" not in given:
            options["in_chans"] = channels
        if "pretrained" in given and not pretrained:
            options["pretrained"] = False
        if "size" in given or "img_size" in given:
            self._check_size(given)
            model = create_model(self.host, mixer, **options)
        else:
            model = build_sized(self.host, mixer, self.size, **options)
        return remove(model) if removed else model

    def _check_size(self, options: dict[str, Any]) -> None:
        """A host that is spelled for one size gets images of that size, unless it takes any."""
        sides = options.get("img_size", options.get("size"))
        sides = (sides, sides) if isinstance(sides, int) else sides
        if not isinstance(sides, tuple) or len(sides) != 2:
            return  # of a wrong kind, which the host refuses
        if sides != tuple(self.size) and not options.get("dynamic_img_size") and options.get("strict_img_size", True):
            raise ConfigError(
                f"{self.host} takes images of {sides[0]}x{sides[1]}, the task has {self.size[0]}x{self.size[1]}; "
                "leave the size out of the host's spelling, or make both equal"
            )

    def batches_per_epoch(self, recipe: Training) -> int:
        return self._feed(recipe, 0).per_epoch

    def _feed(self, recipe: Training, seed: int, part: tuple[int, int] = (0, 1)) -> Batches:
        check_augment(recipe.augment)
        found, images = self.images_of(), self.train_images()
        share, rest = divmod(min(recipe.batch, len(images)), part[1])
        if rest:
            raise ConfigError(f"a batch of {min(recipe.batch, len(images))} cannot be cut into {part[1]} equal parts")
        if (recipe.mixup or recipe.cutmix) and share % 2:
            raise ConfigError(f"mixup and cutmix need an even number of images on a device, not {share}")
        change = transform(recipe.augment, self.size, found.channels) if by_image(recipe.augment) else None
        return Batches(images, self.size, recipe.batch, recipe.augment, seed, found.canvas, change, part)

    def batches(
        self, recipe: Training, seed: int, start: int, stop: int, workers: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return self._feed(recipe, seed, part).between(start, stop, workers)

    def prepared(self, images: Tensor, device: torch.device, record: Mapping[str, Any] | None = None) -> Tensor:
        """uint8 (n, C, h, w) on the device as float32, with mean 0 and deviation 1 per channel by `statistics`."""
        return normalised(images, self.statistics(record), device)

    def statistics(self, record: Mapping[str, Any] | None = None) -> tuple[list[float], list[float]]:
        """Mean and deviation per channel, of pixels between 0 and 1, that images are normalised with.

        A pretrained host gets those of its weights (their average for grey images), others on ImageNet the usual ones,
        and any other host those of the training images. record: what `record()` gave when a network was trained, which
        decides; what an old one does not hold is asked of the data.
        """
        if known := (record or {}).get("normal"):
            return known[0], known[1]
        if self._pretrained:
            return expected(self.host, self.images_of().channels)
        return NORMAL if self.data == "imagenet" else self.images_of().statistics

    @property
    def _pretrained(self) -> bool:
        if "pretrained" not in self.host:
            return False
        from regard.models.create import parse_host  # brings timm

        return bool(parse_host(self.host)[1].get("pretrained"))

    def loss(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        recipe: Training,
        device: torch.device,
        teacher: nn.Module | None = None,
    ) -> Tensor:
        """Cross-entropy. With a teacher: the mean of that and of the cross-entropy to the teacher's choice for the same
        images, mixed ones included (hard distillation, DeiT Eq. 3, on one head)."""
        images, labels = self.prepared(batch[0], device), batch[1].to(device)
        if recipe.erasing:
            from timm.data.random_erasing import RandomErasing

            images = RandomErasing(recipe.erasing, mode="pixel", device=str(device))(images)
        if recipe.mixup or recipe.cutmix:
            from timm.data import Mixup

            how = {"label_smoothing": recipe.smoothing, "num_classes": self.outputs, "correct_lam": True}
            mixup = Mixup(recipe.mixup, recipe.cutmix, **how)
            with torch.device(device):
                images, targets = mixup(images, labels)
            scores = model(images).float()
            loss = -(targets * scores.log_softmax(-1)).sum(-1).mean()
        else:
            scores = model(images).float()
            loss = F.cross_entropy(scores, labels, label_smoothing=recipe.smoothing)
        if teacher is None:
            return loss
        with torch.no_grad():
            chosen = teacher(images).argmax(-1)
        return (loss + F.cross_entropy(scores, chosen)) / 2

    @property
    def outputs(self) -> int:
        """Classes that the host tells apart."""
        return self.classes or len(self.images_of().classes)

    def scores(self, model: nn.Module, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Class scores (B, classes) in float32 and labels (B,) of the test images, batch by batch, in their order."""
        return self._scores(model, device, self.test_images(), self.statistics())

    def _scores(
        self, model: nn.Module, device: torch.device, test: Images, statistics: tuple[list[float], list[float]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        model.eval()
        for images, labels in evaluation_batches(test, self.size):
            with torch.inference_mode():
                scores = model(normalised(images, statistics, device)).float()
            yield scores, labels.to(device)

    def score(self, model: nn.Module, device: torch.device) -> Score:
        return _judged(self.scores(model, device))

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Mapping[str, Any]) -> Score:
        """Score on the test images of other data with the same classes, normalised as those of the training were.

        Raises: DataError if the classes, their names, or the channels are others.
        """
        other = self.on(data).images_of()
        mean, std = self.statistics(record)
        if digest(other.classes) != (record.get("classes") or digest(self.images_of().classes)):
            some = f"{', '.join(other.classes[:5])}{', ...' if len(other.classes) > 5 else ''}"
            raise DataError(
                f"{data} has other classes ({len(other.classes)}: {some}) than the data that the run learned from; "
                "name its class folders like those"
            )
        if other.channels != len(mean):
            raise DataError(f"the run takes images of {_channels(len(mean))}, {data} has {_channels(other.channels)}")
        return _judged(self._scores(model, device, self._limited(other.test), (mean, std)))

    @property
    def chance(self) -> float:
        counts = np.bincount(self.test_images().labels)
        return 100 * float(counts.max() / counts.sum())

    def example(self) -> Tensor:
        images, _ = next(evaluation_batches(self.test_images().take(slice(0, 1)), self.size))
        return self.prepared(images, torch.device("cpu"))

    def record(self) -> dict[str, Any]:
        """Also classes, a digest of their names, and normal, the mean and deviation that images are normalised with."""
        found = self.images_of()
        sizes = {"train": len(self.train_images()), "test": len(self.test_images())}
        known = {"classes": digest(found.classes), "normal": [list(part) for part in self.statistics()]}
        return {"name": found.name, "checksum": found.checksum, **sizes, **known}


@lru_cache(maxsize=16)
def expected(host: str, channels: int) -> tuple[list[float], list[float]]:
    """Mean and deviation per channel that the weights of a pretrained host were trained with, averaged for one channel.

    The host is built without weights and memory to be asked. ImageNet's where it does not say.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        known = getattr(create_model(host, None, pretrained=False), "pretrained_cfg", None) or {}
    mean, std = (list(known.get(name) or usual) for name, usual in zip(("mean", "std"), NORMAL, strict=True))
    if len(mean) == channels:
        return mean, std
    return [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels


def normalised(images: Tensor, statistics: tuple[list[float], list[float]], device: torch.device) -> Tensor:
    """uint8 (n, C, h, w) as float32 on the device, less the mean and divided by the deviation of each channel."""
    scale = torch.tensor(statistics, device=device)[..., None, None] * 255
    return (images.to(device, non_blocking=True).float() - scale[0]) / scale[1]


def _judged(scores: Iterator[tuple[Tensor, Tensor]]) -> Score:
    right, total = [], 0.0
    for found, labels in scores:
        total += F.cross_entropy(found, labels, reduction="sum").item()
        right.append((found.argmax(-1) == labels).cpu().numpy())
    bits = np.concatenate(right)
    return Score({"top1": 100 * float(bits.mean()), "loss": total / len(bits)}, bits)


def digest(names: Sequence[str]) -> str:
    """12 hex digits of the names of classes, in their order."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]


def _channels(number: int) -> str:
    return "1 channel (grey)" if number == 1 else f"{number} channels"
