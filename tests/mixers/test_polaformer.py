"""Polarity-aware linear attention: the two streams, odd widths, the linear gate, counts."""

import pytest
import torch

from operators import check_error, check_hidden, draw_qkv
from regard.core import Grid, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.linear import linear_reference
from regard.mixers.polaformer import PolaFormer, polaformer, polaformer_reference
from regard.testing.subject import gap, perturb

F64 = torch.float64


def tensors(n=13, m=9, d=8, e=8):
    return *draw_qkv(n, m, d, e), torch.rand(2, 1, d, dtype=F64) * 3 + 1


@pytest.mark.parametrize("d", [8, 7])
def test_queries_and_keys_of_one_sign(d):
    """Section 4.4: q, k >= 0: the first half is linear attention with relu^p, the second 0; a sign swaps the halves."""
    q, k, v, power = tensors(d=d, e=d)
    q, k, half = q.abs(), k.abs(), (d + 1) // 2
    plain = linear_reference(q, k, v, feature=lambda x: x.clamp_min(0) ** power, eps=9e-6)
    out = polaformer(q, k, v, power)
    assert torch.allclose(out[..., :half], plain[..., :half], atol=1e-12)
    assert torch.equal(out[..., half:], torch.zeros_like(out[..., half:]))
    turned = polaformer(-q, k, v, power)
    assert torch.allclose(turned[..., half:], plain[..., half:], atol=1e-12)
    assert torch.equal(turned[..., :half], torch.zeros_like(out[..., :half]))


def test_eps_is_added_to_the_mean_over_kept_keys():
    q, k, v, power = tensors()
    q, k = q.abs(), k.abs()
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[:, 4:] = False
    fq, fk = q**power, k[:, :, :4] ** power
    a = fq @ fk.mT / 4
    expected = (a / (a.sum(-1, keepdim=True) + 0.7) @ v[:, :, :4])[..., :4]
    out = check_hidden(lambda k, v: polaformer(q, k, v, power, eps=0.7, mask=Mask(keep=keep)), (k, v), keep)
    assert torch.allclose(out[..., :4], expected, atol=1e-12)
    empty = polaformer(q, k, v, power, eps=0.0, mask=Mask(keep=torch.zeros_like(keep)))
    assert torch.equal(empty, torch.zeros_like(empty))


def test_gradient_of_powers_is_finite_at_zero():
    q, k, v, power = tensors()
    q[:, :, 0] = 0
    k[:, :, :, 0] = 0
    power.requires_grad_()
    q.requires_grad_()
    for grad in torch.autograd.grad(polaformer(q, k, v, power).square().sum(), (q, power)):
        assert grad.isfinite().all()


def test_start_has_power_3_and_ln_2():
    operator = PolaFormer().operator(Site(16, 2, Grid(3, 5))).double()
    q, k, v, _ = tensors(15, 15)
    ln2 = torch.log(torch.tensor(2.0, dtype=F64))
    expected = polaformer_reference(q / ln2, k / ln2, v, torch.full((2, 1, 8), 3.0, dtype=F64))
    assert torch.allclose(operator(q, k, v, grid=Grid(3, 5)), expected, atol=1e-12)


def test_counts_of_the_paper():
    """Section 4.4: 5,722,024 without positions, 6,175,912 with; + 26 d + C^2 + C for the full layer; 4 N d C MACs."""
    site, base = Site(192, 3, Grid(14, 14, prefix=1)), 4 * 192**2 + 4 * 192
    extra = lambda **fields: PolaFormer(**fields).cost(site).params - base  # noqa: E731
    assert 5_717_416 + 12 * extra() == 5_722_024
    assert 5_717_416 + 12 * extra(position=True) == 6_175_912
    assert extra(local=5, gate=True) - extra() == 26 * 64 + 192**2 + 192
    assert PolaFormer().operator_cost(site).macs == 4 * 197 * 64 * 192


def test_gate_is_linear_in_cross_attention_too():
    """Here the gate is the paper's, without SiLU."""
    grid = Grid(3, 5)
    site, x = Site(16, 2, grid, memory=grid), torch.randn(3, 15, 16, dtype=F64)
    gated, plain = (PolaFormer(gate=gate).build_cross(site).double() for gate in (True, False))
    plain.load_state_dict({key: x for key, x in gated.state_dict().items() if not key.startswith("gate")})
    inner = (plain(x, grid, memory=x, memory_grid=grid) - plain.proj.bias) @ plain.proj.weight.inverse().T
    out = gated(x, grid, memory=x, memory_grid=grid)
    assert torch.allclose(out, plain.proj(gated.gate(x) * inner), atol=1e-10)


def test_has_two_maps():
    layer = PolaFormer().build(Site(16, 2, Grid(3, 5))).double()
    with pytest.raises(UnsupportedError, match="two maps"):
        layer.operator.weights(**layer.project_heads(torch.randn(3, 15, 16, dtype=F64), Grid(3, 5)), grid=Grid(3, 5))
    assert not PolaFormer.card.row_maps


def test_odd_width_in_a_layer():
    layer, x = perturb(PolaFormer(local=3, position=True).build(Site(14, 2, Grid(3, 5, 1)))), torch.randn(3, 16, 14)
    assert gap(layer(x.double(), Grid(3, 5, 1)), layer.reference(x.double(), Grid(3, 5, 1))) < 1e-12


@pytest.mark.untyped
def test_wrong_power_says_what_was_expected():
    q, k, v, power = tensors()
    check_error(ShapeError, r"power has shape \(2, 8\); expected \(heads, 1, width\)", polaformer, q, k, v, power[:, 0])
