"""Ports of timm's families keep what the host computes: biases, scales, norms, layouts, windows, other channels."""

import json

import pytest
import timm
import torch

from regard.core import Grid, GridError
from regard.measure.cost import count_macs
from regard.mixers.softmax import Softmax
from regard.swapping.ports.timm.hiera import by_offset, row_by_row
from regard.swapping.swap import restore, retune, swap
from regard.testing.subject import gap
from timm_hosts import TIMM_HOSTS


@torch.no_grad()
@pytest.mark.parametrize("name", ["levit", "hiera", "lowformer"])
def test_products_of_layers_with_the_modules_of_the_host_are_counted(name: str) -> None:
    model, x = TIMM_HOSTS[name]()
    own = count_macs(model.eval(), x)
    assert count_macs(swap(model, Softmax(), example=x[:1]), x) == own


@torch.no_grad()
@pytest.mark.parametrize("name", ["maxvit", "vit with norm", "levit", "mvitv2"])
def test_retune_keeps_what_the_layer_keeps_of_the_host(name: str) -> None:
    model, x = TIMM_HOSTS[name]()
    before = swap(model.eval(), Softmax(), example=x[:1])(x)
    retune(model, scale=2.0)
    assert not torch.equal(model(x), before)
    retune(model, scale=None)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("name", ["levit", "tiny_vit", "efficientformer", "efficientformer_v2"])
def test_biases_of_an_earlier_pass_are_not_copied(name: str) -> None:
    """In evaluation mode these hosts keep biases with a graph, which are stale after the next step of training."""
    model, x = TIMM_HOSTS[name]()
    x = x[:1]
    model.eval()(x)
    swap(model, Softmax(), example=x)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "bias" in key:
                value += 0.5
    swapped = model(x)
    assert gap(restore(model)(x), swapped) < 1e-4


@pytest.mark.parametrize("name", ["naflexvit", "gemma"])
def test_patches_with_coordinates_have_no_common_grid(name: str) -> None:
    model, x = TIMM_HOSTS[name]()
    swap(model.eval(), Softmax(), example=x[:1])
    coordinates = torch.tensor([[[0, 0], [0, 1]], [[0, 0], [1, 0]]])
    with pytest.raises(GridError, match="no common grid; pass a swapped model images"):
        getattr(model, "encoder", model)(
            torch.randn(2, 2, 768), patch_coord=coordinates, patch_valid=torch.ones(2, 2, dtype=torch.bool)
        )


@torch.no_grad()
def test_tokens_of_hiera_are_brought_into_the_order_of_the_map() -> None:
    model, _ = TIMM_HOSTS["hiera"]()
    x = torch.arange(16.0 * 24).reshape(1, -1, 1)
    unrolled_tokens = model.unroll(x)  # type: ignore[operator]
    assert not torch.equal(unrolled_tokens, x)
    assert torch.equal(row_by_row(unrolled_tokens, Grid(16, 24), 2), x)
    assert torch.equal(by_offset(x, Grid(16, 24), 2), unrolled_tokens)


@pytest.mark.slow
def test_the_counted_table_is_not_stale() -> None:
    from tools import count_ports

    stored = json.loads(count_ports.FILE.read_text())
    if stored["timm"] != timm.__version__:
        pytest.skip(f"counted with timm {stored['timm']}")
    families = ("swin_transformer_v2", "swin_transformer_v2_cr", "hiera", "hieradet_sam2", "levit", "davit")
    names = [name for family in families for name in timm.list_models(module=family)]
    assert count_ports.summary(count_ports.count(names)) == {name: stored["families"][name] for name in families}
