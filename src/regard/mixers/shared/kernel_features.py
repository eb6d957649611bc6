"""Linear attention with feature maps: the normalised product, position embeddings of the keys, a local branch.

a_ij = f(q_i) . g(k_j) / (f(q_i) . sum_j g(k_j) + eps); the fast form never computes the N x M matrix. Normalisers are
in float32 for half precision. Keys hidden by padding may hold any value, also infinity: they are replaced before use. A
query whose normaliser is 0 gets zeros.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Cost, Grid, Mask, Site, hide, nearest
from regard.mixers.static_keys.grids import resample

from .checks import check_odd_kernel, check_prefix_suffix
from .executions import LINEAR
from .heads import HeadMixer, HeadMixerConfig, convolve
from .routed_attention import names_triton
from .tiles import join_tokens

Feature = str | Callable[[Tensor], Tensor]


def _elu(x: Tensor) -> Tensor:
    """elu(x) + 1. Compiled, the gradient of torch's elu fails on transposed heads; in eager mode torch's is faster."""
    return x.clamp_max(0).exp() + F.relu(x) if torch.compiler.is_compiling() else F.elu(x) + 1


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": _elu,
    "relu": lambda x: F.relu(x) + 1e-6,  # a query without a positive channel attends to all keys equally
    "identity": lambda x: x,
}


def feature_map(feature: Feature) -> Callable[[Tensor], Tensor]:
    """The function of a name ("elu": elu + 1, "relu": relu + 1e-6, "identity"), or the function itself.

    Raises: ConfigError for an unknown name.
    """
    if not isinstance(feature, str):
        return feature
    if feature not in FEATURES:
        raise ConfigError(f"unknown feature map {feature!r}; {nearest(feature, FEATURES)}")
    return FEATURES[feature]


def safe_divide(x: Tensor, normaliser: Tensor) -> Tensor:
    """x / normaliser, and x where the normaliser is 0 (for features that are not negative x is 0 there)."""
    return x / normaliser.masked_fill(normaliser == 0, 1.0)


def bfloat16_like(x: Tensor, like: Tensor) -> Tensor:
    """x in bfloat16 where `like` is bfloat16, else unchanged: in float16 a long sum would overflow."""
    return x.to(like.dtype) if like.dtype == torch.bfloat16 else x


def kernel_weights(
    fq: Float[Tensor, "B H N r"], fk: Float[Tensor, "B H M r"], eps: float | Tensor
) -> Float[Tensor, "B H N M"]:
    """The weights of features of queries and keys (0 for hidden keys), plain form; rows sum to 1 for eps = 0."""
    a = fq @ fk.mT
    return safe_divide(a, a.sum(-1, keepdim=True) + eps)


def kernel_product(
    fq: Float[Tensor, "B H N r"], fk: Float[Tensor, "B H M r"], v: Float[Tensor, "B H M e"], eps: float,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """`kernel_weights(fq, fk, eps) @ v` in linear time; features in float32 at least, the result in the dtype of v."""
    if takes_triton(execution, v):
        return triton_product(fq, fk, v, eps)
    normaliser = (fq * fk.sum(-2, keepdim=True)).sum(-1, keepdim=True) + eps
    values = v if v.dtype == torch.bfloat16 else v.to(fq.dtype)
    out = bfloat16_like(fq, v) @ (bfloat16_like(fk, v).mT @ values)
    return safe_divide(out, normaliser).to(v.dtype)


def takes_triton(execution: str, v: Tensor) -> bool:
    """Whether linear attention runs as a Triton kernel. Raises: as `names_triton`."""
    return names_triton(LINEAR, "products", execution, v)


def triton_product(
    q: Tensor, k: Tensor, v: Tensor, eps: float, feature: str = "identity", keep: Tensor | None = None
) -> Tensor:
    """`linear_triton.linear_product`, imported where it runs, since Triton is not everywhere."""
    from .linear_triton import linear_product

    return linear_product(q, k, v, eps, feature, keep)


class KeyPositions(nn.Module):
    """A learned position embedding that is added to the keys; starts at 0.

    cells (H, cells, d) belong to the patch tokens of the build grid in row-major order and are resampled (bicubic) for
    another grid; extra (H, prefix + suffix, d), or None, belongs to the prefix and suffix tokens.
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
        """All parameters: they are position embeddings."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, grid: Grid) -> Float[Tensor, "H N d"]:
        """The vectors in token order. Raises: GridError for other prefix or suffix tokens than at the build."""
        check_prefix_suffix("positions", self.grid, grid)
        return join_tokens(cast(Tensor, self.extra), resample(self.cells, self.grid, grid), grid)


class _OverHeads:
    """A convolution of the values on the grid, the same for all heads."""

    def forward(self, v: Float[Tensor, "B H N d"], grid: Grid) -> Float[Tensor, "B H N d"]:
        """v convolved; zeros for prefix and suffix tokens."""
        extra, cells = grid.to_map(v)
        run = super().forward  # type: ignore[misc]
        out = convolve(cast(nn.Module, self), cells.flatten(0, 1), run).unflatten(0, v.shape[:2])
        return grid.from_map(torch.zeros_like(extra), out)


class _HeadConv2d(_OverHeads, nn.Conv2d):  # type: ignore[misc]
    pass


class _HeadConv3d(_OverHeads, nn.Conv3d):  # type: ignore[misc]
    pass


def head_conv(site: Site, kernel: int) -> nn.Module:
    """A depth-wise convolution with bias on the site's grid, as wide as the values of a head."""
    kind = _HeadConv2d if site.grid.depth == 1 else _HeadConv3d
    return kind(site.width, site.width, kernel, padding=kernel // 2, groups=site.width)


def head_conv_cost(site: Site, kernel: int) -> Cost:
    """Of `head_conv`, applied to every head."""
    taps = kernel ** len(site.grid.sides)
    return Cost(site.width * (taps + 1), site.grid.cells * site.inner * taps) if kernel else Cost()


class LocalMixer(HeadMixer):
    """A layer with one more branch in parallel: `local` maps (values, grid) to values (B, H, N, e)."""

    def __init__(self, config, site: Site, shared: nn.Module | None, local: nn.Module) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config, site, shared)
        self.local = local

    def add_branches(self, x: Tensor, out: Tensor, v: Tensor | None, grid: Grid, mask: Mask | None) -> Tensor:
        out = super().add_branches(x, out, v, grid, mask)
        return out + self.local(hide(cast(Tensor, v), mask), grid).transpose(1, 2).flatten(2)


class LocalConfig(HeadMixerConfig):
    """Linear attention with two fields that subclasses declare.

    position: whether a learned embedding is added to every key. local: kernel of the convolution of the values that all
    heads share, 0 = none.
    """

    position: bool
    local: int
    masks = frozenset({"padding"})
    depth = True
    cross = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd_kernel(type(self).__name__, "local", self.local)

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return bool(self.local or self.position)

    @property
    def refuses_cross(self) -> str:
        return "its local branch needs one grid; give local=0" if self.local else ""

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        if self.local:
            return LocalMixer(self, site, shared, head_conv(site, self.local))
        return super().build(site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        return super().cost(site, accounting) + head_conv_cost(site, self.local)
