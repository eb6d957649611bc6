"""Focused linear attention: features that keep their length and point more along their largest channels (FLatten).

f_p(x) = |x| x^p / |x^p| of x = (relu(x) + 1e-6) / softplus(sigma), then linear attention (Han et al. 2023, Eq. 5-9).
Lengths are over the channels of all heads together. A learned position is added to every key. Extra tokens are queries
and keys like any other, with positions of their own; the local branch leaves them out.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Contract, Cost, Grid, Mask, Operator, Site, only_kept
from regard.mixers.shared.heads import CrossMixer, HeadMixer, HeadMixerConfig
from regard.mixers.shared.kernel_features import (
    HeadConv,
    LocalMixer,
    Positions,
    check_kernel,
    check_kernel_size,
    feature_map,
    kernel_product,
    kernel_weights,
    refuse_cross,
)
from regard.mixers.shared.precision import exact_products, wide

__all__ = ["FLatten", "flatten", "flatten_reference"]

AXES = {"channels": (1, 3), "head": (3,)}


def flatten_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    *,
    power: float = 3.0,
    over: str = "channels",
    spread: Float[Tensor, "H 1 d"] | None = None,
    eps: float = 1e-6,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:
    """All N x M weights f_p(q_i).f_p(k_j), divided by the sum of their row + eps."""
    keep = check_kernel("flatten", q, k, v, mask)

    def focus(x: Tensor) -> Tensor:
        x = F.relu(x) + 1e-6
        x = x if spread is None else x / spread
        length = torch.linalg.vector_norm
        return length(x, dim=AXES[over], keepdim=True) * x**power / length(x**power, dim=AXES[over], keepdim=True)

    return kernel_weights(focus(q), only_kept(focus(only_kept(k, keep)), keep), eps) @ only_kept(v, keep)


def flatten(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    *,
    power: float = 3.0,
    over: str = "channels",
    spread: Float[Tensor, "H 1 d"] | None = None,
    eps: float = 1e-6,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:
    """The same in linear time; powers are of x / max(x), so that none overflows.

    power: p. over: lengths over the "channels" of all heads, as published, or over each "head". spread: what divides
    the features, positive. eps: added to the normaliser. mask: padding only; a query whose keys are all hidden gets
    zeros. Features and normalisers are in float32 for half precision.
    Raises: ShapeError if q, k and v do not fit together, UnsupportedError for other masks, ConfigError for an unknown
    word.
    """
    keep = check_kernel("flatten", q, k, v, mask)
    if over not in AXES:
        raise ConfigError(f"over is channels or head, not {over!r}")
    with exact_products(q.device):
        fk = only_kept(focused(wide(only_kept(k, keep)), power, over, spread), keep)
        return kernel_product(focused(wide(q), power, over, spread), fk, only_kept(v, keep), eps)


def focused(
    x: Float[Tensor, "B H N d"], power: float, over: str, spread: Float[Tensor, "H 1 d"] | None
) -> Float[Tensor, "B H N d"]:
    """The features f_p(x)."""
    x = feature_map("relu")(x)
    x = x if spread is None else x / spread
    heads = over == "channels"
    largest = x.detach().amax(-1, keepdim=True)  # it cancels
    largest = largest.amax(1, keepdim=True) if heads else largest
    x = x / largest
    y = x**power
    # the last axis first: a reduction over two axes apart is several times slower
    squares = [z.square().sum(-1, keepdim=True) for z in (x, y)]
    of_x, of_y = (z.sum(1, keepdim=True) if heads else z for z in squares)
    return y * (largest * (of_x / of_y).sqrt())


@dataclass(frozen=True, kw_only=True)
class FLatten(HeadMixerConfig):
    """power: p. over: lengths over the "channels" of all heads, as published, or over each "head".

    position: whether a learned position, 0 at the start, is added to every key; it lies on the build grid and is
    resampled for another. local: kernel of the depth-wise convolution of the values that all heads share, 0 = none; the
    paper's layer is FLatten(local=5), comparisons of attention alone leave it out. eps: added to the normaliser.
    """

    power: float = 3.0
    over: Literal["channels", "head"] = "channels"
    position: bool = True
    local: int = 0
    eps: float = 1e-6

    card: ClassVar[Card] = Card(
        title="Focused linear attention",
        source="Han et al. 2023 (FLatten), Eq. 5-9",
        formula="f(q) (f(k)^T v) / (f(q) . sum f(k)),  f(x) = |x| relu(x)^p / |relu(x)^p|",
        complexity="O(N d C)",
        query_content=True,
        key_content=True,
        scaling=frozenset({"compression"}),
        expert_type="linear layer",
        expert_count="1",
        construction="kernelisation",
        topology="all-to-one",
        conditions="K, V",
        prefix="like any other token, with learned positions of their own",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"padding"})
    cross: ClassVar[bool] = True
    samples: ClassVar[tuple[str, ...]] = (
        "FLatten()",
        "FLatten(local=5, power=4.0, position=False)",
        'FLatten(over="head", position=False)',
    )

    @property
    def contract(self) -> Contract:
        skip = {"cross": "the local branch needs one grid"} if self.local else {}
        return Contract(positions=bool(self.dwc or self.local or self.position), skip=skip)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel_size("FLatten", "local", self.local)
        if self.power <= 0 or self.eps < 0:
            raise ConfigError(f"power is positive and eps at least 0, not power={self.power}, eps={self.eps}")

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        if self.local:
            return LocalMixer(self, site, shared, HeadConv(site.width, self.local))
        return super().build(site, shared)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> CrossMixer:
        if self.local:
            raise refuse_cross("FLatten", "local")
        return super().build_cross(site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        return super().cost(site, accounting) + head_conv_cost(site, self.local)

    def operator(self, site: Site) -> "FLattenOperator":
        return FLattenOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        keys = (site.memory or site.grid).tokens
        params = site.inner * (1 + (keys if self.position else 0))
        return Cost(params, (site.grid.tokens + keys) * site.inner * site.width)


def head_conv_cost(site: Site, kernel: int) -> Cost:
    """A depth-wise convolution with bias of the values' width, applied to every head."""
    return Cost(site.width * (kernel**2 + 1), site.grid.cells * site.inner * kernel**2) if kernel else Cost()


class FLattenOperator(Operator):
    """sigma (H, 1, d), starts at 0; positions of the keys, where asked."""

    def __init__(self, config: FLatten, site: Site) -> None:
        super().__init__()
        self.config = config
        self.sigma = nn.Parameter(torch.empty(site.heads, 1, site.width))
        self.positions = Positions(site, site.memory or site.grid) if config.position else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sigma to 0."""
        nn.init.zeros_(self.sigma)

    def no_weight_decay(self) -> set[str]:
        """sigma scales features, like the weight of a normalisation."""
        return {"sigma"}

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        k = self._placed(k, memory or grid)
        return flatten(cast(Tensor, q), k, cast(Tensor, v), mask=mask, **self._options())

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        k = self._placed(k, memory or grid)
        return flatten_reference(cast(Tensor, q), k, cast(Tensor, v), mask=mask, **self._options())

    def _placed(self, k: Tensor | None, grid: Grid) -> Tensor:
        k = cast(Tensor, k)
        return k if self.positions is None else k + self.positions(grid).to(k.dtype)

    def _options(self) -> dict:
        config = self.config
        return {"power": config.power, "over": config.over, "spread": F.softplus(self.sigma), "eps": config.eps}
