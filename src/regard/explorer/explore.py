"""`regard.explore`: the explorer of a network in memory, in one call."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from regard.advice.distill import plan_of
from regard.advice.user_model import UserModel, as_user_model
from regard.core import DataError, Extra, MixerConfig
from regard.core.eval_mode import kept_modes
from regard.core.validation import check_arguments
from regard.explain.pictures import CREDITS, SAMPLES, sample_image
from regard.files.paths import user_path
from regard.images.clips import Clip
from regard.images.images import read_image
from regard.images.normalise import Statistics
from regard.mixers.spelling import spell
from regard.swapping.host_names import MIXER_CHILD
from regard.swapping.layer_plan import PlanSource
from regard.swapping.swap import swap

from .page import Page, Pixels, Shown, make_page


@check_arguments
def explore(
    model: nn.Module,
    picture: str | Path | Pixels | Any = "flower",
    plan: PlanSource | MixerConfig | None = None,
    *,
    layers: str = "*",
    size: tuple[int, int] | None = None,
    normal: Statistics | None = None,
    extra: Extra = (),
) -> Page:
    """A page on which one points at a place of a picture and sees where the model looks; a notebook shows it.

    picture: a file, pixels (h, w, channels) of the model's size, or a sample, "china" or "flower". plan: a
    mechanism, or a plan of layers, of a copy that is shown beside the model. layers: a glob on layer names. size:
    (height, width), None = the model's own. normal: (mean, deviation) of each channel, None = those of timm's
    configuration, else ImageNet's. The model is not changed. Raises: UnsupportedError if it has no weights between
    tokens; SwapError; DataError; ConfigError for other arguments.
    """
    data = {} if normal is None else {"normal": list(normal)}
    with kept_modes(model):
        user = as_user_model(model, type(model).__name__, size=size, data=data, extra=extra)
        pixels, credit = picture_of(user, picture)
        second = None if plan is None else swapped_copy(user, plan, extra)
        name = picture if isinstance(picture, str) else "picture"
        return make_page(user, {Path(name).name: pixels}, second, layers, credit)


def picture_of(user: UserModel, picture: str | Path | Pixels) -> tuple[Pixels, str]:
    """Pixels of the model's size and channels, and the credit of a sample. Raises: DataError."""
    credit = ""
    if not isinstance(picture, str | Path):
        pixels = np.asarray(picture)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, user.channels):
            raise DataError(
                "a picture is a file, a sample's name, or an array of uint8 (height, width, channels) in colour or "
                f"grey, not {pixels.dtype} {'x'.join(map(str, pixels.shape)) or type(picture).__name__}"
            )
    elif str(picture) in (*SAMPLES, "digit") and not Path(picture).is_file():
        credit = CREDITS[str(picture)]
        pixels = sample_image(user.size, grey=picture == "digit", name=str(picture))
    else:
        path = user_path(picture, DataError)
        if not path.exists():
            samples = ", ".join((*SAMPLES, "digit"))
            raise DataError(f"there is no image {picture}; give a file, or one of the samples {samples}")
        source = Clip(path, user.frames) if user.frames else path
        pixels = read_image(source, user.size, user.channels if user.frames or user.channels == 1 else 3)
    if user.frames and pixels.shape[-1] * user.frames == user.channels:
        pixels = np.tile(pixels, user.frames)  # a sample, which does not move
    if pixels.shape[-1] != user.channels:
        grey = pixels.mean(-1, keepdims=True).round().astype(np.uint8)
        pixels = grey.repeat(user.channels, -1)
    return pixels, credit


def swapped_copy(user: UserModel, plan: PlanSource | MixerConfig, extra: Extra = ()) -> Shown:
    """A copy of the model with a mechanism, or by a plan of layers.

    Its weights count as trained only if none is new. Raises: SwapError, ConfigError, StoreError.
    """
    network = copy.deepcopy(user.network)
    swap(network, plan_of(user, plan, extra), example=user.example, ports=user.ports)
    new = any(f".{MIXER_CHILD}." in f".{key}" for key in network.state_dict())
    label = spell(plan) if isinstance(plan, MixerConfig) else str(plan)
    return Shown(label, network.eval(), user.trained and not new)
