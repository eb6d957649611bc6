"""`regard.recommend` and `regard.distill`: advice for a network in memory, in one call."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.utils.data import DataLoader

from regard.core import DataError, Extra, MixerConfig
from regard.core.eval_mode import kept_modes
from regard.core.validation import check_arguments
from regard.files.paths import user_path
from regard.images.augment import centre
from regard.images.clips import frames_joined
from regard.images.images import Images
from regard.images.normalise import Statistics
from regard.swapping.layer_plan import PlanSource

from . import recommend as recommending
from .answer import Question, Recommendation
from .distill import Distilled, distill_model
from .judges.choose import JudgeChoice
from .learning import Distillation
from .search import read_budget
from .user_model import UserModel, as_user_model, read_user_images, sample_images

ImageSource = str | Path | UInt8[np.ndarray, "n *frames h w c"] | DataLoader[Any]
"""A folder of images, flat or nested; their pixels, of which the centre is used; or a DataLoader, whose
batches are images (n, C, H, W) or have them first or as "pixel_values". Labels are not needed. For a model of clips:
clips, and batches as the model takes them."""
IMAGES = 400
"""That are used at most."""


@check_arguments
def recommend(
    model: nn.Module, images: ImageSource, budget: str = "latency=0.8x", *, mixers: Sequence[MixerConfig] = (),
    minutes: float = 15.0, size: tuple[int, int] | None = None, normal: Statistics | None = None,
    judge: JudgeChoice = "", folder: str | Path | None = None, report: Callable[[str], None] | None = None,
    extra: Extra = (),
) -> Recommendation:  # fmt: skip
    """Which attention at which layer changes a model's output least within a budget, measured on this machine.

    images: 400 of a folder at most. budget: "latency=0.7x", "memory=0.5x" or "macs=0.6x" of what the model needs.
    mixers: to try, () = five mechanisms and none. size: (height, width) of images, None = the model's own. normal:
    (mean, deviation) of each channel, None = those that `regard.save` kept, else of timm's configuration, else
    ImageNet's, with a warning, or a line of the report. judge: of the output,
    "scores", "classes", "map", "embedding", "tokens" or "boxes", "" = by the output itself; or a function of the old
    and the new output that gives a distance for each image. folder, report: as in
    `regard.advice.recommend.recommend`. `result.best.spelling` is a plan that `regard.swap` and `regard.distill` take.
    Raises: as `regard.advice.recommend.recommend`; DataError for images that cannot be read.
    """
    question = Question(budget=read_budget(budget), mixers=tuple(mixers), minutes=minutes)
    with kept_modes(model):
        user, pictures = _inputs(model, images, size, normal, judge, report, extra)
        return recommending.recommend(user, pictures, question, folder=_path(folder), report=report)


@check_arguments
def distill(
    model: nn.Module, plan: PlanSource | MixerConfig, images: ImageSource, *, steps: int = 200, output_steps: int = 400,
    lr: float = 1e-3, batch: int = 16, size: tuple[int, int] | None = None, normal: Statistics | None = None,
    judge: JudgeChoice = "", folder: str | Path | None = None, report: Callable[[str], None] | None = None,
    extra: Extra = (),
) -> Distilled:  # fmt: skip
    """Swap a copy of a model by a plan, or by one mechanism in all layers, and teach it what the model did.

    steps: in which each layer learns its predecessor's output; output_steps: in which the whole model then learns the
    output, at most at a tenth of lr: short trials choose the rate, and a step that leads away from the original is left
    out. images, size, normal, judge: as in `recommend`. folder: of the saved model and, until then,
    of the state from which the same call goes on. `result.model` is the new model.
    Raises: as `regard.advice.distill.distill_model`; DataError for images that cannot be read.
    """
    layers, outputs = (
        Distillation(steps=number, lr=rate, batch=batch) for number, rate in ((steps, lr), (output_steps, lr / 10))
    )
    with kept_modes(model):
        user, pictures = _inputs(model, images, size, normal, judge, report, extra)
        return distill_model(user, plan, pictures, layers, outputs, _path(folder), extra=extra, report=report)


def _path(folder: str | Path | None) -> Path | None:
    return None if folder is None else user_path(folder)


def _inputs(
    model: nn.Module, images: ImageSource, size: tuple[int, int] | None, normal: Statistics | None, judge: JudgeChoice,
    report: Callable[[str], None] | None, extra: Extra,
) -> tuple[UserModel, Images]:  # fmt: skip
    data = {} if normal is None else {"normal": normal}
    user = as_user_model(model, type(model).__name__, size=size, data=data, judge=judge, extra=extra)
    if report is not None:
        report(user.preparation("normal=(mean, std)"))
    elif "normal" not in user.data and not isinstance(images, DataLoader):  # whose images would not fit
        warnings.warn(user.preparation("normal=(mean, std)"), stacklevel=4)
    if isinstance(images, np.ndarray):
        allowed = {user.channels} if user.frames else {1, 3, user.channels}
        if user.frames and images.ndim == 5:  # (n, frames, h, w, channels)
            images = np.concatenate(list(images.swapaxes(0, 1)), -1)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in allowed:
            raise DataError(
                f"images are pixels (n, h, w, channels) of uint8 with {user.channels} channels, not {images.shape} of "
                f"{images.dtype}"
            )
        pictures = Images(images, np.zeros(len(images), np.int64))
        return user, sample_images(pictures, user.size, user.channels, len(images))
    if isinstance(images, DataLoader):
        return user, sample_images(_load_images(images, user), user.size, user.channels, IMAGES)
    pictures, damaged = read_user_images(str(images), user.size, user.channels, IMAGES, user.frames)
    for line in damaged:
        (report or warnings.warn)(f"left out: {line}")
    return user, pictures


def _load_images(loader: DataLoader[Any], user: UserModel) -> Images:
    """The first images of a loader as pixels. Raises: DataError for batches without images, or other normalisation."""
    batches: list[np.ndarray] = []
    for batch in loader:
        if isinstance(batch, Mapping):
            images = batch.get("pixel_values")
        else:
            images = next(iter(batch), None) if isinstance(batch, tuple | list) else batch
        if not isinstance(images, Tensor) or images.layout is not torch.strided or images.is_meta:
            images = torch.empty(0)
        if user.frames and images.ndim == 5:
            images = frames_joined(images, user.frames_first)
        if images.ndim != 4 or images.shape[1] != user.channels or 0 in images.shape[2:]:
            what = f"has shape {tuple(images.shape)}" if images.numel() else f"is a {type(batch).__name__}"
            raise DataError(
                f"a batch of the loader has no images (n, {user.channels}, h, w): it {what}; give a tensor, a tuple "
                "with it first, or a mapping with pixel_values"
            )
        if images.shape[-2] < user.size[0] or images.shape[-1] < user.size[1]:
            raise DataError(
                f"the loader has images of {images.shape[-2]}x{images.shape[-1]} pixels, fewer than the "
                f"{user.size[0]}x{user.size[1]} of the model: give larger ones, or size="
            )
        if len(images):
            batches.append(centre(_pixels(images, user.statistics), user.size))
        if sum(map(len, batches)) >= IMAGES:
            break
    if not batches:
        raise DataError("the loader has no batch: give one with images")
    pixels = np.concatenate(batches)
    return Images(pixels, np.zeros(len(pixels), np.int64))


def _pixels(images: Tensor, statistics: Statistics) -> UInt8[np.ndarray, "n h w c"]:
    """Images of a loader, uint8 or normalised by the statistics, as pixels. Raises: DataError."""
    if images.dtype != torch.uint8:
        mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in statistics)
        values = images.detach().cpu().float() * std + mean
        if not values.isfinite().all():
            raise DataError("the loader has images with values that are not finite: leave them out")
        if not -0.02 <= float(values.min()) <= float(values.max()) <= 1.02:
            raise DataError(
                "the images of the loader are not normalised by the mean and deviation of the model: give those of "
                "your transforms, normal=(mean, std); ([0, 0, 0], [1, 1, 1]) for images between 0 and 1"
            )
        images = (values * 255).round().clamp(0, 255).to(torch.uint8)
    return images.cpu().permute(0, 2, 3, 1).numpy()
