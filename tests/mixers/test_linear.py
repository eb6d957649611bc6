"""Linear attention: facts of its equations, features, hidden keys, extreme values."""

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, draw_qkv
from regard.core import ConfigError, Grid, Mask, ShapeError, Site
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_long_sums(dtype):
    """The sum of 20000 features of about 10 leaves float16's range; the normaliser is in float32."""
    q, k, v = (x[:1] for x in draw_qkv(4, 20000, 8, 4, torch.float32))
    out = linear(*(x.to(dtype) for x in (q, 10 + k, 1 + v)))
    assert out.dtype == dtype
    assert (out.float() - linear_reference(q, 10 + k, 1 + v)).abs().max() < 0.02


def test_the_norm_is_counted():
    """The rows of the MHLA comparison: weight C, of q and of k: 2 C parameters a layer."""
    config, site = Linear(feature="relu", norm="rms"), Site(192, 3, Grid(14, 14, prefix=1), qkv_bias=False)
    assert config.cost(site).params == 4 * 192**2 + 192 + 2 * 192


def test_macs_are_2_n_d_c():
    site = Site(192, 3, Grid(14, 14, prefix=1))
    assert Linear().operator_cost(site).macs == 2 * 197 * 64 * 192


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, k, v = draw_qkv()
    check_error(ConfigError, "did you mean elu", linear, q, k, v, feature="elu1")
    check_error(ShapeError, "k has width 7, q has 8", linear, q, k[..., 1:], v)
    with pytest.raises(ShapeError, match="Mask.keep has 8 keys, the operator has 9"):
        linear(q, k, v, mask=Mask(keep=torch.ones(3, 8, dtype=torch.bool)))
    check_error(ConfigError, "norm", Linear, norm="layer")
