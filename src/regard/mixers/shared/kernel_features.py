"""What mechanisms with kernelised weights share: doors, padding, the normalised product, positions, a local branch.

weights a_ij = f(q_i) . g(k_j) / (f(q_i) . sum_j g(k_j) + eps); the fast form never makes the N x M matrix. Normalisers
are in float32 for half precision. Hidden keys may hold anything, also infinities: they are replaced before they are
used. A query whose normaliser is 0 gets zeros.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, GridError, Mask, Site, UnsupportedError, nearest, only_kept
from regard.mixers.static_keys.grids import resample

from .heads import HeadMixer, check_qkv

Feature = str | Callable[[Tensor], Tensor]


def _elu(x: Tensor) -> Tensor:
    """elu(x) + 1. Compiled, the gradient of torch's elu fails on transposed heads; eager, the other form is slower."""
    return x.clamp_max(0).exp() + F.relu(x) if torch.compiler.is_compiling() else F.elu(x) + 1


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": _elu,
    "relu": lambda x: F.relu(x) + 1e-6,  # a query without a positive channel attends to all keys alike
    "identity": lambda x: x,
}


def feature_map(feature: Feature) -> Callable[[Tensor], Tensor]:
    """The function of a name ("elu": elu + 1, "relu": relu + 1e-6, "identity"), or the function itself.

    Raises: ConfigError for an unknown name.
    """
    if not isinstance(feature, str):
        return feature
    if feature not in FEATURES:
        raise ConfigError(f"there is no feature map {feature!r}; {nearest(feature, FEATURES)}")
    return FEATURES[feature]


def check_kernel(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Bool[Tensor, "B M"] | None:
    """The door: `check_qkv`, and the keys that a padding mask keeps, None for all.

    Raises: ShapeError as `check_qkv`; UnsupportedError for other masks.
    """
    check_qkv(name, q, k, v)
    kinds = mask.kinds if mask is not None else frozenset()
    if wrong := sorted(kinds - {"padding"}):
        raise UnsupportedError(f"{name} cannot apply a {' or '.join(wrong)} mask (it can: padding)")
    return mask.keep if mask is not None else None


def divide(x: Tensor, normaliser: Tensor) -> Tensor:
    """x / normaliser; x where the normaliser is 0 (x is 0 there, for features that are not negative)."""
    return x / normaliser.masked_fill(normaliser == 0, 1.0)


def narrow(x: Tensor, like: Tensor) -> Tensor:
    """Factors of a product in bfloat16 where `like` is; else as they are (float16 would overflow in a long sum)."""
    return x.to(like.dtype) if like.dtype == torch.bfloat16 else x


def kernel_weights(
    fq: Float[Tensor, "B H N r"], fk: Float[Tensor, "B H M r"], eps: float | Tensor
) -> Float[Tensor, "B H N M"]:
    """The plain form: features of queries and keys (0 for hidden keys) to weights; rows sum to 1 for eps = 0."""
    a = fq @ fk.mT
    return divide(a, a.sum(-1, keepdim=True) + eps)


def kernel_product(
    fq: Float[Tensor, "B H N r"], fk: Float[Tensor, "B H M r"], v: Float[Tensor, "B H M e"], eps: float | Tensor
) -> Float[Tensor, "B H N e"]:
    """`kernel_weights(fq, fk, eps) @ v` in linear time; features in float32 at least, the result in the dtype of v."""
    normaliser = (fq * fk.sum(-2, keepdim=True)).sum(-1, keepdim=True) + eps
    values = v if v.dtype == torch.bfloat16 else v.to(fq.dtype)
    out = narrow(fq, v) @ (narrow(fk, v).mT @ values)
    return divide(out, normaliser).to(v.dtype)


class Positions(nn.Module):
    """A learned vector for every token, added to the keys; starts at 0.

    cells (H, cells, d) lie on the build grid, rows first, and are resampled (bicubic) for another; extra
    (H, prefix + suffix, d) or None belongs to the extra tokens.
    """

    def __init__(self, site: Site, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.cells = nn.Parameter(torch.empty(site.heads, grid.cells, site.width))
        self.extra = nn.Parameter(torch.empty(site.heads, grid.extra, site.width)) if grid.extra else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All to 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def no_weight_decay(self) -> set[str]:
        """All of them, as for position embeddings."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, grid: Grid) -> Float[Tensor, "H N d"]:
        """The vectors in token order. Raises: GridError for other numbers of extra tokens than at the build."""
        check_extra("positions", self.grid, grid)
        cells = resample(self.cells, self.grid, grid)
        if self.extra is None:
            return cells
        first, last = self.extra.split([grid.prefix, grid.suffix], dim=1)
        return torch.cat([first, cells, last], 1)


def check_extra(what: str, built: Grid, grid: Grid) -> None:
    """Raises GridError unless a grid has the extra tokens of the build grid."""
    if grid.prefix != built.prefix or grid.suffix != built.suffix:
        raise GridError(f"{what} were built for {built}, not for {grid}; extra tokens must be the same")


class HeadConv(nn.Conv2d):
    """A depth-wise convolution with bias of the values' width, the same for all heads, on the cells of the grid."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__(width, width, kernel, padding=kernel // 2, groups=width)

    def forward(self, v: Float[Tensor, "B H N d"], grid: Grid) -> Float[Tensor, "B H N d"]:  # type: ignore[override]
        """Extra tokens get zeros."""
        extra, cells = grid.to_map(v)
        out = super().forward(cells.flatten(0, 1)).unflatten(0, v.shape[:2])
        return grid.from_map(torch.zeros_like(extra), out)


class LocalMixer(HeadMixer):
    """A layer with one more branch beside the operator: `local` maps (values, grid) to values (B, H, N, e)."""

    def __init__(self, config, site: Site, shared: nn.Module | None, local: nn.Module) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config, site, shared)
        self.local = local

    def beside(self, x: Tensor, out: Tensor, v: Tensor | None, grid: Grid, mask: Mask | None) -> Tensor:
        out = super().beside(x, out, v, grid, mask)
        keep = mask.keep if mask is not None else None
        return out + self.local(only_kept(cast(Tensor, v), keep), grid).transpose(1, 2).flatten(2)


def refuse_cross(name: str, field: str) -> UnsupportedError:
    """The error about a branch that adds values at their own place."""
    return UnsupportedError(f"{name} with {field} adds values at their own place: cross-attention needs it off")


def check_kernel_size(name: str, field: str, kernel: int) -> None:
    """Raises ConfigError unless a kernel is 0 (none) or odd."""
    if kernel < 0 or (kernel and kernel % 2 == 0):
        raise ConfigError(f"{name}: {field} is the odd kernel of a convolution or 0 for none, not {kernel}")
