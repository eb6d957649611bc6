"""Cross-covariance attention, against the plain form and against timm's XCiT."""

import pytest
import torch

from operators import check_error
from regard.core import Grid, Mask, ShapeError, Site, UnsupportedError
from regard.lab.train.optimizer import param_groups
from regard.mixers.xca import XCA, xca, xca_reference
from regard.models.create import create_model
from regard.testing.external import largest
from regard.testing.external.packages import xca_pairs

F64 = torch.float64


def tensors(n=15, heads=2, d=6):
    q, k, v = torch.randn(3, 3, heads, n, d, dtype=F64)
    return q, k, v, torch.rand(heads, 1, 1, dtype=F64) * 5 + 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    args = tensors(n=197, d=32)
    large = [args[0] * 100, args[1] * 100, args[2], args[3]]  # an unnormalised product leaves float16's range
    assert (xca(*[x.to(dtype) for x in large]).double() - xca_reference(*args)).abs().max() < 0.1


def test_zero_queries_average_the_channels():
    q, k, v, t = tensors()
    q = torch.zeros_like(q).requires_grad_()
    out = xca(q, k, v, t)
    assert torch.allclose(out, v.mean(-1, keepdim=True).expand_as(v), atol=1e-12)
    out.sum().backward()
    assert q.grad.isfinite().all()


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


def test_temperature_starts_at_one():
    assert torch.equal(XCA().operator(Site(dim=16, heads=2, grid=Grid(3, 5))).temperature, torch.ones(2, 1, 1))


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
