"""Image classification on any set of `regard.tasks.data`, in any host that returns class scores."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import ConfigError, DataError, MixerConfig

from .base import Score, Task, Training
from .data.augment import check_augment
from .data.catalog import identity, load
from .data.feed import Batches, evaluation_batches
from .data.imagenet import NORMAL
from .data.images import Images, ImageSet
from .data.streams import number
from .weights import Init, redraw


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Top-1 accuracy of a host on images.

    classes: outputs of the host, 0 = as many as the set has. init: see `regard.tasks.weights.redraw`; pretrained hosts
    need "host". split: "test", or "held" for the rows kept back for tuning. limit: images of training and test that are
    used, 0 = all. cut: images keep their own size and windows of `size` are cut from them (random ones in training, the
    centre in the test). corrupt: stop at an image that cannot be read, or skip it. download: fetch torchvision's sets.
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
        if len(self.size) != 2 or min(self.size) < 1:
            raise ConfigError(f"size is (height, width) in pixels, not {self.size}")
        choices = (("init", ("zero", "fan_in", "host")), ("split", ("test", "held")), ("corrupt", ("stop", "skip")))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.classes < 0 or self.limit < 0:
            raise ConfigError(f"classes and limit are 0 or more, not {self.classes} and {self.limit}")
        if "pretrained=True" in self.host.replace(" ", "") and self.init != "host":
            raise ConfigError(
                f'a pretrained host keeps its weights with init="host"; init={self.init!r} would lose them'
            )

    def identity(self) -> "Classification":
        return dataclasses.replace(self, data=identity(self.data), download=False)

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
        return images.take(slice(0, self.limit)) if self.limit else images

    def model(self, mixer: MixerConfig | None, seed: int, removed: bool = False) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number("host", seed))
            model = self.network(mixer, removed)
            redraw(model, seed, self.init)
        return model

    def network(self, mixer: MixerConfig | None, removed: bool) -> nn.Module:
        """The host with the mechanism in it, as the host initialises it."""
        from regard.hosts.swap import remove

        if removed and mixer is not None:
            raise ConfigError(f"removed=True takes attention out; it goes with mixer=None, not {mixer}")
        found = self.images_of()
        options: dict[str, Any] = {"num_classes": self.classes or len(found.classes)}
        if "in_chans" not in self.host:
            options["in_chans"] = found.channels
        model = self.built(mixer, options)
        return remove(model) if removed else model

    def built(self, mixer: MixerConfig | None, options: dict[str, Any]) -> nn.Module:
        """The host with options, and with img_size where it takes that and its spelling does not say it."""
        from regard.hosts import swap

        given = swap.parse_host(self.host)[1]
        if "size" in given or "img_size" in given:
            self._check_size(given)
            return swap.build_host(self.host, mixer, **options)
        try:
            return swap.build_host(self.host, mixer, img_size=self.size, **options)
        except ConfigError as error:
            if "img_size" not in str(error.__cause__):
                raise
        return swap.build_host(self.host, mixer, **options)

    def _check_size(self, options: dict[str, Any]) -> None:
        """A host that is spelled for one size gets images of that size, unless it takes any."""
        sides = options.get("img_size", options.get("size"))
        sides = (sides, sides) if isinstance(sides, int) else tuple(sides or ())
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
        transform = self._transform(recipe.augment) if recipe.augment.startswith("timm") else None
        return Batches(images, self.size, recipe.batch, recipe.augment, seed, found.canvas, transform, part)

    def _transform(self, augment: str) -> Any:
        """timm's training transform with the auto-augment policy after the colon; its result is still 0 .. 255."""
        from timm.data import create_transform

        policy = augment.partition(":")[2] or None
        size = (self.images_of().channels, *self.size)
        return create_transform(size, is_training=True, auto_augment=policy, normalize=False)

    def batches(
        self, recipe: Training, seed: int, start: int, stop: int, workers: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return self._feed(recipe, seed, part).between(start, stop, workers)

    def prepared(self, images: Tensor, device: torch.device) -> Tensor:
        """uint8 (n, C, h, w) on the device as float32 with mean 0 and deviation 1 per channel.

        ImageNet and a pretrained host get ImageNet's mean and deviation, any other those of the training images.
        """
        usual = self.data == "imagenet" or "pretrained=True" in self.host.replace(" ", "")
        mean, std = NORMAL if usual else self.images_of().statistics
        scale = torch.tensor([mean, std], device=device)[..., None, None] * 255
        return (images.to(device, non_blocking=True).float() - scale[0]) / scale[1]

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
        model.eval()
        for images, labels in evaluation_batches(self.test_images(), self.size):
            with torch.inference_mode():
                scores = model(self.prepared(images, device)).float()
            yield scores, labels.to(device)

    def score(self, model: nn.Module, device: torch.device) -> Score:
        right, total = [], 0.0
        for scores, labels in self.scores(model, device):
            total += F.cross_entropy(scores, labels, reduction="sum").item()
            right.append((scores.argmax(-1) == labels).cpu().numpy())
        bits = np.concatenate(right)
        return Score({"top1": 100 * float(bits.mean()), "loss": total / len(bits)}, bits)

    @property
    def chance(self) -> float:
        counts = np.bincount(self.test_images().labels)
        return 100 * float(counts.max() / counts.sum())

    def example(self) -> Tensor:
        images, _ = next(evaluation_batches(self.test_images().take(slice(0, 1)), self.size))
        return self.prepared(images, torch.device("cpu"))

    def record(self) -> dict[str, Any]:
        found = self.images_of()
        sizes = {"train": len(self.train_images()), "test": len(self.test_images())}
        return {"name": found.name, "checksum": found.checksum, **sizes}
