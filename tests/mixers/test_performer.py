"""Performer: an unbiased estimate of softmax attention, its features, hidden keys."""

import math

import pytest
import torch

from operators import check_error, draw_qkv
from regard.core import ConfigError, Grid, ShapeError, Site
from regard.mixers.performer import Performer, orthogonal_features, performer
from regard.mixers.softmax import softmax_reference

F64 = torch.float64


def tensors(n=13, m=9, d=8, e=5, r=24):
    return *draw_qkv(n, m, d, e), orthogonal_features(r, d, dtype=F64)


def test_the_equation_without_stabiliser():
    """Lemma 1: exp(W x - |x|^2 / 2); the largest exponents cancel for eps = 0."""
    q, k, v, features = tensors()
    phi = lambda x: (x @ features.mT - x.square().sum(-1, keepdim=True) / 2).exp()  # noqa: E731
    a = phi(q * 8**-0.25) @ phi(k * 8**-0.25).mT
    assert torch.allclose(performer(q, k, v, features, eps=0.0), a / a.sum(-1, keepdim=True) @ v, atol=1e-12)


def test_the_error_falls_with_the_number_of_features():
    """Section 4.9: unbiased, error like r^-1/2: 64 times the features, about an eighth of the error."""
    torch.manual_seed(3)
    q, k, v, _ = tensors()
    q, k = q / 2, k / 2
    exact = softmax_reference(q, k, v)
    error = {}
    for r in (64, 4096):
        draws = [performer(q, k, v, orthogonal_features(r, 8, dtype=F64), eps=0.0) - exact for _ in range(6)]
        error[r] = torch.stack(draws).square().mean().sqrt().item()
    assert 4 < error[64] / error[4096] < 16
    assert error[4096] < 0.02


def test_orthogonal_features_are_haar_distributed():
    """Fact 10: a plain QR is biased. Under Haar the mean of the diagonal of the orthogonal matrices is 0."""
    features = orthogonal_features(8 * 4000, 8, dtype=F64).unflatten(0, (4000, 8))
    units = features / features.norm(dim=-1, keepdim=True)
    assert torch.allclose(units @ units.mT, torch.eye(8, dtype=F64).expand(4000, 8, 8), atol=1e-9)
    diagonal = torch.diagonal(units, dim1=-2, dim2=-1).mean(0)
    assert diagonal.abs().max() < 5 * math.sqrt(1 / 8 / 4000)
    assert abs(features.norm(dim=-1).square().mean() - 8) < 0.15


def test_features_that_do_not_fill_a_block():
    assert orthogonal_features(11, 8).shape == (11, 8)
    assert orthogonal_features(3, 8).shape == (3, 8)
    first, second = (orthogonal_features(11, 8, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_inputs_stay_finite(dtype):
    q, k, v, features = (x.to(dtype) for x in tensors())
    out = performer(100 * q, 100 * k, v, features)
    assert out.dtype == dtype
    assert out.isfinite().all()


def test_layers_draw_their_own_features_and_save_them():
    site = Site(16, 2, Grid(3, 5))
    first, second = Performer().operator(site), Performer().operator(site)
    assert first.features.shape == (int(8 * math.log(8)), 8)
    assert not torch.equal(first.features, second.features)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.features, second.features)
    second.redraw(torch.Generator().manual_seed(1))
    assert not torch.equal(first.features, second.features)
    assert not list(first.parameters())


def test_macs_are_4_n_r_c():
    assert Performer().number(64) == 266
    site = Site(192, 3, Grid(14, 14, prefix=1))
    cost = Performer(features=256).operator_cost(site, "paper")
    assert cost.macs == 4 * 197 * 256 * 192
    assert Performer(features=256).operator_cost(site).macs == cost.macs + 197 * 256 * 3
    assert cost.params == 0


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, k, v, features = tensors()
    check_error(ShapeError, "features has width 7, q has 8", performer, q, k, v, features[:, 1:])
    check_error(ConfigError, "kernel is softmax or relu", performer, q, k, v, features, kernel="elu")
