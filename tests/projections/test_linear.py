"""Roles of a fused linear layer: only the rows that are asked for, unless a tool has changed the layer."""

import pytest
import torch
from torch import nn

from operators import count_flops
from regard.core import Grid, Site, heads
from regard.projections.linear import LinearQKV, project_roles

SITE = Site(dim=12, heads=3, grid=Grid(2, 3))


class Doubled(nn.Module):
    """A wrapper, as an adapter is: it gives all roles, twice."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


@pytest.fixture
def fused() -> nn.Linear:
    torch.manual_seed(0)
    linear = LinearQKV().build(SITE, "qkv").double()
    nn.init.normal_(linear.bias)
    return linear


def test_it_is_a_plain_linear_layer_with_a_bias_of_zero() -> None:
    linear = LinearQKV().build(SITE, "qv")
    assert type(linear) is nn.Linear
    assert linear.weight.shape == (24, 12)
    assert 0.25 < linear.weight.abs().max() <= 12**-0.5
    assert not linear.bias.any()


@pytest.mark.parametrize("roles", ["qkv", "q", "kv", "vq", ""])
def test_roles_are_blocks_of_rows(fused: nn.Linear, roles: str) -> None:
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    blocks = dict(zip("qkv", fused(x).chunk(3, -1), strict=True))
    found = project_roles(fused, x, "qkv", roles, 3)
    for role, y in zip(roles, found, strict=True):
        torch.testing.assert_close(y, heads(blocks[role], 3))
    assert count_flops(lambda: project_roles(fused, x, "qkv", roles, 3)) == 2 * 2 * 6 * 12 * 12 * len(roles)


def test_rows_by_head_are_taken_from_every_head(fused: nn.Linear) -> None:
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    (v, q) = project_roles(fused, x, "qkv", "vq", 3, by_head=True)
    of_head = fused(x)[..., 12:24]  # the second of three heads: q, k and v, 4 wide each
    torch.testing.assert_close(q[:, 1], of_head[..., :4])
    torch.testing.assert_close(v[:, 1], of_head[..., 8:])


def test_what_a_tool_has_put_there_computes_all_roles(fused: nn.Linear) -> None:
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    (plain,) = project_roles(fused, x, "qkv", "k", 3)
    (wrapped,) = project_roles(Doubled(fused), x, "qkv", "k", 3)
    torch.testing.assert_close(wrapped, 2 * plain)
    fused.register_forward_hook(lambda module, args, out: 3 * out)
    (hooked,) = project_roles(fused, x, "qkv", "k", 3)
    torch.testing.assert_close(hooked, 3 * plain)
