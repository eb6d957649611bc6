"""Linear CKA against its definition by centred Gram matrices, what it does not see, and between two models' layers."""

import math

import pytest
import torch
from torch import Tensor

from regard import SKA, ConfigError, Softmax, SwapError, UnsupportedError, create_model
from regard.core import ShapeError
from regard.explain.cka import compare_layers, linear_cka
from small_hosts import perturb

HOST = "vit_desk(size=(12, 20), patch=4, dim=32, depth=3, heads=2)"


def by_gram(x: Tensor, y: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = X X', L = Y Y' and the centring matrix H."""
    n = len(x)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    k, m = x @ x.mT, y @ y.mT

    def hsic(a: Tensor, b: Tensor) -> float:
        return float(torch.trace(a @ centring @ b @ centring)) / (n - 1) ** 2

    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) + 3


@pytest.mark.parametrize(("n", "p", "q"), [(40, 6, 9), (7, 30, 12), (5, 1, 1)])
def test_it_is_the_quotient_of_hsics(n: int, p: int, q: int) -> None:
    x, y = features(n, p), features(n, q)
    y[:, : min(p, q)] += x[:, : min(p, q)]
    assert linear_cka(x, y) == pytest.approx(by_gram(x, y), abs=1e-12)
    assert linear_cka(x.float(), y.float()) == pytest.approx(by_gram(x, y), abs=1e-5)


def test_it_does_not_see_rotations_scales_and_shifts_but_other_linear_maps() -> None:
    x, y = features(50, 8), features(50, 8)
    y += x
    rotation = torch.linalg.qr(features(8, 8)).Q
    same = linear_cka(x, y)
    for other in (x @ rotation, -3 * x, x + 7):
        assert linear_cka(other, y) == pytest.approx(same, abs=1e-12)
        assert linear_cka(other, x) == pytest.approx(1, abs=1e-12)
    assert linear_cka(y, x) == pytest.approx(same, abs=1e-12)
    stretched = x * torch.tensor([100.0] + [1.0] * 7, dtype=torch.float64)
    assert linear_cka(stretched, x) < 0.9
    assert 0 < same < 1
    assert linear_cka(features(5000, 4), features(5000, 4)) < 0.01
    assert math.isnan(linear_cka(torch.ones(5, 2), x[:5]))


@pytest.mark.untyped
def test_features_of_other_examples_are_refused() -> None:
    with pytest.raises(ShapeError, match="one row for each example"):
        linear_cka(features(5, 2), features(4, 2))


def model(mixer: object, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return perturb(create_model(HOST, mixer).train(), 0.1)


def test_the_layers_of_two_models_by_hand() -> None:
    """The input of the first attention is the first norm of the embedded patches; batches change nothing."""
    a, b, images = model(Softmax(), 0), model(SKA(), 1), torch.randn(5, 3, 12, 20)
    found = compare_layers(a, b, images, batch=2)
    assert found.rows == found.columns == tuple(f"blocks.{i}.attn" for i in range(3))
    assert a.training
    whole = compare_layers(a, b, images).values
    assert torch.allclose(found.values, whole, atol=1e-6)
    tokens = [net.eval().blocks[0].norm1(net.patch_embed(images) + net.pos_embed).flatten(0, 1) for net in (a, b)]
    assert whole[0, 0] == pytest.approx(by_gram(*(x.detach().double() for x in tokens)), abs=1e-6)
    assert torch.allclose(whole, compare_layers(b, a, images).values.mT, atol=1e-9)
    own = compare_layers(a, a, images).values
    assert torch.allclose(own.diagonal(), torch.ones(3, dtype=torch.float64))
    assert own[0, 2] < 0.999


def test_what_cannot_be_compared_is_an_error() -> None:
    net, images = model(Softmax(), 0), torch.randn(2, 3, 12, 20)
    assert compare_layers(net, net, images, layers="*.2.*").rows == ("blocks.2.attn",)
    with pytest.raises(SwapError, match="matching"):
        compare_layers(net, net, images, layers="heads")
    with pytest.raises(ConfigError, match="at least one image"):
        compare_layers(net, net, images[:0])
    stages = create_model("skaformer_desk(img_size=(32, 64), mixers=('conv', 'conv', 'attn', 'attn'))")
    with pytest.raises(UnsupportedError, match="of one stage"):
        compare_layers(stages, stages, torch.randn(2, 3, 32, 64))
