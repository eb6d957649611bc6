"""InLine attention: linear attention whose weights sum to 1 by subtraction, not division (Han et al. 2024, Eq. 8).

w_ij = a (q_i.k_j - q_i.mean k) / N + 1 / N, so o_i = q_i (a K^T V / N - a mean k^T mean v) + mean v, a = d^-0.5.
Weights may be negative. Prefix and suffix tokens are queries and keys like all others; the local branch (Eq. 10) gives
them zeros.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Cost,
    Grid,
    Inputs,
    Operator,
    Site,
    UnsupportedError,
    operator_function,
)
from regard.core.mask import Mask, only_kept

from .convolutions.sampling import own_kernels
from .shared.checks import padding_only
from .shared.heads import HeadMixer, HeadMixerConfig
from .shared.kernel_features import bfloat16_like, takes_triton
from .shared.precision import upcast, upcast_dtype, without_autocast

__all__ = ["InLine", "inline", "inline_reference"]


@operator_function
def inline_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """All N x M weights scale (q_i.k_j - mean_j q_i.k_j) / N + 1 / N; means and N count the keys that are kept."""
    keep = padding_only("inline", mask).keep
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = only_kept(k, keep), only_kept(v, keep)
    kept = v.new_ones(k.shape[0], k.shape[-2]) if keep is None else keep.to(v.dtype)
    number = kept.sum(-1).clamp_min(1)[:, None, None, None]
    logits = scale * (q @ k.mT)
    weights = (logits - logits.sum(-1, keepdim=True) / number + 1) / number
    return weights * kept[:, None, None, :] @ v


@operator_function
def inline(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], *,
    scale: float | None = None, mask: Mask | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same in linear time: the mean is subtracted from the keys.

    scale: None = d^-0.5. mask: padding only; without any key the result is 0. Half precision is summed in float32.
    execution: as of `linear`.
    Raises: ShapeError if q, k and v do not fit together, UnsupportedError for other masks or an execution that cannot
    run here, ConfigError for an unknown execution.
    """
    keep = padding_only("inline", mask).keep
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q.device):
        number = k.shape[-2] if keep is None else keep.sum(-1).clamp_min(1).to(upcast_dtype(q))[:, None, None, None]
        if takes_triton(execution, v):
            return _by_triton(q, k, v, scale, number, keep)
        k, v = only_kept(k, keep), only_kept(v, keep)
        q, wide_k, wide_v = upcast(q), upcast(k), upcast(v)
        k_mean, v_mean = (x.sum(-2, keepdim=True) / number for x in (wide_k, wide_v))
        # keys are centred before the product: afterwards, keys far from 0 would lose precision
        table = (bfloat16_like(wide_k - k_mean, v).mT @ bfloat16_like(wide_v, v)).to(q.dtype) * (scale / number)
        return (bfloat16_like(q, v) @ bfloat16_like(table, v) + v_mean).to(v.dtype)


def _by_triton(q: Tensor, k: Tensor, v: Tensor, scale: float, number: int | Tensor, keep: Tensor | None) -> Tensor:
    """Keys are centred before they are summed, for precision; the sums are centred once more, for the gradient."""
    from .shared.linear_triton import read_queries, sum_keys

    count = number if isinstance(number, int) else number.flatten().repeat_interleave(k.shape[1])[:, None]
    near = only_kept(k.detach(), keep)
    middle = near.sum(-2, dtype=upcast_dtype(near)) / (number if isinstance(number, int) else number[..., 0])
    sizes = k.shape[-1] * v.shape[-1], k.shape[-1], v.shape[-1]
    product, total, values = sum_keys(k, v, keep=keep, shift=middle)[:, 0].split(sizes, -1)
    table = product - (total[:, :, None] * (values / count)[:, None]).flatten(1)
    sums = torch.cat([table * (scale / count), total, values / count], -1)
    return read_queries(q, sums[:, None], v, constant=True)


@dataclass(frozen=True, kw_only=True)
class InLine(HeadMixerConfig):
    """scale: factor of the products, None = d^-0.5.

    residual: whether to add the paper's local branch: a 3x3 depth-wise convolution of the values on the grid, whose
    kernels are computed from the mean of the layer's input for every image. The paper's layer is InLine(residual=True).
    """

    scale: float | None = None
    residual: bool = False

    card = Card(
        title="InLine attention", source="Han et al. 2024 (Bridging the Divide), Eq. 8 and 10",
        formula="q (K^T V / N - mean k^T mean v) / sqrt(d) + mean v", complexity="O(N d C)", query_content=True,
        key_content=True, scaling=frozenset({"compression"}), expert_type="linear layer + mean (affine)",
        expert_count="1", construction="kernelisation without normaliser", topology="all-to-one", conditions="K, V",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    cross = True
    samples = ("InLine()", "InLine(residual=True, dwc=3)")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.residual

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        if self.residual and site.grid.depth > 1:
            raise UnsupportedError(f"the local branch of InLine is of one image, not of {site.grid}; residual=False")
        return ResidualMixer(self, site, shared) if self.residual else super().build(site, shared)

    @property
    def refuses_cross(self) -> str:
        return "its local branch needs one grid; give residual=False" if self.residual else ""

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        total = super().cost(site, accounting)
        if self.residual:
            check_width(site)
            maps = 10 * site.inner * site.width
            total += Cost(maps + 10 * site.inner, maps + site.grid.cells * site.inner * 9)
        return total

    def operator(self, site: Site) -> "InLineOperator":
        return InLineOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        return Cost(0, (site.grid.tokens + site.tokens("k")) * site.inner * site.width)


def check_width(site: Site) -> None:
    """Raises ConfigError where heads * width is not dim: the mean of the input has one channel for each value."""
    if site.inner != site.dim:
        raise ConfigError(
            f"InLine(residual=True) needs heads * width = dim, not {site.heads} * {site.width} for {site.dim}"
        )


class ResidualMixer(HeadMixer):
    """A layer with the local branch: a 3x3 kernel W2 GELU(W1 mean x) for every channel, both maps within heads."""

    def __init__(self, config: InLine, site: Site, shared: nn.Module | None = None) -> None:
        check_width(site)
        super().__init__(config, site, shared)
        self.first = nn.Conv1d(site.inner, site.inner, 1, groups=site.heads)
        self.second = nn.Conv1d(site.inner, 9 * site.inner, 1, groups=site.heads)

    def add_branches(self, x: Tensor, out: Tensor, v: Tensor | None, grid: Grid, mask: Mask | None) -> Tensor:
        out = super().add_branches(x, out, v, grid, mask)
        keep = mask.keep if mask is not None else None
        if keep is None:
            mean = x.mean(1)
        else:
            mean = x.masked_fill(~keep[..., None], 0.0).sum(1) / keep.sum(1, keepdim=True).clamp_min(1).to(x.dtype)
        kernels = self.second(F.gelu(self.first(mean[..., None])))  # (B, 9 C, 1)
        extra, cells = grid.to_map(only_kept(cast(Tensor, v), keep).transpose(1, 2).flatten(2))
        image = own_kernels(cells, kernels.reshape(*cells.shape[:2], 3, 3))
        return out + grid.from_map(torch.zeros_like(extra), image)


class InLineOperator(Operator):
    """No parameters. execution: see `linear`."""

    def __init__(self, config: InLine, execution: str = "auto") -> None:
        super().__init__()
        self.scale, self.execution = config.scale, execution

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = inline_reference if plain else partial(inline, execution=self.execution)
        return form(inputs.q, inputs.k, inputs.v, scale=self.scale, mask=inputs.mask)
