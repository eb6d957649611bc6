"""Mechanisms with parameters for one grid in models whose images, or windows, change their size."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from library_hosts import hugging_face_logits
from regard.core import Grid, GridError, SwapError
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.swapping.layer import Port
from regard.swapping.swap import restore, swap
from small_hosts import draw_large_weights, swin, vit

FIXED = (
    "SKA()",
    'SKA(resize="window")',
    "CSKA()",
    "Linformer(m=4)",
    "MHLA(m=4)",
    "Agent(m=4)",
    "DAT(stride=2, kernel=3)",
)


def timm_vit() -> nn.Module:
    return vit(dynamic_img_size=True)[0]


@pytest.mark.parametrize("make", [timm_vit, lambda: hugging_face_logits()[0]], ids=["timm", "transformers"])
@pytest.mark.parametrize("mixer", FIXED)
def test_it_computes_on_the_grid_of_each_image(make: Callable[[], nn.Module], mixer: str) -> None:
    """Of sizes with equally many tokens too, as the plain form does on that grid; and as before at the first size."""
    torch.manual_seed(0)
    model = swap(make(), mixer).double().eval()
    draw_large_weights(model)
    calls: list[tuple[Any, Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, Port)]
    layers[0].mixer.register_forward_hook(lambda mixer, args, y: calls.append((args, y)))
    first = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    before = model(first)
    for height, width in ((64, 48), (48, 64), (32, 96)):
        model(torch.randn(2, 3, height, width, dtype=torch.float64))
        (x, *_), y = calls[-1]
        plain = layers[0].mixer.reference(x, Grid(height // 8, width // 8, 1))
        torch.testing.assert_close(y, plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(first), before, rtol=0, atol=0)


def test_it_may_refuse_other_sizes() -> None:
    model = swap(timm_vit(), SKA(resize="error")).eval()
    model(torch.randn(1, 3, 32, 48))
    with pytest.raises(
        GridError, match="static keys lie on 4x6 .*, not on 6x4 .*; resize='interpolate' resamples them"
    ):
        model(torch.randn(1, 3, 48, 32))


def swin_v2() -> nn.Module:
    options = {"img_size": (48, 96), "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4)}
    return timm.create_model("swinv2_tiny_window8_256", num_classes=7, **options)


def beit() -> nn.Module:
    options = {"img_size": (48, 96), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
    return timm.create_model("beit_base_patch16_224", **options)


@pytest.mark.parametrize("make", [lambda: swin()[0], swin_v2, beit], ids=["swin", "swinv2", "beit"])
def test_windows_of_another_shape_are_refused(make: Callable[[], nn.Module]) -> None:
    """A window of 8 x 2 has as many tokens as one of 4 x 4, but other keys and biases."""
    torch.manual_seed(0)
    model: Any = swap(make(), Softmax()).eval()
    for size in ((96, 48), (64, 96)):
        with pytest.raises(
            SwapError, match=r"set_input_size changes windows of \d+x\d+ tokens to \d+x\d+, but Softmax"
        ):
            model.set_input_size(img_size=size)
    restore(model).set_input_size(img_size=(96, 48))
    draw_large_weights(model)
    x = torch.randn(2, 3, 96, 48)
    expected = model(x)
    torch.testing.assert_close(swap(model, Softmax())(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["levit_128s", "efficientformerv2_s0"])
def test_a_model_of_another_image_size_is_planned_for_it(name: str) -> None:
    """timm keeps the size of these as a trait only."""
    model = create_model(name, Softmax(), img_size=160, num_classes=3).eval()
    draw_large_weights(model)
    images = torch.randn(2, 3, 160, 160)
    outputs = model(images)
    assert torch.allclose(restore(model)(images), outputs, rtol=0, atol=1e-5 * float(outputs.abs().max()))


def test_two_crops_of_one_number_of_tokens_are_not_mistaken_for_each_other() -> None:
    """A model that makes the tokens of both before its blocks; the second grid would be taken for both."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, dynamic_img_size=True
    )
    swap(model.eval(), SKA())
    first, second = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 16, 64)
    expected = model(first)
    model.patch_embed(first), model.patch_embed(second)
    with pytest.raises(GridError, match="4x4 and of 2x8"):
        model.blocks[0].attn(torch.randn(1, 17, 32))
    model.patch_embed(first), model.patch_embed(first[..., :16, :])
    with pytest.raises(GridError, match=r"blocks\.0\.attn: 17 tokens do not fit 2x4 .* pass one image through"):
        model.blocks[0].attn(torch.randn(1, 17, 32))
    model(second)
    torch.testing.assert_close(model(first), expected)
