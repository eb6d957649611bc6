"""Ports of timm's attention that combines two maps of weights: ConViT and differential attention."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from timm.layers.diff_attention import DiffAttention
from timm.models.convit import GPSA
from torch import Tensor

from regard.core import Grid, Inputs, Site, heads, merge
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.host_mixer import HostMixer, HostPort, host_parts
from regard.swapping.layer import Port, library_mask


def relative_positions(grid: Grid, like: Tensor) -> Float[Tensor, "N N 3"]:
    """Columns and rows from each query to each key, and the squared distance, in the dtype and device of `like`."""
    sides = (torch.arange(side, dtype=like.dtype, device=like.device) for side in (grid.height, grid.width))
    y, x = (side.flatten() for side in torch.meshgrid(*sides, indexing="ij"))
    columns, rows = x[None] - x[:, None], y[None] - y[:, None]
    return torch.stack([columns, rows, columns**2 + rows**2], -1)


class GatedPositionsMixer(HostMixer):
    """(1 - g) mechanism(q, k, v) + g softmax(positions) v, with a gate g for each head."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        q, k = (heads(part, self.site.heads) for part in self.around.qk(x).chunk(2, -1))
        return Inputs(q, k, heads(self.around.v(x), self.site.heads), grid)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        near = self.around.pos_proj(relative_positions(grid, made.v)).movedim(-1, 0).softmax(-1)
        gate = torch.sigmoid(self.around.gating_param)[:, None, None]
        mixed = (1 - gate) * y + gate * (near @ made.v)
        return super().finish(mixed, made, grid)


class TimmConViT(HostPort):
    """ConViT's first layers: the mechanism gives the content part; the part by position and the gates stay."""

    replaces: ClassVar[tuple[type, ...]] = (GPSA,)
    watch = "patch_embed.proj"
    parameter_names = host_parts("qk", "v", "pos_proj", "gating_param", "proj", "proj_drop")
    mixer_class: ClassVar[type[HostMixer]] = GatedPositionsMixer

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(dim=module.dim, heads=module.num_heads, grid=grid, layer=layer, name=name)


class DifferentialMixer(HostMixer):
    """The difference of two heads with the same values, the second one weighted, then normalised."""

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.first_weight = host.lambda_init

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        count, (q, k, v) = self.site.heads, self.around.qkv(x).chunk(3, -1)
        q, k = self.around.q_norm(heads(q, count)), self.around.k_norm(heads(k, count))
        return Inputs(q, k, heads(v, count // 2).repeat_interleave(2, 1), grid)

    def second_weight(self) -> Tensor:
        """The factor of the second head, a number."""
        parts = self.around
        if parts.lambda_a is not None:
            first, second = parts.lambda_a, parts.lambda_b
        else:
            products = parts.lambda_q1 * parts.lambda_k1, parts.lambda_q2 * parts.lambda_k2
            first, second = (product.sum().float() for product in products)  # as the host, also in float64
        return first.exp() - second.exp() + self.first_weight  # type: ignore[no-any-return]

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        first, second = y.unflatten(1, (-1, 2)).unbind(2)
        out = self.around.sub_norm(first - self.second_weight().type_as(y) * second) * (1 - self.first_weight)
        return self.around.proj_drop(self.around.proj(self.around.norm(merge(out))))  # type: ignore[no-any-return]


class TimmDifferential(HostPort):
    """Differential attention (`vit_dwee`, `vit_dlittle`): each head is the difference of two, with wider values."""

    replaces: ClassVar[tuple[type, ...]] = (DiffAttention,)
    watch = "patch_embed.proj"
    parameter_names = host_parts(
        "qkv", "q_norm", "k_norm", "norm", "proj", "proj_drop", "sub_norm",
        *(f"lambda_{name}" for name in ("a", "b", "q1", "k1", "q2", "k2")),
    )  # fmt: skip
    mixer_class: ClassVar[type[HostMixer]] = DifferentialMixer

    @classmethod
    def value_width(cls, module: Any, site: Site) -> int:
        return 2 * site.width

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim, count, width = module.qkv.in_features, 2 * module.num_heads, module.head_dim
        return Site(dim=dim, heads=count, grid=grid, width=width, layer=layer, name=name)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, is_causal, x))


PORTS: tuple[type[Port], ...] = (TimmConViT, TimmDifferential)
