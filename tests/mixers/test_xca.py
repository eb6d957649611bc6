"""Cross-covariance attention, against the plain form and against timm's XCiT."""

import pytest
import torch

from operators import check_error
from regard.core import Grid, Mask, ShapeError, Site, UnsupportedError
from regard.lab.train.optimizer import param_groups
from regard.mixers.spelling import parse, spell
from regard.mixers.xca import XCA, xca, xca_reference
from regard.models.create import create_model
from regard.testing.external import largest
from regard.testing.external.packages import xca_pairs

F64 = torch.float64
GRIDS = (Grid(3, 5), Grid(4, 6, 2), Grid(3, 5, 1, 2), Grid(1, 12))


def tensors(n=15, heads=2, d=6):
    q, k, v = torch.randn(3, 3, heads, n, d, dtype=F64)
    return q, k, v, torch.rand(heads, 1, 1, dtype=F64) * 5 + 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    args = tensors(n=197, d=32)
    large = [args[0] * 100, args[1] * 100, args[2], args[3]]  # an unnormalised product leaves float16's range
    assert (xca(*[x.to(dtype) for x in large]).double() - xca_reference(*args)).abs().max() < 0.1


def test_channels_of_a_head_by_hand():
    """Two channels, two tokens: q and k unit vectors, so the logits are the temperature times 1 and 0."""
    q = k = 3 * torch.eye(2, dtype=F64)[None, None]
    v = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=F64)[None, None]
    a = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=F64).softmax(-1)
    out = xca(q, k, v, torch.full((1, 1, 1), 2.0, dtype=F64))
    assert torch.allclose(out[0, 0], v[0, 0] @ a.T, atol=1e-12)


def test_lengths_along_tokens_do_not_matter():
    q, k, v, t = tensors()
    assert torch.allclose(xca(q * 7, k * (torch.rand(6, dtype=F64) + 0.1), v, t), xca(q, k, v, t), atol=1e-12)


def test_zero_queries_average_the_channels():
    q, k, v, t = tensors()
    q = torch.zeros_like(q).requires_grad_()
    out = xca(q, k, v, t)
    assert torch.allclose(out, v.mean(-1, keepdim=True).expand_as(v), atol=1e-12)
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_token_order_carries_through():
    q, k, v, t = tensors()
    p = torch.randperm(15)
    assert torch.allclose(xca(q[:, :, p], k[:, :, p], v[:, :, p], t), xca(q, k, v, t)[:, :, p], atol=1e-12)


def test_key_bias_gets_a_gradient():
    """The lengths are taken along tokens, so a constant added to a channel of k does matter."""
    q, k, v, t = tensors()
    bias = torch.zeros(1, 2, 1, 6, dtype=F64, requires_grad=True)
    xca(q, k + bias, v, t).square().sum().backward()
    assert bias.grad.abs().max() > 1e-3


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_equals_timm(qkv_bias, fused):
    pytest.importorskip("timm.models.xcit")
    assert largest(xca_pairs(qkv_bias, fused)) < 1e-12


def test_cost_grows_linearly_with_tokens():
    macs = [XCA().operator_cost(Site(dim=64, heads=4, grid=Grid(n, n))).macs for n in (8, 16)]
    assert macs[1] == 4 * macs[0] == 4 * 2 * 64 * 64 * 16


def test_refuses_masks_and_maps():
    layer = XCA().build(Site(dim=16, heads=2, grid=Grid(3, 5))).double()
    x = torch.randn(2, 15, 16, dtype=F64)
    with pytest.raises(UnsupportedError, match=r"XCA cannot apply a causal mask \(it can: none\)"):
        layer(x, Grid(3, 5), Mask(causal=True))
    check_error(UnsupportedError, "no cross-attention", XCA().build_cross, layer.site)
    with pytest.raises(UnsupportedError, match="mixes channels"):
        layer.operator.weights(**layer.project_heads(x, Grid(3, 5)), grid=Grid(3, 5))
    assert not XCA.card.row_maps


def test_temperature_starts_at_one_and_is_kept_out_of_decay():
    site = Site(dim=16, heads=2, grid=Grid(3, 5))
    operator = XCA().operator(site)
    assert torch.equal(operator.temperature, torch.ones(2, 1, 1))
    assert operator.no_weight_decay() == {"temperature"}
    assert XCA(decay_temperature=True).operator(site).no_weight_decay() == set()
    assert parse(spell(XCA(decay_temperature=True))) == XCA(decay_temperature=True)


@pytest.mark.parametrize("decay", [False, True])
def test_the_optimizer_lets_the_temperature_decay_where_it_should(decay):
    model = create_model("xcit_desk(size=16, patch=4, dim=16, depth=2, heads=2)", XCA(decay_temperature=decay))
    temperatures = {id(value) for name, value in model.named_parameters() if name.endswith("operator.temperature")}
    assert len(temperatures) == 2
    decayed = {id(value) for group in param_groups(model, 0.05) if group["weight_decay"] for value in group["params"]}
    assert len(temperatures & decayed) == (2 if decay else 0)


@pytest.mark.untyped
def test_wrong_shapes_say_what_was_expected():
    q, k, v, t = tensors()
    check_error(ShapeError, "must be equal", xca, q[:, :, 1:], k, v, t)
    check_error(ShapeError, r"temperature has shape \(2,\); expected \(heads, 1, 1\)", xca, q, k, v, t.flatten())
