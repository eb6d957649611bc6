"""Ports of torchvision's video models: Swin with windows that are boxes, and MViT."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torchvision.models.video.mvit import MultiscaleAttention, _add_rel_pos
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

from regard.core import Grid, Inputs, Mask, Site, merge
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.biases import mix_windows
from regard.swapping.host_mixer import HostMixer, HostPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.map_windows import MapWindows
from regard.swapping.maps import pooled_grid

from .torchvision import TorchvisionSwin


class TorchvisionSwin3D(TorchvisionSwin):
    """Swin on clips (B, depth, h, w, C): windows are boxes, which are not larger than the clip."""

    replaces: ClassVar[tuple[type, ...]] = (ShiftedWindowAttention3d,)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        depth, height, width = map(min, module.window_size, inputs[0].shape[1:4])
        return Grid(height, width, depth=depth)

    def forward(self, x: Float[Tensor, "B t h w C"]) -> Float[Tensor, "B t h w C"]:
        grid = self.call_grid(self.host, (x,), None)
        size = (grid.depth, grid.height, grid.width)
        windows = MapWindows(sides=tuple(x.shape[1:4]), size=size, shift=tuple(cast(Any, self.host).shift_size))
        return windows.join(mix_windows(self.mixer, windows.cut(x), grid, windows.mask(x)))


class MultiscaleMixer(HostMixer):
    """Queries, keys and values pooled by convolutions; biases that depend on the queries; queries added at the end."""

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.residual, self.of_class = host.residual_pool, host.residual_with_cls_embed

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        sides = (grid.depth, grid.height, grid.width)
        made: dict[str, Tensor] = {}
        pooled: dict[str, tuple[int, int, int]] = dict.fromkeys("qkv", sides)
        for role, y in zip("qkv", self.around.qkv(x).unflatten(-1, (3, self.site.heads, -1)).unbind(2), strict=True):
            pool = getattr(self.around, f"pool_{role}")
            made[role] = y.transpose(1, 2)
            if pool is not None:
                made[role], pooled[role] = pool(made[role], sides)
        grids = {role: replace(grid, depth=t, height=h, width=w) for role, (t, h, w) in pooled.items()}
        q, queries, keys, mask = made["q"], grids["q"], grids["k"], None
        if self.around.rel_pos_h is not None:
            zeros = q.new_zeros(*q.shape[:3], keys.tokens)
            tables = (getattr(self.around, f"rel_pos_{axis}") for axis in "hwt")
            mask = Mask(bias=_add_rel_pos(zeros, q, pooled["q"], pooled["k"], *tables))
        return Inputs(**made, grid=queries, memory=None if queries == keys else keys, mask=mask)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        if self.residual:
            first = made.q[:, :, :1] if self.of_class else torch.zeros_like(made.q[:, :, :1])
            y = y + torch.cat([first, made.q[:, :, 1:]], 2)
        return cast(Tensor, self.around.project(merge(y)))


class TorchvisionMViT(HostPort):
    """MViT: convolutions pool queries and keys, and in MViTv2 biases depend on queries; the class token stays."""

    replaces: ClassVar[tuple[type, ...]] = (MultiscaleAttention,)
    parameter_names = host_parts(
        "qkv", "project", *(f"rel_pos_{axis}" for axis in "hwt"), *(f"pool_{role}" for role in "qkv")
    )
    mixer_class: ClassVar[type[HostMixer]] = MultiscaleMixer

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        return frozenset({"bias"} if module.rel_pos_h is not None else ())

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        depth, height, width = inputs[1]
        return Grid(height, width, 1, depth=depth)

    @classmethod
    def resizes(cls, module: Any) -> bool:
        grid = Grid(8, 8, depth=8)
        return pooled_grid(grid, own_pool(module)) != grid or module.output_dim != module.embed_dim

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        queries, keys = (pooled_grid(grid, own_pool(module, role)) for role in "qk")
        memory = None if queries == keys else keys
        width, heads = module.head_dim, module.num_heads
        return Site(dim=module.embed_dim, heads=heads, grid=queries, width=width, memory=memory, layer=layer, name=name)

    def forward(self, x: Tensor, thw: tuple[int, int, int]) -> tuple[Tensor, tuple[int, int, int]]:
        grid = self.grid(x, thw)
        queries = pooled_grid(grid, own_pool(self.mixer.around)) if isinstance(self.mixer, HostMixer) else grid
        return self.mixer(x, grid), (queries.depth, queries.height, queries.width)


def own_pool(module: Any, role: str = "q") -> Any:
    """The convolution that pools a role of MViT's attention, or None."""
    pool = getattr(module, f"pool_{role}")
    return pool and pool.pool


PORTS: tuple[type[Port], ...] = (TorchvisionSwin3D, TorchvisionMViT)
