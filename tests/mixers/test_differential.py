"""Differential attention: known cases, lambda and its start, counts. Beside timm: testing/external."""

import math

import pytest
import torch

from operators import check_error, check_gradients, draw_qkv
from regard import ConfigError, Differential, Grid, Mask, Site
from regard.core import ShapeError
from regard.ops import differential, differential_reference, softmax_reference
from regard.testing.subject import gap, perturb

F64 = torch.float64


def factor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=F64, requires_grad=True)


@pytest.mark.parametrize("mask", [None, "causal", "padding", "bias"])
def test_the_two_calls_equal_the_difference_of_maps(mask: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in draw_qkv(9, 9))
    keep = torch.arange(9).expand(3, -1) < torch.tensor([9, 4, 0])[:, None]
    masks = {
        "causal": Mask(causal=True), "padding": Mask(keep=keep), "bias": Mask(bias=torch.randn(2, 9, 9, dtype=F64)),
    }  # fmt: skip
    given, value = masks.get(mask or ""), factor(0.6)
    fast, plain = (form(q, k, v, value, mask=given) for form in (differential, differential_reference))
    assert gap(fast, plain) < 1e-12
    check_gradients(fast, plain, (q, k, v, value))
    if mask == "padding":
        assert not fast[2].any()


def test_without_lambda_it_is_softmax_attention_of_the_first_half() -> None:
    torch.manual_seed(0)
    q, k, v = draw_qkv()
    assert gap(differential(q, k, v, factor(0.0)), softmax_reference(q[..., :4], k[..., :4], v)) < 1e-12
    same = torch.cat([q[..., :4]] * 2, -1), torch.cat([k[..., :4]] * 2, -1)
    assert gap(differential(*same, v, factor(1.0)), torch.zeros_like(v[:, :, :1])) < 1e-12
    assert torch.autograd.gradcheck(differential, (*(x[:1, :1, :4].requires_grad_() for x in (q, k, v)), factor(0.3)))


def test_a_layer_element_by_element() -> None:
    """Eq. 1-3 with loops; the third layer starts at 0.8 - 0.6 exp(-0.6)."""
    grid = Grid(2, 3, 1)
    layer = perturb(Differential().build(Site(8, 2, grid, layer=2)))
    x = torch.randn(2, 7, 8, dtype=F64)
    parts, start = layer.operator.factor, 0.8 - 0.6 * math.exp(-0.6)
    value = math.exp((parts.q1 @ parts.k1).item()) - math.exp((parts.q2 @ parts.k2).item()) + start
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)  # (B, N, heads, 4)
    out = torch.zeros(2, 7, 2, 4, dtype=F64)
    for b in range(2):
        for h in range(2):
            for i in range(7):
                a = [
                    torch.stack([q[b, i, h, s] @ k[b, j, h, s] / 2**0.5 for j in range(7)]).exp()
                    for s in (slice(0, 2), slice(2, 4))
                ]
                y = (a[0] / a[0].sum() - value * a[1] / a[1].sum()) @ v[b, :, h]
                out[b, i, h] = y / (y.square().mean() + 1e-5).sqrt() * layer.operator.norm.weight * (1 - start)
    assert gap(layer(x, grid), layer.proj(out.flatten(2))) < 1e-12


def test_lambda_starts_by_layer_and_is_learned() -> None:
    torch.manual_seed(0)
    layers = [Differential().operator(Site(64, 2, Grid(4, 4), layer=i)) for i in (0, 11)]
    assert [round(layer.factor.start, 3) for layer in layers] == [0.2, 0.778]
    assert all(abs(layer.factor().item() - layer.factor.start) < 0.3 for layer in layers)
    assert abs(torch.cat(list(layers[0].factor.parameters())).std() - 0.1) < 0.03
    layers[0](*torch.randn(3, 2, 2, 16, 32), grid=Grid(4, 4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layers[0].parameters())
    assert Differential(start=0.5).operator(Site(64, 2, Grid(4, 4), layer=7)).factor.start == 0.5


def test_cost() -> None:
    site = Site(192, 3, Grid(14, 14, 1))
    cost = Differential().operator_cost(site)
    assert (cost.params, cost.macs) == (4 * 32 + 64, 4 * 197 * 197 * 192)
    assert Differential().operator_cost(site, "paper").macs == 2 * 197 * 197 * 192


def test_what_is_refused() -> None:
    q, k, v = draw_qkv(d=7)
    check_error(ShapeError, "7 channels, which have no halves", differential, q, k, v, factor(0.5))
    check_error(ConfigError, "from 0 to below 1, not 1.0", Differential, start=1.0)
    check_error(ConfigError, "width 5 have no halves", Differential().build, Site(10, 2, Grid(4, 4)))
