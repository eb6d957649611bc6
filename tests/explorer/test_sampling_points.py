"""Sampling points agree with what a layer computes, and are drawn where they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import create_model, swap
from regard.core import Grid, Site
from regard.core.view import Samples
from regard.explorer.explore import explore
from regard.explorer.weights import PARTS, read_weights
from regard.mixers.spelling import parse
from small_hosts import draw_large_weights, vit

GRID = Grid(3, 5, prefix=1, suffix=2)


def sampled(spelling: str) -> tuple[Any, Tensor, Samples]:
    """A layer whose offsets depend on the input, its input, and its samples for the first of two images."""
    torch.manual_seed(0)
    layer: Any = parse(spelling).build(Site(16, 2, GRID)).double().eval()
    for name, parameter in layer.named_parameters():
        if ".offset." in name or ".weight." in name or "table" in name:
            nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, GRID.tokens, 16, dtype=torch.float64)
    with torch.no_grad():
        return layer, x, layer.samples(x, GRID, None, None)


@pytest.mark.parametrize("spelling", ["DeformableConv(groups=2)", "DeformableConv(version=2, groups=4, dilation=2)"])
def test_a_convolution_of_equal_taps_averages_its_samples(spelling: str) -> None:
    layer, x, samples = sampled(spelling)
    with torch.no_grad():
        layer.conv.weight.copy_(torch.eye(16, dtype=torch.float64)[:, :, None, None].expand(-1, -1, 3, 3))
        layer.conv.bias.zero_()
        _, factors = layer.conv.samples(GRID.to_map(x)[1][:1])
        out = GRID.to_map(layer(x))[1][0].unflatten(0, (len(samples.points), -1))  # (g, c, h, w)
        parts = GRID.to_map(x)[0], x[0].unflatten(-1, (len(samples.points), -1)).transpose(0, 1)  # (g, N, c)
        average = (samples.on_tokens(GRID) @ parts[1])[:, GRID.span]
    torch.testing.assert_close(average * factors[0].sum(1).flatten(1)[..., None], out.flatten(2).mT, rtol=0, atol=1e-10)
    assert not samples.on_tokens(GRID)[:, [0, -1]].any()


def test_points_without_offsets_lie_on_their_taps() -> None:
    layer = parse("DeformableConv()").build(Site(16, 2, GRID)).eval()
    (points,) = layer.samples(torch.randn(1, GRID.tokens, 16), GRID, None, None).points
    for cell, (y, x) in enumerate(np.ndindex(GRID.height, GRID.width), GRID.prefix):
        taps = torch.tensor([[y + i, x + j] for i in (-1, 0, 1) for j in (-1, 0, 1)], dtype=torch.float32)
        assert torch.equal(points[cell], taps)


@pytest.mark.parametrize("spelling", ["DeformableDETR(points=3)", "DAT(stride=2)", "DAT(reach=2.0, table=False)"])
def test_shares_of_tokens_are_the_weights_of_their_values(spelling: str) -> None:
    """What a head returns is the sum of the tokens' values by their shares: sampling is linear, and so are values."""
    layer, x, samples = sampled(spelling)
    with torch.no_grad():
        (v,) = layer.project(x, "v")
        made = layer.operator_inputs(x, GRID, None, None)
        out = layer.operator(made.q, made.k, made.v, grid=GRID, mask=made.mask)[0]
    torch.testing.assert_close(samples.on_tokens(GRID) @ v[0], out, rtol=0, atol=1e-10)
    assert samples.shares.shape[:2] == (2, GRID.tokens)


def test_a_key_of_two_groups_is_sampled_at_two_points() -> None:
    layer, x, samples = sampled("DAT(stride=2, groups=2)")
    with torch.no_grad():
        planned = layer.operator.plan(layer.operator_inputs(x, GRID, None, None).q, GRID).points[0]
    first, second = planned.clamp_min(0).minimum(torch.tensor([2.0, 4.0], dtype=torch.float64))
    keys = len(first)
    assert torch.equal(samples.points[1, 0, :keys], first)
    assert torch.equal(samples.points[1, 0, keys:], second)
    assert torch.equal(samples.shares[..., :keys], samples.shares[..., keys:])
    torch.testing.assert_close(samples.on_tokens(GRID).sum(-1), torch.ones(2, GRID.tokens, dtype=torch.float64))


def test_others_sample_nothing() -> None:
    for spelling in ("Softmax()", "Conv()", "SKA()"):
        layer = parse(spelling).build(Site(16, 2, GRID)).eval()
        assert layer.samples(torch.randn(1, GRID.tokens, 16), GRID, None, None) is None


def test_points_are_left_out_where_there_is_no_room() -> None:
    model, x = vit()
    draw_large_weights(swap(model.eval(), "DeformableDETR(points=2)"))
    (first, *_) = read_weights(model, x[0], "*", 10**8).layers
    assert first.points is not None
    size = sum(layer.codes.size for layer in read_weights(model, x[0], "*", 10**8).layers)
    few = read_weights(model, x[0], "*", size)
    assert few.hidden_views == ("sampling points",)
    assert few.layers[0].points is None


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_draws_points_at_their_places(browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create_model("vit_desk(size=32, patch=4, dim=16, depth=1, heads=2)").eval()
    swap(model, "DeformableConv(version=2, groups=2)")
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)

    def circles() -> np.ndarray:
        path = explore(model, pixels, normal=([0.5] * 3, [0.5] * 3)).save(tmp_path / "e.html")
        page = browser.new_page(viewport={"width": 1280, "height": 850})
        page.goto(path.as_uri())
        page.evaluate("at.x = 5.5 / 8, at.y = 2.5 / 8, at.head = 1, draw()")
        drawn = "[...document.querySelectorAll('#models svg circle')]"
        script = f"{drawn}.map((circle) => [circle.getAttribute('cy'), circle.getAttribute('cx')])"
        found = np.array(page.evaluate(script), dtype=np.float64) / 4 - 0.5  # in cells
        page.close()
        return found

    assert np.array_equal(circles(), [[2 + i, 5 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
    draw_large_weights(model)
    image = (torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5
    kept: list[Samples] = []
    mixer = model.get_submodule("blocks.0.attn").mixer
    grid = mixer.site.grid
    mixer.register_forward_pre_hook(lambda module, args: kept.append(module.samples(args[0], grid, None, None)))
    with torch.no_grad():
        model(image)
    query = grid.prefix + 2 * 8 + 5
    expected = kept[0].points[1, query].numpy()
    inside = np.abs(expected) < 255
    assert np.abs(circles() - expected)[inside].max() <= 0.5 / PARTS
    assert inside.mean() > 0.5
