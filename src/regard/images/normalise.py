"""Normalisation of images: shared by the tasks on images."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Extra
from regard.models.create import create_model, parse_host

from .imagenet import NORMAL

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation per channel, of pixels between 0 and 1."""


def is_pretrained(host: str) -> bool:
    """Whether a host's spelling asks for published weights."""
    return "pretrained" in host and bool(parse_host(host)[1].get("pretrained"))


@lru_cache(maxsize=16)
def pretrained_statistics(host: str, channels: int, extra: Extra = ()) -> Statistics:
    """Mean and deviation per channel with which a pretrained host was trained, averaged for one channel.

    They are read from the host, built without weights on the meta device; ImageNet's if it has none.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        config = getattr(create_model(host, None, extra=extra, pretrained=False), "pretrained_cfg", None) or {}
    mean, std = (list(config.get(name) or usual) for name, usual in zip(("mean", "std"), NORMAL, strict=True))
    if len(mean) == channels:
        return mean, std
    return [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels


def normalise(images: Tensor, statistics: Statistics, device: torch.device) -> Tensor:
    """uint8 (n, C, h, w) as float32 on the device, minus the mean and divided by the deviation of each channel."""
    scale = torch.tensor(statistics, device=device)[..., None, None] * 255
    return (images.to(device, non_blocking=True).float() - scale[0]) / scale[1]


class Renormalised(nn.Module):
    """A model of images with its own statistics, given images that were normalised with others."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, given: Statistics, own: Statistics) -> None:
        super().__init__()
        self.model = model
        (mean, std), (own_mean, own_std) = (
            (torch.tensor(part)[:, None, None] for part in pair) for pair in (given, own)
        )
        self.register_buffer("scale", std / own_std, persistent=False)
        self.register_buffer("shift", (mean - own_mean) / own_std, persistent=False)

    def forward(self, images: Tensor) -> Any:
        return self.model(images * self.scale + self.shift)
