"""Dynamic convolution: every patch token predicts the kernel for its neighbourhood (Zhu et al. 2019, Eq. 5-7).

    (a, b) = W_glu x,  h = a * sigmoid(b),  K_q = softmax over taps of D h_q
    y_q = W [ sum_j K_{q,j,g(c)} h_{q+j, c} ]_c

The channels of a group g share a kernel (Wu et al. 2019, DynamicConv). Taps beyond the border, and causal ones left of
the first token, count in the softmax and read zero; with `renorm_padding` they do not count. Prefix and suffix tokens
are not convolved; their output is the mean of the patch tokens' outputs, or zero (`extra`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core import Card, ConfigError, Contract, Grid, Mask, ShapeError, Site, operator_function
from regard.core.cost import Cost, check_accounting, linear_cost
from regard.mixers.shared.native import in_function_transform
from regard.mixers.shared.routed_attention import runs_triton

from .sampling import TapsConfig, TapsMixer, check_groups, margins, shifted_views, views

__all__ = ["DynamicConv", "dynamic_conv", "dynamic_conv_reference"]

CHUNK, CHUNK_ON_GPU = 2**22, 2**27  # kernel entries that are predicted at a time; a GPU needs large pieces of work
MOST_CHANNELS = 512
"""Of a group on a GPU, whose kernel sums over all of them in one tile; with more, tap after tap."""


@operator_function
def dynamic_conv_reference(
    x: Float[Tensor, "B C h w"], kernels: Float[Tensor, "B g K h w"], *, groups: int,
    size: tuple[int, int] | None = None, causal: bool = False,
) -> Float[Tensor, "B C h w"]:  # fmt: skip
    """The unfolded map times the kernels."""
    sides = check_kernels(x, kernels, groups, size, causal)
    unfolded = torch.stack(shifted_views(x, sides, 1, causal), 2).unflatten(1, (groups, -1))  # (B, g, c, K, h, w)
    return torch.einsum("bgckhw,bgkhw->bgchw", unfolded, kernels).flatten(1, 2)


@operator_function
def dynamic_conv(
    x: Float[Tensor, "B C h w"], kernels: Float[Tensor, "B g K h w"], *, groups: int,
    size: tuple[int, int] | None = None, causal: bool = False,
) -> Float[Tensor, "B C h w"]:  # fmt: skip
    """sum over taps of kernels * shifted x, never unfolded: memory O(N C + N groups K), for training too.

    Maps with fewer positions than taps are one matrix product per group (`by_matrices`), others a sum over taps.
    kernels: after their softmax; taps row by row. groups: of contiguous channels that share a kernel. size: (rows,
    columns) of taps, None = a square. causal: the taps end at the query instead of lying around it (one row of taps).
    Raises: ShapeError for tensors that do not fit.
    """
    sides = check_kernels(x, kernels, groups, size, causal)
    maps = x.unflatten(1, (groups, -1))
    if small(maps, kernels.shape[2]):
        taps = taps_between(maps.shape[3:], sides, causal, x.device)
        return by_matrices(maps, kernels.flatten(3).permute(0, 3, 1, 2), taps).flatten(1, 2)
    return by_taps(F.pad(maps, margins(sides, 1, causal)), kernels, sides).flatten(1, 2)


def check_kernels(
    x: Tensor, kernels: Tensor, groups: int, size: tuple[int, int] | None, causal: bool
) -> tuple[int, int]:
    """Check the inputs of `dynamic_conv` and its reference; returns the rows and columns of taps.

    Raises: ShapeError.
    """
    if x.ndim != 4 or kernels.ndim != 5:
        shapes = f"x {tuple(x.shape)} and kernels {tuple(kernels.shape)}"
        raise ShapeError(f"dynamic_conv: {shapes}; expected x (B, C, h, w) and kernels (B, groups, taps, h, w)")
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
        rule = "causal taps lie in one row" if causal else "taps around a query are odd in number along each axis"
        raise ShapeError(f"dynamic_conv: {rule}, not {rows}x{columns}")
    return rows, columns


def small(maps: Float[Tensor, "B g c h w"], taps: int) -> bool:
    """Whether matrix products are faster than a sum over this number of taps."""
    return maps.shape[3] * maps.shape[4] <= taps


def by_matrices(
    maps: Float[Tensor, "B g c h w"], kernels: Float[Tensor, "B N g K"], taps: Int[Tensor, "N N"]
) -> Float[Tensor, "B g c h w"]:
    """Kernels written into a matrix of queries by positions, the band matrix of Wu et al.'s code, and one product.

    kernels: of N queries, each with its taps side by side. taps: of `taps_between`.
    """
    taps = taps[:, None]
    index = taps.clamp_min(0).expand(len(kernels), -1, kernels.shape[2], -1)
    matrix = kernels.gather(3, index).masked_fill(taps < 0, 0.0)  # (B, N, g, N)
    return (maps.flatten(3) @ matrix.permute(0, 2, 3, 1)).unflatten(3, maps.shape[3:])


def taps_between(size: Sequence[int], sides: tuple[int, int], causal: bool, device: torch.device) -> Int[Tensor, "N N"]:
    """The tap with which each query (row) sees each position (column) of a map; -1 where it does not.

    size: (h, w) of the map. sides: rows and columns of taps.
    """
    left, _, top, _ = margins(sides, 1, causal)
    (height, width), (rows, columns) = size, sides
    y, x = torch.arange(height, device=device), torch.arange(width, device=device)
    i, j = y - y[:, None] + top, x - x[:, None] + left  # (query, position) along each axis
    i, j = i[:, None, :, None], j[:, None]
    inside = (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
    return torch.where(inside, i * columns + j, -1).reshape(height * width, height * width)


def _result(x: Tensor) -> Tensor:
    """x as the result of a Function's forward pass; where compiled, a copy.

    PyTorch 2.11 loses gradients of a compiled Function whose result was written in place, or left as it is by `.to`.
    """
    return x.clone() if torch.compiler.is_compiling() else x


def by_taps(
    padded: Float[Tensor, "B g c hh ww"], kernels: Float[Tensor, "B g K h w"], sides: tuple[int, int]
) -> Float[Tensor, "B g c h w"]:
    """The sum of `Taps`, on CUDA in one kernel; in a function transform (`torch.func`) with PyTorch's backward pass."""
    if runs_triton(padded) and padded.shape[2] <= MOST_CHANNELS:
        from .dynamic_triton import sum_taps

        return sum_taps(padded, kernels, sides)
    if not in_function_transform():
        return cast(Tensor, Taps.apply(padded, kernels, sides))
    return (kernels[:, :, None] * torch.stack(views(padded, sides, kernels.shape[-2:]), 3)).sum(3)


class Taps(torch.autograd.Function):
    """sum_j kernels[:, :, j] * padded shifted by tap j; saves only its two inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, kernels: Tensor, sides: tuple[int, int]) -> Tensor:
        """padded (B, g, c, h + rows - 1, w + columns - 1), kernels (B, g, K, h, w) -> (B, g, c, h, w)."""
        ctx.save_for_backward(padded, kernels)
        ctx.sides = sides
        height, width = kernels.shape[-2:]
        dtype = torch.promote_types(padded.dtype, torch.float32)
        out = torch.zeros((*padded.shape[:3], height, width), dtype=dtype, device=padded.device)
        for tap in range(kernels.shape[2]):
            i, j = divmod(tap, sides[1])
            out.addcmul_(kernels[:, :, tap, None].to(dtype), padded[..., i : i + height, j : j + width].to(dtype))
        return _result(out.to(padded.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients of padded and kernels."""
        padded, kernels = ctx.saved_tensors
        height, width = kernels.shape[-2:]
        dtype = torch.promote_types(padded.dtype, torch.float32)
        grad, grad_kernels = grads[0].to(dtype), torch.empty_like(kernels)
        grad_padded = torch.zeros(padded.shape, dtype=dtype, device=padded.device)
        for tap in range(kernels.shape[2]):
            i, j = divmod(tap, ctx.sides[1])
            view = (..., slice(i, i + height), slice(j, j + width))
            grad_padded[view].addcmul_(kernels[:, :, tap, None].to(dtype), grad)
            grad_kernels[:, :, tap] = (padded[view].to(dtype) * grad).sum(2).to(kernels.dtype)
        return grad_padded.to(padded.dtype), grad_kernels, None


@dataclass(frozen=True, kw_only=True)
class DynamicConv(TapsConfig):
    """kernel, axes, causal, extra: see `TapsConfig`; the paper's kernels on images are 13, 19, 25, 31.

    groups: of channels, each with a kernel of its own. glu: gated input, or a linear map alone. renorm_padding: softmax
    over the taps that lie on the map and are not padded; the published form counts the others too, which read zero.
    kernel_bias: whether D has a bias. The paper's kernel exp(d^T x) has none: a bias is a logit of the relative
    position that does not depend on content, like the factor E4.
    Raises: ConfigError for even or impossible numbers; building, for groups that do not divide the channels.
    """

    kernel: int = 13
    groups: int = 16
    glu: bool = True
    renorm_padding: bool = False
    kernel_bias: bool = False

    revision = 3  # 2: other initial weights in `regard.lab.tasks`; 3: kernel_bias, which was always on
    card = Card(
        title="Dynamic convolution", source="Zhu et al. 2019, Eq. 5-7; Wu et al. 2019",
        formula="W sum_j softmax_j(D h_q) h_{q+j},  h = GLU(x)", complexity="O(N C N_g N_k + N C^2)",
        query_content=True, key_content=False, relative_position=True, dynamic="one-step",
        scaling=frozenset({"routing"}), expert_type="linear layer on N_k cells", expert_count="N",
        construction="locality prior + kernel prediction", topology="N x one-to-one", conditions="Q, position",
        prefix="not convolved; the mean of the patch tokens' outputs, or zero", row_maps=False,
    )  # fmt: skip
    samples = (
        "DynamicConv(kernel=3, groups=4)",
        "DynamicConv(kernel=7, groups=2, glu=False, renorm_padding=True, kernel_bias=True)",
    )

    @property
    def contract(self) -> Contract:
        return Contract(macs="reference")  # the fast form multiplies elementwise, which the counter does not count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1:
            raise ConfigError(f"groups is at least 1, not {self.groups}")

    def build(self, site: Site, shared: nn.Module | None = None) -> "DynamicConvMixer":
        check_groups("DynamicConv", self.groups, site)
        return DynamicConvMixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """N (3 C^2 + C N_g N_k + C N_k) in both accountings.

        The last term is the sum over taps. It runs as elementwise products, not as a matrix product, but Zhu et al.
        count it, and so do both accountings. On maps with no more positions than taps a matrix product of C N^2 runs
        instead; the formula is that of the equation there too.
        """
        check_accounting(accounting)
        n, dim = site.grid.cells, site.dim
        total = linear_cost(n, dim, (1 + self.glu) * dim, site.qkv_bias) + linear_cost(n, dim, dim, site.out_bias)
        return total + linear_cost(n, dim, self.groups * self.taps, self.kernel_bias) + Cost(0, n * dim * self.taps)

    def exponentials(self, site: Site) -> int:
        """The number of entries in the softmax of the kernels."""
        return site.grid.cells * self.groups * self.taps


class DynamicConvMixer(TapsMixer):
    """enter (C -> 2 C, gated), kernels (C -> groups * taps), leave (C -> C)."""

    output = "leave"
    config: DynamicConv

    def __init__(self, config: DynamicConv, site: Site) -> None:
        super().__init__(config, site)
        dim = site.dim
        self.enter = XavierLinear(dim, (1 + config.glu) * dim, bias=site.qkv_bias)
        self.kernels = XavierLinear(dim, config.groups * config.taps, bias=config.kernel_bias)
        self.leave = XavierLinear(dim, dim, bias=site.out_bias)

    def mix(self, x: Tensor, valid: Tensor | None, plain: bool) -> Tensor:
        h = self.hidden(x, valid)
        mixed = self._plain(h, valid) if plain else self._in_parts(h, valid)
        return self.leave(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def hidden(self, x: Float[Tensor, "B C h w"], valid: Bool[Tensor, "B 1 h w"] | None) -> Float[Tensor, "B h w C"]:
        """The gated input h: kernels are predicted from it and applied to it."""
        h = self.enter(x.permute(0, 2, 3, 1))
        h = F.glu(h, -1) if self.config.glu else h
        return h if valid is None else h * valid.permute(0, 2, 3, 1)

    def kernels_at(
        self, x: Float[Tensor, "B N C"], grid: Grid, cell: tuple[int, int], mask: Mask | None = None
    ) -> Float[Tensor, "B g rows columns"]:
        """The kernels of the patch token at (row, column), for pictures."""
        _, image, valid = self.split(x, grid, mask)
        index = (..., slice(cell[0], cell[0] + 1), slice(cell[1], cell[1] + 1))
        counts, h = self._counts(image, valid), self.hidden(image, valid)
        kernels = self.predict(h[(*index, slice(None))], None if counts is None else counts[index])
        return kernels[..., 0, 0].unflatten(2, self.config.sides)

    def predict(
        self, h: Float[Tensor, "B h w C"], counts: Bool[Tensor, "b K h w"] | None
    ) -> Float[Tensor, "B g K h w"]:
        """The kernels of some rows of the map. counts: True for taps that count in the softmax, None for all."""
        weight, bias = self.kernels.weight, self.kernels.bias
        logits = weight @ h.flatten(1, 2).mT  # (B, g K, h w): every tap is a map
        logits = logits if bias is None else logits + bias[:, None]
        logits = logits.unflatten(1, (self.config.groups, -1)).unflatten(-1, h.shape[1:3])
        if counts is not None:
            logits = logits.masked_fill(~counts[:, None], -torch.inf)
        return logits.softmax(2)

    def predict_rows(
        self, h: Float[Tensor, "B h w C"], counts: Bool[Tensor, "b K h w"] | None
    ) -> Float[Tensor, "B N g K"]:
        """The same with the taps of a query side by side, as `by_matrices` reads them."""
        logits = self.kernels(h.flatten(1, 2)).unflatten(2, (self.config.groups, -1))
        if counts is not None:
            logits = logits.masked_fill(~counts.flatten(2).mT[:, :, None], -torch.inf)
        return logits.softmax(3)

    def _plain(self, h: Tensor, valid: Tensor | None) -> Tensor:
        config, x = self.config, h.permute(0, 3, 1, 2)
        kernels = self.predict(h, self._counts(x, valid)).to(x.dtype)
        return dynamic_conv_reference(x, kernels, groups=config.groups, size=config.sides, causal=config.causal)

    def _in_parts(self, h: Tensor, valid: Tensor | None) -> Tensor:
        """Kernels are predicted for some rows at a time, or for some images where these are small, and again in the
        backward pass: all at once would not fit into memory."""
        config, x = self.config, h.permute(0, 3, 1, 2).unflatten(1, (self.config.groups, -1))
        counts, (batch, height, width, _), sides = self._counts(x, valid), h.shape, config.sides
        taps = taps_between((height, width), sides, config.causal, x.device) if small(x, config.taps) else None
        padded = F.pad(x, margins(sides, 1, config.causal)) if taps is None else x

        def convolve(h: Tensor, padded: Tensor, counts: Tensor | None) -> Tensor:
            if taps is None:
                return by_taps(padded, self.predict(h, counts).to(padded.dtype), sides)
            return by_matrices(padded, self.predict_rows(h, counts).to(padded.dtype), taps)

        total, rest = (height, batch) if taps is None else (batch, height)
        chunk = CHUNK if h.device.type == "cpu" else CHUNK_ON_GPU
        step = max(1, chunk // max(1, rest * width * config.groups * config.taps))
        if step >= total:
            return convolve(h, padded, counts).flatten(1, 2)
        parts = []
        for start in range(0, total, step):
            part = slice(start, start + step)
            if taps is None:
                rows = slice(start, min(start + step, height) + sides[0] - 1)
                inputs = h[:, part], padded[..., rows, :], None if counts is None else counts[..., part, :]
            else:
                inputs = h[part], padded[part], counts if counts is None or len(counts) == 1 else counts[part]
            recompute = torch.is_grad_enabled() and not in_function_transform()
            parts.append(checkpoint(convolve, *inputs, use_reentrant=False) if recompute else convolve(*inputs))
        return torch.cat(parts, 3 if taps is None else 0).flatten(1, 2)

    def _counts(self, x: Tensor, valid: Tensor | None) -> Tensor | None:
        """(B or 1, K, h, w): which taps count in the softmax; the query's own always does, so that no row is empty."""
        if not self.config.renorm_padding:
            return None
        inside = x.new_ones(1, 1, *x.shape[-2:]) if valid is None else valid.to(x.dtype)
        counts = torch.cat(shifted_views(inside, self.config.sides, 1, self.config.causal), 1) > 0
        taps = torch.arange(self.config.taps, device=x.device)
        centre = taps == (self.config.taps - 1 if self.config.causal else self.config.taps // 2)
        return counts | centre[:, None, None]


class XavierLinear(nn.Linear):
    """A linear map that is initialised as in the published code."""

    def reset_parameters(self) -> None:
        """Xavier-uniform weight, bias zero."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
