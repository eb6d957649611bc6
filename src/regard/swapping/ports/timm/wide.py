"""Ports of timm's attention with values wider than keys, biased by a table: LeViT, EfficientFormer and TinyViT."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from jaxtyping import Float
from timm.models.efficientformer import Attention as EfficientFormerAttention
from timm.models.levit import Attention as LevitAttention
from timm.models.levit import AttentionDownsample
from timm.models.tiny_vit import Attention as TinyViTAttention
from torch import Tensor

from regard.core import Grid, Inputs, Mask, Site, heads, merge
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.host_mixer import HostMixer, HostPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.maps import map_of, tokens_of

BIASES = ("attention_biases", "attention_bias_idxs")
"""The host's table of biases for each head, and which entry is that of a query and a key."""


def table_biases(module: Any, heads: slice = slice(None)) -> Float[Tensor, "1 H N M"]:
    """The biases of some heads that a module's table `BIASES` holds."""
    return module.attention_biases[heads, module.attention_bias_idxs][None]  # type: ignore[no-any-return]


class WideMixer(HostMixer):
    """Rows of the host's `qkv` are ordered by head: d of the query, d of the key, the rest of the value.

    maps: whether the host's modules take maps. stride: of the queries on the grid.
    """

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.maps, self.stride = getattr(host, "use_conv", False), getattr(host, "stride", 1)

    def apply_part(self, name: str, x: Tensor, grid: Grid) -> Tensor:
        """The tokens that the host's module `name` makes of tokens."""
        module = self.around.get_submodule(name)
        return tokens_of(module(map_of(x, grid))) if self.maps else module(x)

    def split_heads(self, y: Tensor, roles: int) -> tuple[Tensor, ...]:
        """Of each head's channels, `roles` - 1 parts as wide as a key, and the values."""
        width, by_head = self.site.width, heads(y, self.site.heads)
        return by_head.split([width] * (roles - 1) + [by_head.shape[-1] - width * (roles - 1)], -1)

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        x = x if self.around.norm is None else self.around.norm(x)
        q, k, v = self.split_heads(self.apply_part("qkv", x, grid), 3)
        return Inputs(q, k, v, grid, mask=Mask(bias=table_biases(self.around)))

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        return self.apply_part("proj", merge(y), made.grid)


class DownsampleMixer(WideMixer):
    """Queries come from a coarser grid than keys and values, and the output has its tokens."""

    role_parts = {"q": ("q",)}

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        k, v = self.split_heads(self.apply_part("kv", x, grid), 2)
        q = None if self.around.q is None else heads(self.apply_part("q", x, grid), self.site.heads)
        return Inputs(q, k, v, grid.every(self.stride), grid, Mask(bias=table_biases(self.around)))


class TimmTinyViT(HostPort):
    """TinyViT, in windows: a table of biases for each head; norms inside of the attention."""

    replaces: ClassVar[tuple[type, ...]] = (TinyViTAttention,)
    mask_kinds = frozenset({"bias"})
    parameter_names = host_parts("norm", "qkv", "proj", *BIASES)
    mixer_class: ClassVar[type[HostMixer]] = WideMixer
    wide = "val_dim"

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return watched or Grid(*module.resolution)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        projection = getattr(module, "qkv", None) or module.kv
        dim = next(projection.parameters()).shape[1]
        return Site(dim=dim, heads=module.num_heads, grid=grid, width=module.key_dim, layer=layer, name=name)


class TimmLeViT(TimmTinyViT):
    """LeViT: values wider than keys, a table of biases for each head; on tokens, or on maps (`levit_conv`)."""

    replaces: ClassVar[tuple[type, ...]] = (LevitAttention,)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return self.mixer(x, self.grid())
        return map_of(self.mixer(tokens_of(x), self.grid()), self.mixer.site.grid)


class TimmLeViTDownsample(TimmLeViT):
    """LeViT's attention between two stages, whose queries are on a coarser grid: only for mechanisms between two."""

    replaces: ClassVar[tuple[type, ...]] = (AttentionDownsample,)
    parameter_names = host_parts("q", "kv", "proj", *BIASES)
    mixer_class: ClassVar[type[HostMixer]] = DownsampleMixer

    @classmethod
    def resizes(cls, module: Any) -> bool:
        return True

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), grid=grid.every(module.stride), memory=grid)


class TimmEfficientFormer(TimmTinyViT):
    """EfficientFormer's last blocks: values wider than keys, a table of biases for each head."""

    replaces: ClassVar[tuple[type, ...]] = (EfficientFormerAttention,)
    watch = "downsample"


PORTS: tuple[type[Port], ...] = (TimmLeViT, TimmLeViTDownsample, TimmEfficientFormer, TimmTinyViT)
