"""The user's model and images: what swap-check, distill and advise look at."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import ConfigError, DataError, Extra, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.files.paths import files_below, named_folder, printable, user_path
from regard.images.augment import centre
from regard.images.clips import Clip, clips_below, frames_apart
from regard.images.feed import to_tensor
from regard.images.imagenet import NORMAL
from regard.images.images import SUFFIXES, Images, read_image, size_before_crop
from regard.images.normalise import Statistics, normalise
from regard.models.catalog import user_ports
from regard.models.create import spell_host
from regard.models.hugging_face import FILE, is_of_transformers
from regard.models.named import named_network
from regard.models.saving import load, read_description
from regard.models.sizes import default_size_of, set_size, size_of
from regard.swapping.inspect import example_input, explain_inputs, input_shapes
from regard.swapping.layer import Ports

from .judges import Judge, choose
from .judges.choose import JudgeChoice

FEWEST_IMAGES = 16
"""Fewer say too little of a model."""
WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
"""Classes of models around a model, and where it is in them."""


@dataclass(frozen=True, eq=False)
class UserModel:
    """A model in evaluation mode and how its images are prepared.

    label: its name or folder, for pages and messages. size: (height, width) of its images; statistics: mean and
    deviation by which they are normalised. frames: of its clips, 0 = it takes images; a clip is an image of the
    channels of all its frames (`regard.images.clips`). frames_first: it takes (B, frames, C, H, W), else (B, C, frames,
    H, W). trained: whether the weights are trained, as far as is known. data: what is
    known of the data of its training, see `regard.save`. judge: a kind of output or a function, "" = by the output.
    """

    network: nn.Module
    label: str
    size: tuple[int, int]
    statistics: Statistics
    trained: bool = True
    ports: Ports = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    judge: JudgeChoice = ""
    frames: int = 0
    frames_first: bool = False

    @property
    def channels(self) -> int:
        """Of an image; of all frames of a clip."""
        return len(self.statistics[0])

    @property
    def says_normal(self) -> bool:
        """Whether the data, or the model itself, say how images are normalised."""
        network: Any = self.network
        config = getattr(network, "pretrained_cfg", None) or {}
        own = hasattr(getattr(network, "transform", None), "image_mean")
        return own or "normal" in self.data or bool(config.get("mean"))

    def preparation(self, how: str) -> str:
        """How its images are prepared, as a sentence. how: what changes the normalisation."""
        colours = self.channels // max(self.frames, 1)
        mean, std = (", ".join(f"{value:.3g}" for value in part[:colours]) for part in self.statistics)
        kind = f"clips of {self.frames} frames" if self.frames else "images"
        known = how if self.says_normal else f"assumed, as the model does not say it: {how}"
        return f"{self.label}: {kind} of {self.size[0]}x{self.size[1]}, mean {mean}, deviation {std} ({known})"

    @property
    def example(self) -> Tensor:
        """Zeros as it takes them."""
        return self._arrange(torch.zeros(1, self.channels, *self.size))

    @property
    def saveable(self) -> bool:
        """Whether `save` takes a changed copy: of `create_model`, a task of segmentation or transformers."""
        return "regard_host" in self.network.__dict__ or is_of_transformers(self.network)

    def judges(self) -> list[Judge]:
        """The judges of its outputs, the first of which decides. Raises: as `output`, and as `choose`."""
        return self.judges_of(self.output())

    def judges_of(self, output: Any) -> list[Judge]:
        """`judges` of what `output` returned."""
        classes = len(self.data.get("class_names") or ())
        return choose(output, self.example, self.network, self.judge, classes)

    def output(self) -> Any:
        """What the model returns for `example`.

        Raises: UnsupportedError if the model is compiled, wrapped or in half precision, or has no weights.
        """
        kind, first = type(self.network).__name__, next(self.network.parameters(), None)
        if first is None:
            raise UnsupportedError(f"{self.label} has no weights, so that there is nothing to replace or to learn")
        if kind in WRAPPERS:
            raise UnsupportedError(f"{self.label} is wrapped in {kind}: give the model inside it, .{WRAPPERS[kind]}")
        _check_dtype(self.network, self.label)
        example = self.example.to(first.device)
        with explain_inputs(self.network, example), eval_mode(self.network):
            return self.network(example)

    def prepare(self, images: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """uint8 images (n, C, H, W) as the model takes them: float32, normalised, on the device."""
        return self._arrange(normalise(images, self.statistics, torch.device(device)))

    def _arrange(self, images: Tensor) -> Tensor:
        return frames_apart(images, self.frames, self.frames_first) if self.frames else images


def _check_dtype(network: nn.Module, label: str) -> None:
    """Raises: UnsupportedError for weights of another type than float32."""
    first = next(network.parameters(), None)
    if first is not None and first.is_floating_point() and first.dtype != torch.float32:
        raise UnsupportedError(f"the weights of {label} are {first.dtype}: give it in float32, model.float()")


def load_user_model(
    text: str, *, size: tuple[int, int] | None = None, pretrained: bool = False, weights: str = "",
    normal: Statistics | None = None, judge: JudgeChoice = "", extra: Extra = (),
) -> UserModel:  # fmt: skip
    """The model of a folder that `save` wrote, or of the words that `named_network` takes.

    size: (height, width) of images, None = the model's own. pretrained, weights: as in `named_network`. normal: mean
    and deviation of each channel, None = what the model or its folder says. judge: as in `UserModel`.
    Raises: ConfigError for an unknown name or a size that the model does not take, StoreError for a damaged folder.
    """
    given = {} if normal is None else {"normal": list(normal)}
    folder = named_folder(text)
    if folder is not None and (folder / FILE).exists() and not (folder / "model.json").exists():
        text, folder = f"hf:{folder}", None
    if folder is not None:
        check_no_weights(text, pretrained or bool(weights))
        data = {**read_description(folder).get("data", {}), **given}
        return as_user_model(load(folder, extra).float(), text, size=size, data=data, judge=judge, extra=extra)
    named = named_network(text, weights=weights, size=size, pretrained=pretrained, extra=extra)
    own = size is not None and ":" not in text and size == size_of(text, extra)
    return as_user_model(
        named.network, named.label, size=size, data={**named.data, **given}, trained=named.trained, checked=own,
        judge=judge, extra=extra,
    )  # fmt: skip


def check_no_weights(text: str, pretrained: bool) -> None:
    """Raises: ConfigError if published weights are asked for a model that has its own."""
    if pretrained:
        raise ConfigError(f"{text} has trained weights of its own: leave --pretrained and --weights out")


def as_user_model(
    network: nn.Module, text: str, *, size: tuple[int, int] | None = None, data: Mapping[str, Any] | None = None,
    trained: bool = True, checked: bool = False, judge: JudgeChoice = "", extra: Extra = (),
) -> UserModel:  # fmt: skip
    """A network with the size of its images and their normalisation: that of `data` or of its file (`regard.save`),
    else timm's.

    text: its name or folder. checked: its patches divide images of that size. Raises: ConfigError.
    """
    network, data = network.eval(), {**network.__dict__.get("regard_data", {}), **(data or {})}
    _check_dtype(network, text)
    example = example_input(network, default=default_size_of(network, text, extra))
    if example.ndim not in (4, 5) or not example.is_floating_point():
        raise UnsupportedError(f"{text} takes {tuple(example.shape)} {example.dtype}, no images")
    frames_first = example.ndim == 5 and is_of_transformers(network)
    colours, frames = example.shape[1 + frames_first], example.shape[2 - frames_first] if example.ndim == 5 else 0
    if size is not None:
        if tuple(example.shape[-2:]) != size:
            network = copy.deepcopy(network)  # the caller's keeps its size
            example = _resize(network, example, size)
        if not checked:  # some of timm's own sizes lose a border
            _check_patches(network, example)
    mean, deviation = data.get("normal") or usual_normal(network, colours)
    if frames and len(mean) == colours:
        mean, deviation = list(mean) * frames, list(deviation) * frames
    if {len(mean), len(deviation)} != {colours * max(frames, 1)}:
        given = " and ".join(map(str, dict.fromkeys((len(mean), len(deviation)))))
        raise ConfigError(f"mean and deviation are of {given} channels, images of {text} have {colours}")
    with explain_inputs(network, example), torch.no_grad():
        network(example)
    height, width = example.shape[-2:]
    return UserModel(
        network, _label(network, text), (height, width), (mean, deviation), trained, user_ports(extra), data, judge,
        frames, frames_first,
    )  # fmt: skip


def _label(network: nn.Module, text: str) -> str:
    """The text, with the host's spelling where it names a folder or a run."""
    record = network.__dict__.get("regard_host")
    host = "" if record is None else spell_host(*record)
    return text if host == text or not host or ":" in text else f"{host.partition('(')[0]} ({Path(text).name})"


def usual_normal(network: nn.Module, channels: int) -> Statistics:
    """What timm's configuration of the model names, else ImageNet's; averaged where the number of channels differs.

    0 and 1 for torchvision's detectors, which normalise images themselves.
    """
    if hasattr(getattr(network, "transform", None), "image_mean"):
        return [0.0] * channels, [1.0] * channels
    config = getattr(network, "pretrained_cfg", None) or {}
    mean, std = (list(config.get(name) or usual) for name, usual in zip(("mean", "std"), NORMAL, strict=True))
    if len(mean) != channels:
        mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
    return mean, std


def _resize(network: nn.Module, example: Tensor, size: tuple[int, int]) -> Tensor:
    """An example of another size, for a model whose position embedding can be resized. Raises: ConfigError."""
    if min(size) < 1:
        raise ConfigError(f"images have a height and a width of at least 1, not {size}")
    example = torch.zeros(*example.shape[:-2], *size)
    with explain_inputs(network, example):
        set_size(network, size)
    return example


def _check_patches(network: nn.Module, example: Tensor) -> None:
    """Raises: ConfigError if the patches of a model do not divide its images, so that it would not see their border."""
    size = (example.shape[-2], example.shape[-1])
    patches = {
        name: part
        for name, part in network.named_modules()
        if isinstance(part, nn.Conv2d) and part.kernel_size == part.stride and part.padding in ((0, 0), "valid")
    }
    with explain_inputs(network, example):
        shapes = input_shapes(network, patches, example)
    for name, shape in shapes.items():
        sides = patches[name].stride
        if tuple(shape[-2:]) != size or not any(n % side for n, side in zip(size, sides, strict=True)):
            continue
        below = [max(n // side, 1) * side for n, side in zip(size, sides, strict=True)]
        above = [-(-n // side) * side for n, side in zip(size, sides, strict=True)]
        given, small, large, patch = ("x".join(map(str, pair)) for pair in (size, below, above, sides))
        nearest = large if small == large else f"{small} or {large}"
        raise ConfigError(f"images of {given} are not divided by the {patch} patches of {name}; nearest: {nearest}")


def read_user_images(
    data: str, size: tuple[int, int], channels: int, limit: int, frames: int = 0
) -> tuple[Images, list[str]]:
    """At most `limit` evenly spaced images of a folder, flat or nested; labels are never read.

    frames: of clips, which are read in their place; 0 = images.
    Returned are the pixels (n, H, W, C), and a sentence for each image that cannot be read and is left out.
    Raises: DataError if fewer than `FEWEST_IMAGES` can be read, or all are equal.
    """
    folder = user_path(data, DataError)
    if not folder.is_dir():
        raise DataError(f"{data} is no folder of images and no named set; expected a folder, flat or nested")
    sources: Sequence[Path | Clip] = files_below(folder, SUFFIXES)
    if frames:
        sources = [Clip(path, frames) for path in clips_below(folder)]
    readable: list[np.ndarray] = []
    damaged: list[str] = []
    for row in evenly_spaced(len(sources), limit):
        try:
            image = read_image(sources[row], size_before_crop(size), channels)
        except DataError as error:
            damaged.append(printable(str(error)))
        else:
            readable.append(centre(image[None], size)[0])
    if len(readable) < FEWEST_IMAGES:
        kind = "clips (folders of frames, or videos)" if frames else f"images ({', '.join(sorted(SUFFIXES))})"
        raise DataError(
            f"{data} has {len(readable)} readable {kind}; at least "
            f"{FEWEST_IMAGES} are needed{'; ' + damaged[0] if damaged else ''}"
        )
    if all(np.array_equal(image, readable[0]) for image in readable):
        raise DataError(f"all {len(readable)} images of {data} are equal at {size[0]}x{size[1]}: give different ones")
    return Images(np.stack(readable), np.zeros(len(readable), np.int64)), damaged


def evenly_spaced(number: int, limit: int) -> list[int]:
    """At most `limit` of `number` rows."""
    kept = min(limit, number)
    return [row * number // kept for row in range(kept)]


def sample_images(images: Images, size: tuple[int, int], channels: int, limit: int) -> Images:
    """At most `limit` evenly spaced images of a set, with another number of channels where the model asks for it."""
    sides = images.pixels.shape[1:3]
    if not len(images) or min(a - b for a, b in zip(sides, size, strict=True)) < 0:
        raise DataError(
            f"{len(images)} images of {sides[0]}x{sides[1]} pixels: at least one is needed, and none smaller than the "
            f"{size[0]}x{size[1]} of the model"
        )
    rows = evenly_spaced(len(images), limit)
    pixels = _as_channels(np.asarray(images.pixels[np.asarray(rows)]), channels)
    return Images(centre(pixels, size), np.zeros(len(rows), np.int64))


def _as_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Grey images as colour ones, or the other way round."""
    if pixels.shape[-1] == channels:
        return pixels
    return pixels.mean(-1, keepdims=True).round().astype(np.uint8).repeat(channels, -1)


def split_images(images: Images) -> tuple[Images, Images]:
    """(to learn from, to judge by): every fourth image is in the second part, or more: `FEWEST_IMAGES` // 2 at least.

    Raises: DataError for fewer than two images.
    """
    if len(images) < 2:
        raise DataError(f"{len(images)} images cannot be parted in some to learn from and some to judge by: give more")
    step = max(2, min(4, 2 * len(images) // FEWEST_IMAGES))
    judged = np.arange(len(images)) % step == step - 1
    return images.take(np.flatnonzero(~judged)), images.take(np.flatnonzero(judged))


def tensors(images: Images) -> Tensor:
    """uint8 (n, C, H, W)."""
    return to_tensor(images.pixels)
