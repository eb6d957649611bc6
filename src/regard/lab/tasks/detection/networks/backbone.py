"""Backbones of detectors: a feature pyramid network over a pyramid, a simple feature pyramid over a plain ViT."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from regard.core import ConfigError, Extra, MixerConfig, SwapError
from regard.models.catalog import user_ports
from regard.models.create import build_host, further_options
from regard.swapping.swap import remove


class Backbone(nn.Module):
    """Maps of `out_channels` channels from images, by name "0", "1", ... from fine to coarse.

    body: returns the host's maps (B, D, h, w). fpn: gives every map the same channels. strides: of the maps in pixels;
    those after the first `computed` are subsampled from the map before them (every second row and column).
    """

    def __init__(self, body: nn.Module, fpn: nn.Module, channels: int, strides: Sequence[int], computed: int) -> None:
        super().__init__()
        self.body, self.fpn = body, fpn
        self.out_channels, self.strides, self.computed = channels, tuple(strides), computed
        fmt = getattr(body, "output_fmt", None)
        self.channels_last = fmt is not None and str(getattr(fmt, "value", fmt)) == "NHWC"

    def forward(self, images: Float[Tensor, "B C h w"]) -> dict[str, Tensor]:
        maps = self.body(images)
        if self.channels_last:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        named = self.fpn(OrderedDict((str(level), x) for level, x in enumerate(maps)))
        for level in range(self.computed, len(self.strides)):
            named[str(level)] = F.max_pool2d(named[str(level - 1)], 1, 2)
        return cast(dict[str, Tensor], named)


class SimplePyramid(nn.Module):
    """The simple feature pyramid of a plain ViT (Li et al. 2022, "Exploring Plain Vision Transformer Backbones").

    Every map is made of the last one: enlarged by deconvolutions with stride 2 or reduced by pooling, then a 1x1 and a
    3x3 convolution, each with layer normalisation. dim, stride: channels of the last map, and its stride in pixels.
    """

    def __init__(self, dim: int, stride: int, channels: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_level(dim, stride, channels, target) for target in strides)

    def forward(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        last = next(reversed(maps.values()))
        return OrderedDict((str(level), make(last)) for level, make in enumerate(self.levels))


def _level(dim: int, stride: int, channels: int, target: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    while stride > target:
        layers += [nn.ConvTranspose2d(dim, dim // 2, 2, 2)]
        dim, stride = dim // 2, stride // 2
        if stride > target:
            layers += [LayerNorm2d(dim), nn.GELU()]
    if stride < target:
        layers += [nn.MaxPool2d(target // stride, ceil_mode=True)]
    convolutions = nn.Conv2d(dim, channels, 1, bias=False), nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    for convolution in convolutions:
        layers += [convolution, LayerNorm2d(channels)]
    return nn.Sequential(*layers)


def detection_backbone(
    host: str,
    mixer: MixerConfig | None,
    *,
    size: tuple[int, int],
    channels: int = 3,
    width: int = 256,
    strides: Sequence[int] = (4, 8, 16, 32, 64),
    removed: bool = False,
    pretrained: bool = True,
    extra: Extra = (),
) -> Backbone:
    """A host, with a mechanism or its own attention (mixer=None) or without any (removed), as a detector's backbone.

    size: (height, width) of images, for hosts that need it. channels: of images. width: of the pyramid's maps. strides:
    of its levels in pixels, each the double of the one before; levels coarser than the host's are subsampled from its
    coarsest. pretrained: False ignores the published weights that the host's spelling names.
    Raises: ConfigError for strides that the host cannot give, or a host without maps; the errors of `create_model`.
    """
    if not strides or any(2 * fine != coarse for fine, coarse in pairwise(strides)):
        raise ConfigError(f"strides are each the double of the one before, such as (8, 16, 32), not {tuple(strides)}")
    options = {"features_only": True, **further_options(host, channels, pretrained)}
    own = _own_strides(host, size, options | further_options(host, channels, False), extra)
    plain = len(set(own)) == 1
    indices = (len(own) - 1,) if plain else tuple(i for i, stride in enumerate(own) if stride in strides)
    computed = len(strides) if plain else len(indices)
    if not plain and [own[i] for i in indices] != list(strides[:computed]) or not computed:
        given = ", ".join(map(str, own))
        raise ConfigError(f"{host} has maps of strides {given}; strides={tuple(strides)} must begin with some of them")
    if plain:  # the last block of a ViT, whose index timm counts from the end
        indices = (-1,)
        if any(max(own[0], stride) % min(own[0], stride) for stride in strides):
            raise ConfigError(f"{host} has patches of {own[0]} pixels; strides={tuple(strides)} are no multiples of it")
    try:
        body = build_host(host, mixer, size, extra, **options, out_indices=indices)
    except SwapError as error:
        if len(indices) == len(own):
            raise
        hint = f"strides={tuple(strides)} leave out stages of {host}: name coarser strides, up to {own[-1]}"
        raise ConfigError(f"{error}; {hint}") from error
    if removed:
        body = remove(body, ports=user_ports(extra))
    dims: list[int] = [int(dim) for dim in cast(Any, body).feature_info.channels()]
    fpn = SimplePyramid(dims[-1], own[-1], width, strides) if plain else FeaturePyramidNetwork(dims, width)
    return Backbone(body, fpn, width, strides, computed)


def _own_strides(host: str, size: tuple[int, int], options: dict[str, Any], extra: Extra) -> list[int]:
    """The strides of all maps of a host. options: without weights. Raises: ConfigError if it has no maps."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = build_host(host, None, size, extra, **options)
        except TypeError as error:
            raise ConfigError(f"{host} cannot be the backbone of a detector: {error}") from error
    info = getattr(model, "feature_info", None)
    if info is None or not hasattr(info, "reduction"):
        raise ConfigError(f"{host} cannot be the backbone of a detector: it does not describe its maps (feature_info)")
    return [int(stride) for stride in info.reduction()]
