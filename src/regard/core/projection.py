"""The contract of projections: from tokens to the queries, keys and values that a mechanism uses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .cost import Cost
from .site import Site
from .tensors import is_exporting
from .validation import check_fields


def heads(x: Float[Tensor, "B N HD"], number: int) -> Float[Tensor, "B H N d"]:
    """Split channels into heads."""
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def merge(x: Float[Tensor, "B H N e"]) -> Float[Tensor, "B N HE"]:
    """The inverse of `heads`."""
    x = x.transpose(1, 2)
    if is_exporting():  # the graph may get x in another memory format than its trace
        x = x.clone(memory_format=torch.contiguous_format)
    return x.flatten(2)


class Projection(nn.Module):
    """Computes q, k and v; built for some of these roles, it computes any subset of them."""

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        """roles: a subset of those it was built with, such as "qv"; the result has one tensor for each, in that order.

        Cross-attention asks for "q" of one input and "kv" of another.
        """
        raise NotImplementedError

    def adopt_linear(self, weight: Float[Tensor, "R_inner C"], bias: Float[Tensor, " R_inner"] | None) -> bool:
        """Start, in place, from a host's fused linear projection with the rows of this one's roles; False if it cannot.

        A swap calls it if the host's weights do not fit this projection's parameters.
        """
        return False


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig(ABC):
    """Describes a projection; any projection can be used with any mechanism on heads.

    Raises: ConfigError for a field whose value its annotation does not allow.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> nn.Module:
        """A `Projection`, or one layer from x (B, N, C) to the roles side by side (B, N, R * inner), in their order.

        shared: what `shared` returned, when the layers of a model have parameters in common.
        """

    @abstractmethod
    def cost(self, site: Site, roles: str) -> Cost:
        """Parameters and MACs of one sample, without the parameters that layers share.

        Each role has `site.tokens(role)` tokens: with a `site.memory`, k and v are made from its tokens.
        """

    def shared(self, roles: str) -> nn.Module | None:
        """A module with the parameters that all layers have in common; None if there are none."""
        return None
