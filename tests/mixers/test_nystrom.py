"""Nystrom attention: when it is softmax attention, the pseudo-inverse, segments, independent samples."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, check_hidden, draw_qkv
from regard.core import ConfigError, Grid, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.nystrom import Nystrom, inverse, nystrom, segment_means
from regard.mixers.softmax import softmax_reference

F64 = torch.float64


def test_all_tokens_as_landmarks_is_softmax():
    """Section 4.10: m = N, exact inverse; with 6, 12, 20 iterations the error falls."""
    q, k, v = draw_qkv(48, 48, d=16)
    exact = softmax_reference(q, k, v)
    assert torch.allclose(nystrom(q, k, v, q, k, iterations=None), exact, atol=1e-9)
    error = [(nystrom(q, k, v, q, k, iterations=i) - exact).abs().max().item() for i in (6, 12, 30)]
    assert error[0] > 10 * error[1]
    assert error[2] < 1e-8


def test_one_landmark_is_attention_of_the_mean_query():
    q, k, v = draw_qkv(13, 13)
    a, b = segment_means(q, 1)[0], segment_means(k, 1)[0]
    expected = softmax_reference(q.mean(2, keepdim=True), k, v).expand(-1, -1, 13, -1)
    assert torch.allclose(nystrom(q, k, v, a, b), expected, atol=1e-12)


def test_samples_are_independent():
    """Fact 11: published code takes the norms' maximum over the batch."""
    q, k, v = draw_qkv(13, 13)
    a, b = segment_means(q, 4)[0], segment_means(k, 4)[0]
    single = tuple(x[1:2] for x in (q, k, v, a, b))
    assert torch.allclose(nystrom(q, k, v, a, b)[1:2], nystrom(*single), atol=1e-12)
    coupled = nystrom(q, k, v, a, b, start="batch")[1:2] - nystrom(*single, start="batch")
    assert coupled.abs().max() > 1e-6


def test_inverse_of_a_matrix_with_an_empty_landmark():
    a = torch.rand(1, 1, 4, 4, dtype=F64) + 2 * torch.eye(4, dtype=F64)
    a[..., 2, :] = 0
    a[..., :, 2] = 0
    assert torch.allclose(inverse(a, 30), torch.linalg.pinv(a), atol=1e-10)
    assert torch.equal(inverse(0 * a, 6), 0 * a)


@pytest.mark.parametrize(("tokens", "m"), [(12, 4), (13, 4), (15, 4), (7, 7), (9, 1)])
def test_segments_that_do_not_divide(tokens, m):
    """The first segments are shorter by a token; every token counts in one segment."""
    x = torch.randn(3, 2, tokens, 5, dtype=F64)
    sizes = [tokens // m] * (m - tokens % m) + [tokens // m + 1] * (tokens % m)
    expected = torch.stack([part.mean(2) for part in x.split(sizes, 2)], 2)
    assert torch.allclose(segment_means(x, m)[0], expected, atol=1e-12)
    keep = torch.rand(3, tokens) > 0.5
    means, nonempty = segment_means(x, m, keep)
    for image in range(3):
        for number, segment in enumerate(torch.arange(tokens).split(sizes)):
            kept = segment[keep[image, segment]]
            assert nonempty[image, number] == bool(len(kept))
            if len(kept):
                assert torch.allclose(means[image, :, number], x[image, :, kept].mean(1), atol=1e-12)
    everything = segment_means(x, m, torch.ones_like(keep))
    assert torch.allclose(everything[0], expected, atol=1e-12)


@pytest.mark.parametrize("landmarks", ["segments", "avg2d"])
def test_hidden_tokens_may_hold_anything(landmarks):
    grid = Grid(4, 6)
    operator = Nystrom(m=6, landmarks=landmarks).operator(Site(16, 2, grid))
    q, k, v = draw_qkv(24, 24)
    keep = torch.ones(3, 24, dtype=torch.bool)
    keep[:, 10:] = False  # some landmarks have no token
    out = check_hidden(partial(operator, grid=grid, mask=Mask(keep=keep)), (k, v), keep, queries=q)
    assert out.isfinite().all()
    empty = operator(*draw_qkv(24, 24), grid=grid, mask=Mask(keep=torch.zeros_like(keep)))
    assert torch.equal(empty, torch.zeros_like(empty))


def test_convolution_along_the_sequence_by_hand():
    """A kernel of one cell takes a head's value of the token before; class and register tokens are in the sequence."""
    grid = Grid(3, 4, 1, 1)
    layer = Nystrom(m=4, kernel=3).build(Site(16, 2, grid)).double()
    x = torch.randn(3, 14, 16, dtype=F64)
    with torch.no_grad():
        layer.local.weight.zero_()
        before = layer(x, grid)
        layer.local.weight[1, 0, 0] = 1  # the second head
        moved = torch.zeros_like(x)
        moved[:, 1:, 8:] = layer.project_heads(x, grid)["v"].transpose(1, 2).flatten(2)[:, :-1, 8:]
        assert torch.allclose(layer(x, grid) - before, F.linear(moved, layer.proj.weight), atol=1e-12)


def test_counts():
    """Section 4.10: 4 N m C + 2 m^2 C + 24 m^3 H MACs; the convolution has H kernel parameters."""
    site = Site(192, 3, Grid(14, 14, prefix=1))
    assert Nystrom(m=49).operator_cost(site).macs == 4 * 197 * 49 * 192 + 2 * 49**2 * 192 + 24 * 49**3 * 3
    assert Nystrom(kernel=33).cost(site).params - Nystrom().cost(site).params == 33 * 3


def test_refusals():
    site = Site(16, 2, Grid(3, 5))
    with pytest.raises(ConfigError, match="m=16, but the site has 15 tokens; choose m between 1 and 15"):
        Nystrom(m=16).operator(site)
    check_error(ConfigError, "windows need landmarks='avg2d'", Nystrom, m=(2, 2))
    with pytest.raises(UnsupportedError, match="Nystrom has no cross-attention: its convolution"):
        Nystrom(m=4, kernel=3).build_cross(site)
    check_error(ConfigError, "iterations is at least 1", Nystrom, iterations=0)


@pytest.mark.untyped
def test_wrong_calls_say_what_was_expected():
    q, k, v = draw_qkv(13, 13)
    check_error(ShapeError, "landmarks_k has m 5, landmarks_q has 4", nystrom, q, k, v, q[:, :, :4], k[:, :, :5])
    check_error(ConfigError, "start is matrix or batch", nystrom, q, k, v, q, k, start="all")
    check_error(ShapeError, "14 segments of 13 tokens", segment_means, q, 14)
