"""Linear attention: facts of its equations, features, hidden keys, extreme values."""

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, draw_qkv
from regard.core import ConfigError, Grid, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.linear import Linear, linear, linear_reference

F64 = torch.float64


def test_the_equation_by_hand():
    """Section 4.2: phi(q_i).sum_j phi(k_j)^T v_j / (phi(q_i).sum_j phi(k_j) + eps), one query after another."""
    q, k, v = draw_qkv()
    phi = lambda x: F.elu(x) + 1  # noqa: E731
    out = torch.empty(3, 2, 13, 5, dtype=F64)
    for i in range(13):
        top = torch.einsum("bhr,bhmr,bhme->bhe", phi(q[:, :, i]), phi(k), v)
        out[:, :, i] = top / (torch.einsum("bhr,bhmr->bh", phi(q[:, :, i]), phi(k)) + 0.5)[..., None]
    assert torch.allclose(linear(q, k, v, eps=0.5), out, atol=1e-12)


def test_constant_values_stay_with_eps_0():
    q, k, v = draw_qkv()
    v = torch.full_like(v, 2.5)
    for feature in ("elu", "relu"):
        assert torch.allclose(linear(q, k, v, feature=feature, eps=0.0), v[:, :, :1].expand(-1, -1, 13, -1), atol=1e-12)
    assert (linear(q, k, v, eps=1.0) < 2.5).all()


def test_a_query_without_positive_features_averages():
    """Section 4.2, pitfall: with the pure relu it would be a row of zeros."""
    q, k, v = draw_qkv()
    out = linear(-q.abs(), k, v, feature="relu", eps=0.0)
    total = k.clamp_min(0).sum(-1, keepdim=True) + 8e-6
    assert torch.allclose(out, ((total * v).sum(-2, keepdim=True) / total.sum(-2, keepdim=True)).expand_as(out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_long_sums(dtype):
    """The sum of 20000 features of about 10 leaves float16's range; the normaliser is in float32."""
    q, k, v = (x[:1] for x in draw_qkv(4, 20000, 8, 4, torch.float32))
    out = linear(*(x.to(dtype) for x in (q, 10 + k, 1 + v)))
    assert out.dtype == dtype
    assert (out.float() - linear_reference(q, 10 + k, 1 + v)).abs().max() < 0.02


def test_norm_is_over_all_heads_and_counted():
    """The rows of the MHLA comparison: a root mean square over C, weight C, of q and of k: 2 C parameters a layer."""
    config, site = Linear(feature="relu", norm="rms"), Site(192, 3, Grid(14, 14, prefix=1), qkv_bias=False)
    assert config.cost(site).params == 4 * 192**2 + 192 + 2 * 192
    operator = config.operator(Site(16, 2, Grid(3, 5)))
    q, k, v = draw_qkv(15, 15, 8, 8, dtype=torch.float32)
    over = lambda x: F.rms_norm(x.transpose(1, 2).flatten(2), (16,), eps=1e-6)  # noqa: E731
    split = lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2)  # noqa: E731
    expected = linear_reference(split(over(q)), split(over(k)), v, feature="relu")
    assert torch.allclose(operator(q, k, v, grid=Grid(3, 5)), expected, atol=1e-5)


def test_macs_are_2_n_d_c():
    site = Site(192, 3, Grid(14, 14, prefix=1))
    assert Linear().operator_cost(site).macs == 2 * 197 * 64 * 192


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, k, v = draw_qkv()
    with pytest.raises(UnsupportedError, match=r"linear cannot apply a causal mask \(it can: padding\)"):
        linear(q, k, v, mask=Mask(causal=True))
    check_error(ConfigError, "did you mean elu", linear, q, k, v, feature="elu1")
    check_error(ShapeError, "k has width 7, q has 8", linear, q, k[..., 1:], v)
    with pytest.raises(ShapeError, match="Mask.keep has 8 keys, the operator has 9"):
        linear(q, k, v, mask=Mask(keep=torch.ones(3, 8, dtype=torch.bool)))
    check_error(ConfigError, "norm", Linear, norm="layer")
