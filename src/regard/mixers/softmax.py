"""Softmax attention: softmax(q k^T / sqrt(d)) v (Vaswani et al. 2017), the baseline of all comparisons.

Prefix and suffix tokens are queries and keys like all others.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

from jaxtyping import Float
from torch import Tensor

from regard.core import (
    NO_MASK,
    Card,
    Cost,
    Grid,
    Inputs,
    Mask,
    Operator,
    Site,
    attention_cost,
    hide,
    operator_function,
    softmax_rows,
)

from .shared.heads import HeadMixerConfig
from .shared.sdpa import sdpa

__all__ = ["Softmax", "softmax", "softmax_reference"]


@operator_function
def softmax_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:
    """softmax(scale q k^T + bias) v; scale None = d^-0.5."""
    return softmax_weights(q, k, scale=scale, mask=mask).to(v.dtype) @ hide(v, mask)


@operator_function
def softmax_weights(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], *, scale: float | None = None, mask: Mask | None = None
) -> Float[Tensor, "B H N M"]:
    """softmax(scale q k^T + bias); scale None = d^-0.5."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return softmax_rows((mask or NO_MASK).add_to(q @ hide(k, mask).mT * scale))


@operator_function
def softmax(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:
    """The same through `scaled_dot_product_attention`.

    Keys hidden by padding may hold any value, even NaN.
    Raises: ShapeError if q, k and v do not fit together.
    """
    mask = mask or NO_MASK
    k, v = hide(k, mask), hide(v, mask)
    if mask.kinds == {"causal"} and q.shape[-2] == k.shape[-2]:
        return sdpa(q, k, v, is_causal=True, scale=scale)
    return sdpa(q, k, v, attn_mask=mask.dense(q, k.shape[-2]), scale=scale)


@dataclass(frozen=True, kw_only=True)
class Softmax(HeadMixerConfig):
    """scale: factor of the logits, None = d^-0.5."""

    scale: float | None = None

    card: ClassVar[Card] = Card(
        title="Softmax attention",
        source="Vaswani et al. 2017",
        formula="softmax(q k^T / sqrt(d)) v",
        complexity="O(N^2 C)",
        query_content=True,
        key_content=True,
        dynamic="one-step",
        expert_type="MLP of width N",
        expert_count="1",
        construction="identity",
        topology="all-to-one",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"causal", "padding", "bias"})
    depth: ClassVar[bool] = True
    cross: ClassVar[bool] = True
    ordered: ClassVar[bool] = False
    samples: ClassVar[tuple[str, ...]] = (
        "Softmax()",
        "Softmax(scale=0.7, dwc=3, gate=True)",
    )

    def operator(self, site: Site) -> "SoftmaxOperator":
        return SoftmaxOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        return attention_cost(site.grid.tokens, (site.memory or site.grid).tokens, site.inner)


class SoftmaxOperator(Operator):
    """No parameters."""

    one_by_one: ClassVar[bool] = True

    def __init__(self, config: Softmax) -> None:
        super().__init__()
        self.config, self.scale = config, config.scale

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        if not plain and inputs.mask is None:  # `forward` has checked the rest
            return sdpa(inputs.q, inputs.k, inputs.v, scale=self.scale)
        form = softmax_reference if plain else softmax
        return form(inputs.q, inputs.k, inputs.v, scale=self.scale, mask=inputs.mask)

    def weights(
        self, q: Tensor | None, k: Tensor | None, v: Tensor, *, grid: Grid, memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:  # fmt: skip
        """As in `Operator`, by the formula: without the products of all rows with the identity."""
        return softmax_weights(cast(Tensor, q), cast(Tensor, k), scale=self.scale, mask=mask).to(v.dtype)

    def one_query(
        self, index: int, q: Tensor | None, k: Tensor | None, v: Tensor, *, mask: Mask | None = None
    ) -> Tensor:
        return softmax(cast(Tensor, q), cast(Tensor, k), v, scale=self.scale, mask=mask)
