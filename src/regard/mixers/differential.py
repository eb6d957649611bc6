"""Differential attention: the difference of two softmax maps (DIFF Transformer, Ye et al. 2024).

    (softmax(q1 k1^T / sqrt(d)) - lambda softmax(q2 k2^T / sqrt(d))) v,   lambda = exp(a1 . b1) - exp(a2 . b2) + start

(Eq. 1 and 2.) q1 and q2 are the halves of a head's queries, of width d, k1 and k2 those of its keys; v has the width
2 d of the whole head. lambda, one number of the layer, is learned through the vectors a and b. Each head's output is
normalised by its root mean square and multiplied by 1 - start (Eq. 3).
Prefix and suffix tokens are queries and keys like all others.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Inputs, Operator, ShapeError, Site, operator_function
from regard.core.cost import Cost, attention_cost
from regard.core.mask import NO_MASK, Mask, hide, softmax_rows

from .shared.heads import HeadMixerConfig
from .shared.precision import upcast
from .softmax import softmax

__all__ = ["Differential", "differential", "differential_reference"]


@operator_function
def differential_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], factor: Float[Tensor, ""], *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """(A1 - factor A2) v with the maps A1 and A2 of the halves of q and k; scale None = (d / 2)^-0.5."""
    scale, mask = _scale(q, scale), mask or NO_MASK
    k, v = hide(k, mask), hide(v, mask)
    first, second = (
        softmax_rows(mask.add_to(x @ y.mT * scale)) for x, y in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
    )
    return (first - factor * second).to(v.dtype) @ v


@operator_function
def differential(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], factor: Float[Tensor, ""], *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same as two calls of `scaled_dot_product_attention`. factor: lambda. mask: all kinds, for both maps.

    The kernels without N x M memory need q as wide as v, so that zeros are appended to the halves.
    Raises: ShapeError for tensors that do not fit, or an odd width of q and k.
    """
    scale = _scale(q, scale)
    zeros = (0, max(v.shape[-1] - q.shape[-1] // 2, 0))
    first, second = (
        softmax(F.pad(x, zeros), F.pad(y, zeros), v, scale=scale, mask=mask)
        for x, y in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
    )
    return first - (factor * second).to(first.dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    if q.shape[-1] % 2:
        raise ShapeError(f"differential: q has {q.shape[-1]} channels, which have no halves")
    return (q.shape[-1] // 2) ** -0.5 if scale is None else scale


@dataclass(frozen=True, kw_only=True)
class Differential(HeadMixerConfig):
    """start: lambda at the start, None = 0.8 - 0.6 exp(-0.3 l) in layer l of the host, from 0. scale: factor of the
    logits, None = (width / 2)^-0.5. norm: whether heads are normalised and multiplied by 1 - start.

    Raises: ConfigError for a start that is not from 0 to below 1; building, for heads of odd width.
    """

    start: float | None = None
    scale: float | None = None
    norm: bool = True

    card = Card(
        title="Differential attention", source="Ye et al. 2024 (DIFF Transformer), Eq. 1-3",
        formula="norm((softmax(q1 k1^T / sqrt(d)) - lambda softmax(q2 k2^T / sqrt(d))) v)", complexity="O(N^2 C)",
        query_content=True, key_content=True, dynamic="one-step", expert_type="MLP of width N", expert_count="2",
        construction="identity", topology="all-to-one", row_maps=False,  # the normalisation is not linear in v
    )  # fmt: skip
    masks = frozenset({"causal", "padding", "bias"})
    depth = True
    cross = True
    ordered = False
    samples = ("Differential()", "Differential(start=0.3, scale=0.7, norm=False, gate=True)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is not None and not 0 <= self.start < 1:
            raise ConfigError(f"Differential: start is lambda at the start, from 0 to below 1, not {self.start}")

    def operator(self, site: Site) -> "DifferentialOperator":
        if site.width % 2:
            raise ConfigError(f"Differential: heads of width {site.width} have no halves; give an even width")
        return DifferentialOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Two attentions, with the zeros; the paper subtracts the maps before one product with the values."""
        parameters = Cost(2 * site.width + site.width * self.norm)
        once = attention_cost(site.tokens("q"), site.tokens("k"), site.inner)
        return parameters + once + (Cost() if accounting == "paper" else once)


class DifferentialOperator(Operator):
    """factor: lambda. norm: of each head, or None."""

    def __init__(self, config: Differential, site: Site) -> None:
        super().__init__()
        self.config = config
        start = 0.8 - 0.6 * math.exp(-0.3 * site.layer) if config.start is None else config.start
        self.factor = Factor(site.width // 2, start)
        self.norm = nn.RMSNorm(site.width, eps=1e-5) if config.norm else None

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = differential_reference if plain else differential
        arguments = (inputs.q, inputs.k, inputs.v, self.factor())
        out = form(*arguments, scale=self.config.scale, mask=inputs.mask)
        return out if self.norm is None else cast(Tensor, self.norm(out)).to(out.dtype) * (1 - self.factor.start)


class Factor(nn.Module):
    """lambda = exp(q1 . k1) - exp(q2 . k2) + start; q1, k1, q2, k2 (d,)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.empty(width)) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.1."""
        for vector in self.parameters():
            nn.init.normal_(vector, std=0.1)

    def forward(self) -> Float[Tensor, ""]:
        """lambda, in float32 at least."""
        q1, k1, q2, k2 = (upcast(x) for x in (self.q1, self.k1, self.q2, self.k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.start
