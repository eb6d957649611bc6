"""Attention of timm whose parts beside the mechanism stay: positions with gates, cascades of heads, halos."""

import pytest
import torch
from torch import Tensor

from regard.core import Grid, GridError, SwapError
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA
from regard.swapping.capture import capture
from regard.swapping.inspect import attention_layers
from regard.swapping.swap import plan_swap, restore, swap
from small_hosts import HostAndInput, with_large_weights
from timm_hosts import TIMM_HOSTS


def host(name: str) -> HostAndInput:
    return with_large_weights(TIMM_HOSTS[name])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("efficientvit_msra", (192, 128)),
        ("edgenext", (96, 64)),
        ("halonet", (128, 64)),
        ("gemma", (80, 48)),
        ("mobilevitv2", (96, 64)),
    ],
)
def test_another_image_size(name: str, size: tuple[int, int]) -> None:
    model, x = host(name)
    other = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = model(other)
    swap(model, XCA() if name == "edgenext" else Softmax(), example=x[:1])
    torch.testing.assert_close(model(other), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_each_head_of_a_cascade_has_a_map() -> None:
    model, x = host("efficientvit_msra")
    swap(model, Softmax(), example=x[:1])
    name = next(iter(attention_layers(model)))
    layer = model.get_submodule(name)
    calls: list[tuple[Tensor, Tensor]] = []
    layer.register_forward_hook(lambda layer, args, y: calls.append((args[0], y)))
    with capture(model) as maps:
        model(x)
    tokens, y = calls[0]
    mixer, grid = layer.mixer, Grid(3, 3)  # type: ignore[union-attr]
    made = mixer.operator_inputs(tokens.flatten(2).mT, grid, None, None)
    assert maps[name].shape == (3 * 3 * 4, 2, 9, 9)  # images and windows, heads
    out = mixer.finish(maps[name].double() @ made.v, made, grid)
    torch.testing.assert_close(out.mT.unflatten(2, (3, 3)), y, rtol=1e-5, atol=1e-5)


def test_each_head_of_a_cascade_has_parameters_of_its_own() -> None:
    model, x = host("efficientvit_msra")
    swap(model, SKA(), "stages.0.*", example=x[:1])
    model.train()(x).square().sum().backward()
    keys = {name: value for name, value in model.named_parameters() if name.endswith("keys")}
    assert len(keys) == 2
    assert not torch.equal(*keys.values())
    assert all(value.grad is not None and value.grad.any() for value in keys.values())


def test_windows_of_a_cascade_keep_their_size() -> None:
    model, x = host("efficientvit_msra")
    expected = model(x)
    swap(model, Softmax(), example=x[:1])
    with pytest.raises(SwapError, match="windows of 3x3 tokens to 2x2, but Softmax was built for 3x3"):
        model.set_input_size(32)  # type: ignore[operator]
    restore(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_map_of_other_than_whole_blocks_is_named() -> None:
    model, x = host("halonet")
    swap(model, Softmax(), example=x[:1])
    with pytest.raises(GridError, match="has blocks of 2x2 cells, which a map of 5x6 does not divide into"):
        model(torch.randn(1, 3, 80, 96, dtype=torch.float64))


def test_the_grid_of_gemma_has_the_rows_and_columns_of_the_image() -> None:
    model, x = host("gemma")
    sites = plan_swap(model, Softmax(), example=x[:1]).sites
    assert [site.layer.mixer.site.grid for site in sites] == [Grid(3, 6)] * 2
