"""Focused linear attention: features that keep their length and point more along their largest channels (FLatten).

f_p(x) = |x| x^p / |x^p| of x = (relu(x) + 1e-6) / softplus(sigma), then linear attention (Han et al. 2023, Eq. 5-9).
Lengths are over the channels of all heads together. A learned position embedding is added to every key. Prefix and
suffix tokens are queries and keys like all others, with their own embeddings; the local branch gives them zeros.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Cost, Inputs, Mask, Operator, Site, only_kept, operator_function

from .linear import Linear
from .shared.checks import padding_only
from .shared.kernel_features import (
    KeyPositions,
    LocalConfig,
    feature_map,
    kernel_product,
    kernel_weights,
)
from .shared.precision import upcast, without_autocast

__all__ = ["FLatten", "flatten", "flatten_reference"]

AXES = {"channels": (1, 3), "head": (3,)}


@operator_function
def flatten_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], *, power: float = 3.0,
    over: str = "channels", spread: Float[Tensor, "H 1 d"] | None = None, eps: float = 1e-6, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """All N x M weights f_p(q_i).f_p(k_j), divided by the sum of their row + eps."""
    keep = padding_only("flatten", mask).keep

    def focus(x: Tensor) -> Tensor:
        x = F.relu(x) + 1e-6
        x = x if spread is None else x / spread
        length, y = torch.linalg.vector_norm, (x / x.amax(AXES[over], keepdim=True)) ** power  # a factor cancels
        return length(x, dim=AXES[over], keepdim=True) * y / length(y, dim=AXES[over], keepdim=True)

    return kernel_weights(focus(q), only_kept(focus(only_kept(k, keep)), keep), eps) @ only_kept(v, keep)


@operator_function
def flatten(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], *, power: float = 3.0,
    over: str = "channels", spread: Float[Tensor, "H 1 d"] | None = None, eps: float = 1e-6, mask: Mask | None = None,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same in linear time; powers are of x / max(x), so that none overflows.

    power: p. over: lengths over the "channels" of all heads, as published, or over each "head". spread: positive
    divisor of the features. eps: added to the normaliser. mask: padding only; a query whose keys are all hidden gets
    zeros. Features and normalisers are in float32 for half precision. execution: as of `linear`.
    Raises: ShapeError if q, k and v do not fit together, UnsupportedError for other masks or an execution that cannot
    run here, ConfigError for another value of `over` or an unknown execution.
    """
    keep = padding_only("flatten", mask).keep
    if over not in AXES:
        raise ConfigError(f"over is channels or head, not {over!r}")
    with without_autocast(q.device):
        fk = only_kept(focus_features(upcast(only_kept(k, keep)), power, over, spread), keep)
        fq = focus_features(upcast(q), power, over, spread)
        return kernel_product(fq, fk, only_kept(v, keep), eps, execution)


def focus_features(
    x: Float[Tensor, "B H N d"], power: float, over: str, spread: Float[Tensor, "H 1 d"] | None
) -> Float[Tensor, "B H N d"]:
    """The features f_p(x)."""
    x = feature_map("relu")(x)
    x = x if spread is None else x / spread
    all_heads = over == "channels"
    largest = x.detach().amax(-1, keepdim=True)  # cancels in the result
    largest = largest.amax(1, keepdim=True) if all_heads else largest
    x = x / largest
    y = x**power
    # the last axis first: one reduction over both axes is several times slower
    squares = [z.square().sum(-1, keepdim=True) for z in (x, y)]
    sum_x, sum_y = (z.sum(1, keepdim=True) if all_heads else z for z in squares)
    return y * (largest * (sum_x / sum_y).sqrt())


@dataclass(frozen=True, kw_only=True)
class FLatten(LocalConfig):
    """power: p. over: lengths over the "channels" of all heads, as published, or over each "head".

    position: whether a learned position embedding, 0 at the start, is added to every key; it is resampled for another
    grid. local: kernel of the depth-wise convolution of the values that all heads share, 0 = none. The paper's layer is
    FLatten(local=5); comparisons of attention alone do not have it. eps: added to the normaliser.
    """

    power: float = 3.0
    over: Literal["channels", "head"] = "channels"
    position: bool = True
    local: int = 0
    eps: float = 1e-6

    card = replace(
        Linear.card, title="Focused linear attention", source="Han et al. 2023 (FLatten), Eq. 5-9",
        formula="f(q) (f(k)^T v) / (f(q) . sum f(k)),  f(x) = |relu(x)| relu(x)^p / |relu(x)^p|",
        prefix="like all tokens, with their own position embeddings",
    )  # fmt: skip
    samples = ("FLatten()", "FLatten(local=5, power=4.0, position=False)", 'FLatten(over="head", position=False)')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power <= 0 or self.eps < 0:
            raise ConfigError(f"power is positive and eps at least 0, not power={self.power}, eps={self.eps}")

    def operator(self, site: Site) -> "FLattenOperator":
        return FLattenOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        keys = site.tokens("k")
        params = site.inner * (1 + (keys if self.position else 0))
        return Cost(params, (site.grid.tokens + keys) * site.inner * site.width)


class FLattenOperator(Operator):
    """sigma (H, 1, d), starts at 0; positions of the keys, or None. execution: see `linear`."""

    def __init__(self, config: FLatten, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.sigma = nn.Parameter(torch.empty(site.heads, 1, site.width))
        self.positions = KeyPositions(site, site.memory or site.grid) if config.position else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sigma to 0."""
        nn.init.zeros_(self.sigma)

    def no_weight_decay(self) -> set[str]:
        """sigma, which scales features like the weight of a normalisation."""
        return {"sigma"}

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = flatten_reference if plain else partial(flatten, execution=self.execution)
        config, k = self.config, inputs.k
        k = k if self.positions is None else k + self.positions(inputs.key_grid).to(k.dtype)
        scales = F.softplus(self.sigma)
        return form(
            inputs.q, k, inputs.v, power=config.power, over=config.over, spread=scales, eps=config.eps, mask=inputs.mask
        )
