"""Cross-covariance attention: channels of a head attend to each other (XCiT, El-Nouby et al. 2021, Eq. 3).

q and k are l2-normalised along the tokens; the (d, d) map costs O(N C d) and has no attention map between tokens.
Prefix and suffix tokens are samples of the covariance like all others.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, Cost, Grid, Inputs, Mask, Operator, Site, operator_function
from regard.core.errors import UnsupportedError

from .shared.heads import HeadMixerConfig

__all__ = ["XCA", "xca", "xca_reference"]


@operator_function
def xca_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N d"],
    temperature: Float[Tensor, "H 1 1"],
) -> Float[Tensor, "B H N d"]:  # fmt: skip
    """(softmax(temperature * unit(q)^T unit(k)) v^T)^T; unit: each channel has length 1 along the tokens."""
    q, k = F.normalize(q.mT, dim=-1), F.normalize(k.mT, dim=-1)
    return ((q @ k.mT * temperature).softmax(-1) @ v.mT).mT


@operator_function
def xca(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N d"],
    temperature: Float[Tensor, "H 1 1"],
) -> Float[Tensor, "B H N d"]:  # fmt: skip
    """The same, normalised after the product: rows and columns of the (d, d) map are divided by the lengths.

    temperature multiplies the logits (the paper's Eq. 3 divides by its inverse).
    Raises: ShapeError if the shapes of q, k and v differ or temperature is not (H, 1, 1).
    """
    if q.dtype == torch.float16:  # an unnormalised product could overflow
        q, k = (F.normalize(x.float(), dim=-2).half() for x in (q, k))
        logits = (q.mT @ k).float()
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        rows, columns = (x.to(wide).square().sum(-2).clamp_min(1e-24).rsqrt() for x in (q, k))
        logits = (q.mT @ k).to(wide) * rows[..., :, None] * columns[..., None, :]
    return v @ (logits * temperature).softmax(-1).to(v.dtype).mT


@dataclass(frozen=True, kw_only=True)
class XCA(HeadMixerConfig):
    """decay_temperature: whether weight decay also acts on the temperature, as in XCiT's own training runs."""

    decay_temperature: bool = False

    card = Card(
        title="Cross-covariance attention", source="El-Nouby et al. 2021 (XCiT), Eq. 3",
        formula="v softmax(T unit(q)^T unit(k))^T", complexity="O(N C d)", query_content=True, key_content=True,
        dynamic="one-step", scaling=frozenset({"compression"}), expert_type="linear layer over channels",
        expert_count="1", construction="channel correlation", topology="all-to-one", conditions="Q, K",
        prefix="samples of the covariance like all tokens", row_maps=False,
    )  # fmt: skip
    depth = True
    ordered = False
    samples = ("XCA()",)

    def operator(self, site: Site) -> "XCAOperator":
        return XCAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        return Cost(site.heads, 2 * site.grid.tokens * site.inner * site.width)


class XCAOperator(Operator):
    """temperature (H, 1, 1), starts at 1; it is not clamped."""

    def __init__(self, config: XCA, site: Site) -> None:
        super().__init__()
        self.config = config
        self.temperature = nn.Parameter(torch.empty(site.heads, 1, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All temperatures to 1."""
        nn.init.ones_(self.temperature)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to keep out of weight decay."""
        return set() if self.config.decay_temperature else {"temperature"}

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        return (xca_reference if plain else xca)(inputs.q, inputs.k, inputs.v, self.temperature)

    def weights(
        self, q: Tensor | None, k: Tensor | None, v: Tensor, *, grid: Grid, memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:  # fmt: skip
        """Raises: UnsupportedError always; the map is between channels."""
        raise UnsupportedError("XCA mixes channels and has no map between tokens; choose layers of another mechanism")
