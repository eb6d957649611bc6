"""Dynamic convolution: every cell predicts the kernel that it reads its neighbours with (Zhu et al. 2019, Eq. 5-7).

    (a, b) = W_glu x,  h = a * sigmoid(b),  K_q = softmax over taps of D h_q
    y_q = W [ sum_j K_{q,j,g(c)} h_{q+j, c} ]_c

The channels of a group g share a kernel (Wu et al. 2019, DynamicConv). Taps beyond the border count in the softmax and
see zero, causal ones left of the first token too; with `renorm_padding` they do not count. Extra tokens are no taps;
they get the mean of the cells' outputs, or zero (`extra`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core import Card, ConfigError, Contract, Cost, Grid, Mask, ShapeError, Site, check_accounting, linear
from regard.mixers.shared.native_build import transformed

from .sampling import TapsConfig, TapsMixer, check_groups, margins, shifted, views

__all__ = ["DynamicConv", "dynamic_conv", "dynamic_conv_reference"]

CHUNK = 2**22  # numbers of predicted kernels that exist at a time


def dynamic_conv_reference(
    x: Float[Tensor, "B C h w"],
    kernels: Float[Tensor, "B g K h w"],
    *,
    groups: int,
    size: tuple[int, int] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B C h w"]:
    """All that the taps see in one tensor, times the kernels."""
    sides = check_kernels(x, kernels, groups, size, causal)
    seen = torch.stack(shifted(x, sides, 1, causal), 2).unflatten(1, (groups, -1))  # (B, g, c, K, h, w)
    return torch.einsum("bgckhw,bgkhw->bgchw", seen, kernels).flatten(1, 2)


def dynamic_conv(
    x: Float[Tensor, "B C h w"],
    kernels: Float[Tensor, "B g K h w"],
    *,
    groups: int,
    size: tuple[int, int] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B C h w"]:
    """sum over taps of kernels * x, without a tensor over taps of x: memory O(N C + N groups K), for training too.

    Maps that are small beside the kernels are one product of matrices a group (`by_matrices`), others a sum over taps.
    kernels: after their softmax; taps row by row. groups: of contiguous channels that share a kernel. size: (rows,
    columns) of taps, None = a square. causal: the taps end at the cell instead of lying around it (one row of taps).
    Raises: ShapeError for tensors that do not fit.
    """
    sides = check_kernels(x, kernels, groups, size, causal)
    maps = x.unflatten(1, (groups, -1))
    if small(maps, kernels.shape[2]):
        return by_matrices(maps, kernels, *pairs(maps.shape[3:], sides, causal, x.device)).flatten(1, 2)
    return by_taps(F.pad(maps, margins(sides, 1, causal)), kernels, sides).flatten(1, 2)


def check_kernels(
    x: Tensor, kernels: Tensor, groups: int, size: tuple[int, int] | None, causal: bool
) -> tuple[int, int]:
    """The door of both functions; returns the taps along rows and columns."""
    if x.ndim != 4 or kernels.ndim != 5:
        came = f"x {tuple(x.shape)} and kernels {tuple(kernels.shape)}"
        raise ShapeError(f"dynamic_conv: {came}; expected x (B, C, h, w) and kernels (B, groups, taps, h, w)")
    if groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"dynamic_conv: {groups} groups do not divide {x.shape[1]} channels")
    expected = (x.shape[0], groups, kernels.shape[2], *x.shape[2:])
    if tuple(kernels.shape) != expected:
        raise ShapeError(f"dynamic_conv: kernels {tuple(kernels.shape)}; expected (B, groups, taps, h, w) = {expected}")
    if x.dtype != kernels.dtype:
        raise ShapeError(f"dynamic_conv: x is {x.dtype}, kernels are {kernels.dtype}; cast them to one dtype")
    side = math.isqrt(kernels.shape[2])
    rows, columns = size or (side, side)
    if rows * columns != kernels.shape[2]:
        raise ShapeError(f"dynamic_conv: {kernels.shape[2]} taps are not {rows}x{columns}; give size=(rows, columns)")
    if (rows != 1) if causal else (rows % 2 == 0 or columns % 2 == 0):
        what = "causal taps lie in one row" if causal else "taps around a cell are odd in number along each axis"
        raise ShapeError(f"dynamic_conv: {what}, not {rows}x{columns}")
    return rows, columns


def small(maps: Float[Tensor, "B g c h w"], taps: int) -> bool:
    """Whether products of matrices are faster than a sum over so many taps."""
    return maps.shape[3] * maps.shape[4] <= taps


def by_matrices(
    maps: Float[Tensor, "B g c h w"],
    kernels: Float[Tensor, "B g K h w"],
    ahead: Int[Tensor, " NN"],
    back: Int[Tensor, " KN"],
) -> Float[Tensor, "B g c h w"]:
    """Kernels written into a matrix of cells by cells, as the band of Wu et al.'s code, then one product a group.

    ahead, back: of `pairs`.
    """
    numbers = kernels.flatten(2)
    matrix = _moved(numbers, ahead) if transformed() else cast(Tensor, Moved.apply(numbers, ahead, back))
    cells = maps.flatten(3)
    return (cells @ matrix.unflatten(2, (cells.shape[3], -1))).unflatten(3, maps.shape[3:])


def pairs(
    size: Sequence[int], sides: tuple[int, int], causal: bool, device: torch.device
) -> tuple[Int[Tensor, " NN"], Int[Tensor, " KN"]]:
    """Where (cell that is read, query) lies among (tap, query), and the other way round; -1: no such tap, no cell."""
    left, _, top, _ = margins(sides, 1, causal)
    (height, width), (rows, columns) = size, sides
    y, x = torch.arange(height, device=device), torch.arange(width, device=device)
    query = y[:, None] * width + x

    def places(i: Tensor, j: Tensor, among: tuple[int, int]) -> Tensor:  # i, j: rows, columns for each (place, query)
        there = ((i >= 0) & (i < among[0]))[:, None, :, None] & ((j >= 0) & (j < among[1]))[:, None]
        first = i[:, None, :, None] * among[1] + j[:, None]
        return torch.where(there, first * (height * width) + query, -1).flatten()

    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[:, None]
    ahead = places(y[:, None] - y + top, x[:, None] - x + left, sides)
    return ahead, places(i + y - top, j + x - left, (height, width))


def _moved(numbers: Float[Tensor, "B g M"], places: Int[Tensor, " L"]) -> Float[Tensor, "B g L"]:
    return numbers.index_select(-1, places.clamp_min(0)).masked_fill_(places < 0, 0.0)


class Moved(torch.autograd.Function):
    """Numbers in other places, no two of them in the same: the way back moves them too, and sums nothing."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, ahead: Tensor, back: Tensor) -> Tensor:
        """numbers (B, g, M) -> (B, g, L). ahead: the old place of each new one, or -1 for a zero. back: so too."""
        ctx.save_for_backward(ahead, back)
        return _moved(numbers, ahead)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """For the numbers."""
        ahead, back = ctx.saved_tensors
        return cast(Tensor, Moved.apply(grads[0], back, ahead)), None, None


def by_taps(
    padded: Float[Tensor, "B g c hh ww"], kernels: Float[Tensor, "B g K h w"], sides: tuple[int, int]
) -> Float[Tensor, "B g c h w"]:
    """`Taps`, or where a function transform runs (`torch.func`) the same sum with PyTorch's own way back."""
    if not transformed():
        return cast(Tensor, Taps.apply(padded, kernels, sides))
    return (kernels[:, :, None] * torch.stack(views(padded, sides, kernels.shape[-2:]), 3)).sum(3)


class Taps(torch.autograd.Function):
    """sum_j kernels[:, :, j] * padded shifted by tap j; keeps its two inputs and nothing else for the way back."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, kernels: Tensor, sides: tuple[int, int]) -> Tensor:
        """padded (B, g, c, h + rows - 1, w + columns - 1), kernels (B, g, K, h, w) -> (B, g, c, h, w)."""
        ctx.save_for_backward(padded, kernels)
        ctx.sides = sides
        height, width = kernels.shape[-2:]
        work = torch.promote_types(padded.dtype, torch.float32)
        out = torch.zeros((*padded.shape[:3], height, width), dtype=work, device=padded.device)
        for tap in range(kernels.shape[2]):
            i, j = divmod(tap, sides[1])
            out.addcmul_(kernels[:, :, tap, None].to(work), padded[..., i : i + height, j : j + width].to(work))
        return out.to(padded.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """For padded and kernels."""
        padded, kernels = ctx.saved_tensors
        height, width = kernels.shape[-2:]
        work = torch.promote_types(padded.dtype, torch.float32)
        ahead, to_kernels = grads[0].to(work), torch.empty_like(kernels)
        to_padded = torch.zeros(padded.shape, dtype=work, device=padded.device)
        for tap in range(kernels.shape[2]):
            i, j = divmod(tap, ctx.sides[1])
            view = (..., slice(i, i + height), slice(j, j + width))
            to_padded[view].addcmul_(kernels[:, :, tap, None].to(work), ahead)
            to_kernels[:, :, tap] = (padded[view].to(work) * ahead).sum(2).to(kernels.dtype)
        return to_padded.to(padded.dtype), to_kernels, None


@dataclass(frozen=True, kw_only=True)
class DynamicConv(TapsConfig):
    """kernel, axes, causal, extra: of the taps (the paper: 13, 19, 25, 31 on images). groups: kernels of a cell.

    glu: gated input, or a linear map alone. renorm_padding: softmax over the taps that lie on the map and are not
    padded; the published form counts the others, which see zero.
    Raises: ConfigError for even or impossible numbers; building, for groups that do not divide the channels.
    """

    kernel: int = 13
    groups: int = 16
    glu: bool = True
    renorm_padding: bool = False

    revision: ClassVar[int] = 2  # its first weights in `regard.tasks` were others
    card: ClassVar[Card] = Card(
        title="Dynamic convolution",
        source="Zhu et al. 2019, Eq. 5-7; Wu et al. 2019",
        formula="W sum_j softmax_j(D h_q) h_{q+j},  h = GLU(x)",
        complexity="O(N C N_g N_k + N C^2)",
        query_content=True,
        key_content=False,
        relative_position=True,
        dynamic="one-step",
        scaling=frozenset({"routing"}),
        expert_type="linear layer on N_k cells",
        expert_count="N",
        construction="locality prior + kernel prediction",
        topology="N x one-to-one",
        conditions="Q, position",
        prefix="no taps; the mean of the cells' outputs, or zero",
        row_maps=False,
    )
    samples: ClassVar[tuple[str, ...]] = (
        "DynamicConv(kernel=3, groups=4)",
        "DynamicConv(kernel=7, groups=2, glu=False, renorm_padding=True)",
    )

    @property
    def contract(self) -> Contract:
        return Contract(macs="reference")  # the fast form multiplies taps one by one, which the counter does not see

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1:
            raise ConfigError(f"groups is at least 1, not {self.groups}")

    def build(self, site: Site, shared: nn.Module | None = None) -> "DynamicConvMixer":
        check_groups("DynamicConv", self.groups, site)
        return DynamicConvMixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """N (3 C^2 + C N_g N_k + C N_k) in both accountings.

        The last part are the taps. They run as products one by one, not as a product of matrices, but Zhu et al. count
        them, and so do both accountings. Where there are no more cells than taps a product of C N^2 is run in
        their place; the formula is that of the equation there too.
        """
        check_accounting(accounting)
        n, dim = site.grid.cells, site.dim
        total = linear(n, dim, (1 + self.glu) * dim, site.qkv_bias) + linear(n, dim, dim, site.out_bias)
        return total + linear(n, dim, self.groups * self.taps) + Cost(0, n * dim * self.taps)

    def exponentials(self, site: Site) -> int:
        """Numbers in the softmax of the kernels."""
        return site.grid.cells * self.groups * self.taps


class DynamicConvMixer(TapsMixer):
    """enter (C -> 2 C, gated), kernels (C -> groups * taps), leave (C -> C)."""

    output: ClassVar[str] = "leave"
    config: DynamicConv

    def __init__(self, config: DynamicConv, site: Site) -> None:
        super().__init__(config, site)
        dim = site.dim
        self.enter = XavierLinear(dim, (1 + config.glu) * dim, bias=site.qkv_bias)
        self.kernels = XavierLinear(dim, config.groups * config.taps)
        self.leave = XavierLinear(dim, dim, bias=site.out_bias)

    def mix(self, cells: Tensor, valid: Tensor | None, plain: bool) -> Tensor:
        h = self.hidden(cells, valid)
        mixed = self._plain(h, valid) if plain else self._in_parts(h, valid)
        return self.leave(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def hidden(
        self, cells: Float[Tensor, "B C h w"], valid: Bool[Tensor, "B 1 h w"] | None
    ) -> Float[Tensor, "B h w C"]:
        """What kernels are predicted from, and what taps see."""
        h = self.enter(cells.permute(0, 2, 3, 1))  # a view where there are no extra tokens
        h = F.glu(h, -1) if self.config.glu else h
        return h if valid is None else h * valid.permute(0, 2, 3, 1)

    def kernels_at(
        self, x: Float[Tensor, "B N C"], grid: Grid, cell: tuple[int, int], mask: Mask | None = None
    ) -> Float[Tensor, "B g rows columns"]:
        """The kernels of one cell (row, column), for pictures."""
        _, cells, valid = self.split(x, grid, mask)
        here = (..., slice(cell[0], cell[0] + 1), slice(cell[1], cell[1] + 1))
        counts, h = self._counts(cells, valid), self.hidden(cells, valid)
        kernels = self.predict(h[(*here, slice(None))], None if counts is None else counts[here])
        return kernels[..., 0, 0].unflatten(2, self.config.sides)

    def predict(
        self, h: Float[Tensor, "B h w C"], counts: Bool[Tensor, "b K h w"] | None
    ) -> Float[Tensor, "B g K h w"]:
        """The kernels of some rows. counts: True for the taps that count, None for all."""
        weight, bias = self.kernels.weight, cast(Tensor, self.kernels.bias)
        logits = weight @ h.flatten(1, 2).mT + bias[:, None]  # (B, g K, h w): every tap is a map
        logits = logits.unflatten(1, (self.config.groups, -1)).unflatten(-1, h.shape[1:3])
        if counts is not None:
            logits = logits.masked_fill(~counts[:, None], -torch.inf)
        return logits.softmax(2)

    def _plain(self, h: Tensor, valid: Tensor | None) -> Tensor:
        config, x = self.config, h.permute(0, 3, 1, 2)
        kernels = self.predict(h, self._counts(x, valid)).to(x.dtype)
        return dynamic_conv_reference(x, kernels, groups=config.groups, size=config.sides, causal=config.causal)

    def _in_parts(self, h: Tensor, valid: Tensor | None) -> Tensor:
        """Kernels are predicted for some rows, or images where these are small, and again on the way back: all of them
        at a time would not fit."""
        config, x = self.config, h.permute(0, 3, 1, 2).unflatten(1, (self.config.groups, -1))
        counts, (batch, height, width, _), sides = self._counts(x, valid), h.shape, config.sides
        places = pairs((height, width), sides, config.causal, x.device) if small(x, config.taps) else None
        seen = x if places else F.pad(x, margins(sides, 1, config.causal))

        def some(h: Tensor, seen: Tensor, counts: Tensor | None) -> Tensor:
            kernels = self.predict(h, counts).to(seen.dtype)
            return by_matrices(seen, kernels, *places) if places else by_taps(seen, kernels, sides)

        number, other = (batch, height) if places else (height, batch)
        step = max(1, CHUNK // max(1, other * width * config.groups * config.taps))
        if step >= number:
            return some(h, seen, counts).flatten(1, 2)
        parts = []
        for start in range(0, number, step):
            part = slice(start, start + step)
            if places:
                inputs = h[part], seen[part], counts if counts is None or len(counts) == 1 else counts[part]
            else:
                rows = slice(start, min(start + step, height) + sides[0] - 1)
                inputs = h[:, part], seen[..., rows, :], None if counts is None else counts[..., part, :]
            again = torch.is_grad_enabled() and not transformed()
            parts.append(checkpoint(some, *inputs, use_reentrant=False) if again else some(*inputs))
        return torch.cat(parts, 0 if places else 3).flatten(1, 2)

    def _counts(self, x: Tensor, valid: Tensor | None) -> Tensor | None:
        """(B or 1, K, h, w): which taps count in the softmax; the query's own always does, so that no row is empty."""
        if not self.config.renorm_padding:
            return None
        there = x.new_ones(1, 1, *x.shape[-2:]) if valid is None else valid.to(x.dtype)
        counts = torch.cat(shifted(there, self.config.sides, 1, self.config.causal), 1) > 0
        taps = torch.arange(self.config.taps, device=x.device)
        own = taps == (self.config.taps - 1 if self.config.causal else self.config.taps // 2)
        return counts | own[:, None, None]


class XavierLinear(nn.Linear):
    """A linear map that starts as in the published code."""

    def reset_parameters(self) -> None:
        """Xavier-uniform weight, bias zero."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
