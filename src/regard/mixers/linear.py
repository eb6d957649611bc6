"""Linear attention: softmax replaced by a product of features, phi(q_i).phi(k_j) (Katharopoulos et al. 2020, Eq. 4-7).

o_i = phi(q_i) (sum_j phi(k_j)^T v_j) / (phi(q_i) . sum_j phi(k_j) + eps), phi = elu + 1, in time linear in N.
Prefix and suffix tokens are queries and keys like all others.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Cost, Inputs, Operator, Site, operator_function
from regard.core.mask import Mask, hide, only_kept

from .shared.checks import padding_only
from .shared.heads import HeadMixerConfig
from .shared.kernel_features import (
    Feature,
    feature_map,
    kernel_product,
    kernel_weights,
    takes_triton,
    triton_product,
)
from .shared.precision import upcast, without_autocast

__all__ = ["Linear", "linear", "linear_reference"]


@operator_function
def linear_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], *, feature: Feature = "elu",
    eps: float = 1e-6, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """All N x M weights phi(q_i).phi(k_j), divided by the sum of their row + eps."""
    keep = padding_only("linear", mask).keep
    phi = feature_map(feature)
    return kernel_weights(phi(q), only_kept(phi(only_kept(k, keep)), keep), eps) @ only_kept(v, keep)


@operator_function
def linear(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], *, feature: Feature = "elu",
    eps: float = 1e-6, mask: Mask | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same, the product of keys and values first.

    feature: "elu" (elu + 1), "relu" (relu + 1e-6), "identity" or a function of a tensor that may change the last
    axis only; its values should not be negative. eps: added to the normaliser. mask: padding only; a query whose keys
    are all hidden gets zeros. Normalisers are in float32 for half precision. execution: "products" of PyTorch, "triton"
    for GPUs (named features in the kernel), or "auto", today products.
    Raises: ShapeError if q, k and v do not fit together, UnsupportedError for other masks or an execution that cannot
    run here, ConfigError for an unknown feature or execution.
    """
    keep = padding_only("linear", mask).keep
    phi = feature_map(feature)
    with without_autocast(q.device):
        if isinstance(feature, str) and takes_triton(execution, v):
            return triton_product(q, k, v, eps, feature, keep)
        fk = only_kept(phi(upcast(only_kept(k, keep))), keep)
        return kernel_product(phi(upcast(q)), fk, only_kept(v, keep), eps, execution)


@dataclass(frozen=True, kw_only=True)
class Linear(HeadMixerConfig):
    """feature: "elu" is the original elu + 1; "relu" is relu + 1e-6; "identity" leaves q and k unchanged.
    `regard.ops.linear` accepts any function.

    norm: "rms" divides q and k by their root mean square over all channels, with a learned weight for each channel, as
    the linear rows of the MHLA and MiTA comparisons do (with feature="relu"). eps: added to the normaliser.
    """

    feature: Literal["elu", "relu", "identity"] = "elu"
    norm: Literal["", "rms"] = ""
    eps: float = 1e-6

    card = Card(
        title="Linear attention", source="Katharopoulos et al. 2020, Eq. 4-7",
        formula="phi(q) (phi(k)^T v) / (phi(q) . sum phi(k)),  phi = elu + 1", complexity="O(N d C)",
        query_content=True, key_content=True, scaling=frozenset({"compression"}), expert_type="linear layer",
        expert_count="1", construction="kernelisation", topology="all-to-one", conditions="K, V",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    cross = True
    ordered = False
    samples = ("Linear()", 'Linear(feature="relu", norm="rms", dwc=3)')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps < 0:
            raise ConfigError(f"Linear(eps=) is at least 0, not {self.eps}")

    def operator(self, site: Site) -> "LinearOperator":
        return LinearOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        tokens = site.tokens("q") + site.tokens("k")
        return Cost(2 * site.inner if self.norm else 0, tokens * site.inner * site.width)


class ChannelNorm(nn.Module):
    """Root-mean-square normalisation over the channels of all heads (eps 1e-6); weight (H, 1, d), starts at 1."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(site.heads, 1, site.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N d"]:
        y = upcast(x)
        return (y * (y.square().mean((1, 3), keepdim=True) + 1e-6).rsqrt() * self.weight).to(x.dtype)


class LinearOperator(Operator):
    """q_norm and k_norm; identities without norm="rms". execution: see `linear`."""

    def __init__(self, config: Linear, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.q_norm, self.k_norm = (ChannelNorm(site) if config.norm else nn.Identity() for _ in range(2))

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form, config = linear_reference if plain else partial(linear, execution=self.execution), self.config
        q, k = self.q_norm(inputs.q), self.k_norm(hide(inputs.k, inputs.mask))
        return form(q, k, inputs.v, feature=config.feature, eps=config.eps, mask=inputs.mask)
