"""Queries, keys and values from three matrices, for hosts that have them apart."""

from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Projection, Site, heads


class SeparateProjection(Projection):
    """Linear children q, k and v, as far as the roles ask for them: `LinearQKV` in a host that names them apart.

    biases: the roles that have a bias.
    """

    def __init__(self, site: Site, roles: str, biases: str) -> None:
        super().__init__()
        self.roles, self.heads = roles, site.heads
        for role in roles:
            self.add_module(role, nn.Linear(site.dim, site.inner, bias=role in biases))

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        return tuple(heads(self.get_submodule(role)(x), self.heads) for role in roles)


def biased(**linears: nn.Linear) -> str:
    """The roles whose matrix has a bias, such as "qv" in a host without key bias."""
    return "".join(role for role, linear in linears.items() if linear.bias is not None)
