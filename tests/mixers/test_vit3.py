"""Test-time training: the written-out step against autograd, known cases, counts. The whole block: tests/measure."""

import pytest
import torch
import torch.nn.functional as F

from operators import check_error, check_gradients
from regard import ConfigError, Grid, Site, ViT3
from regard.core import ShapeError, UnsupportedError
from regard.ops import ttt, ttt_conv, ttt_conv_reference, ttt_reference
from regard.testing.subject import gap


def draw(*shape: int, number: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(number)]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("linear", [True, False])
def test_the_explicit_step_equals_autograd(clip: bool, linear: bool) -> None:
    """Fact 4.20."""
    q, k, v = draw(3, 2, 11, 8)
    weights = [w.detach()[0].requires_grad_() for w in draw(1, 2, 8, 8, number=2)][: 1 if linear else 2]
    plain = ttt_reference(q, k, v, *weights, lr=0.7, clip=clip)
    fast = ttt(q, k, v, *weights, lr=0.7, clip=clip)
    assert gap(fast, plain) < 1e-12
    check_gradients(fast, plain, (q, k, v, *weights))


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("batch", [0, 1, 4, 11, 20])
def test_steps_on_mini_batches_equal_autograd(batch: int, linear: bool, squared: bool) -> None:
    q, k, v = draw(3, 2, 11, 8)
    weights = [w.detach()[0].requires_grad_() for w in draw(1, 2, 8, 8, number=2)][: 1 if linear else 2]
    options = {"lr": 0.3, "clip": not (linear and squared), "batch": batch, "squared": squared}
    plain, fast = (form(q, k, v, *weights, **options) for form in (ttt_reference, ttt))
    assert gap(fast, plain) < 1e-11
    check_gradients(fast, plain, (q, k, v, *weights), 1e-10)


def test_ttt_with_one_token_a_step_is_the_delta_rule() -> None:
    """Sun et al. 2024, Eq. 3-4, W_t = W - lr grad |k W - v|^2 / 2, as W (I - lr k k^T) + lr k v^T; the last W reads."""
    q, k, v = draw(3, 2, 11, 8)
    start = torch.randn(2, 8, 8, dtype=torch.float64)
    out = ttt(q, k, v, start, lr=0.1, clip=False, scale=1.0, batch=1, squared=True)
    w = start.expand(3, -1, -1, -1)
    eye = torch.eye(8, dtype=torch.float64)
    for key, value in zip(k.unbind(2), v.unbind(2), strict=True):
        w = (eye - 0.1 * key[..., :, None] * key[..., None, :]) @ w + 0.1 * key[..., :, None] * value[..., None, :]
    assert gap(out, q @ w) < 1e-12


@pytest.mark.parametrize("clip", [True, False])
def test_the_step_of_the_convolution_equals_autograd(clip: bool) -> None:
    q, k, v = draw(3, 4, 5, 7)
    weight = torch.randn(4, 3, 3, dtype=torch.float64)
    fast, plain = (f(q, k, v, weight, lr=0.7, clip=clip) for f in (ttt_conv, ttt_conv_reference))
    assert gap(fast, plain) < 1e-12
    still = ttt_conv(q, k, v, weight, lr=0.0)
    assert gap(still, F.conv2d(q, weight[:, None], padding=1, groups=4)) < 1e-12


def test_a_linear_model_from_zero_is_linear_attention() -> None:
    """Fact 4.20: unnormalised, divided by N."""
    q, k, v = draw(3, 2, 11, 8)
    out = ttt(q, k, v, torch.zeros(2, 8, 8, dtype=torch.float64), clip=False, scale=1.0)
    assert gap(out, q @ (k.mT @ v) / 11) < 1e-12


def test_clipped_columns_are_shorter_than_one() -> None:
    q, k, v = draw(3, 2, 11, 8)
    k, q = 1e3 * k, torch.eye(8, dtype=torch.float64).expand(3, 2, -1, -1)
    learned = ttt(q, k, v, torch.zeros(2, 8, 8, dtype=torch.float64))
    assert 0.9 < learned.norm(dim=-2).max() < 1


def test_extra_tokens_train_and_get_nothing_from_the_convolution() -> None:
    grid = Grid(4, 5, 1, 2)
    layer = ViT3().build(Site(16, 2, grid)).double()
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    out = layer(x, grid)
    with torch.no_grad():
        layer.inner.w3.add_(1)
    changed = (layer(x, grid) - out).abs().amax((0, 2)) > 1e-9
    assert changed.tolist() == [False] + [True] * 20 + [False] * 2
    x[:, 22] += 1
    assert (layer(x, grid) - out).abs()[:, 0].max() > 1e-9


def test_parameters_of_the_tiny_model() -> None:
    """Fact 4.20: 3d(C + 1) + 2 H d^2 + 9 d + d C more than softmax attention; 6,611,368 in DeiT-T's place."""
    site = Site(192, 3, Grid(14, 14))
    extra = ViT3().cost(site).params - (4 * 192**2 + 4 * 192)
    assert extra == 3 * 64 * 193 + 2 * 3 * 64**2 + 9 * 64 + 64 * 192
    assert 5_717_416 + 12 * extra == 6_611_368


def test_half_precision_steps_in_float32() -> None:
    q, k, v = (x.detach().float() for x in draw(2, 2, 50, 8))
    w1, w2 = torch.randn(2, 2, 8, 8)
    low = ttt(*(x.bfloat16() for x in (q, k, v, w1, w2)))
    exact = ttt(q, k, v, w1, w2)
    assert low.dtype == torch.bfloat16
    assert gap(low.float(), exact) < 4e-2 * exact.abs().max().item()


@pytest.mark.untyped
def test_what_is_refused() -> None:
    q, k, v = draw(3, 2, 11, 8)
    check_error(ShapeError, "w1 has width 7, v has 8", ttt, q, k, v, torch.zeros(2, 8, 7, dtype=torch.float64))
    check_error(ConfigError, "swiglu or linear", ViT3, inner="mlp")
    check_error(ConfigError, "lr must be positive", ViT3, lr=0.0)
    check_error(ShapeError, "batch=-1", ttt, q, k, v, torch.zeros(2, 8, 8, dtype=torch.float64), batch=-1)
    check_error(ConfigError, "batch is the number of tokens", ViT3, batch=-1, local=False)
    check_error(ConfigError, "batch=4 is for heads without a convolution", ViT3, batch=4)
    check_error(ConfigError, "loss='squared' is for heads", ViT3, loss="squared")
    check_error(UnsupportedError, "without normalisation", ViT3().build, Site(16, 2, Grid(4, 4), qk_norm="rms"))
