"""Attention that computes something else than its class does is left as it is, and is named."""

import types
from collections.abc import Callable

import pytest
import torch
from timm import create_model
from timm.layers import Attention
from torch import Tensor, nn

import regard
from regard import Softmax
from regard.core import SwapError
from regard.swapping.ports.timm.vit import TimmViT


class Halved(Attention):
    """A subclass that computes something else."""

    def forward(self, x: Tensor, *further: object, **named: object) -> Tensor:
        return super().forward(x) / 2


def vit() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=3, num_heads=2).eval()


def as_subclass(attention: nn.Module) -> None:
    attention.__class__ = Halved


def on_instance(attention: nn.Module) -> None:
    attention.forward = types.MethodType(lambda self, x, **named: Attention.forward(self, x) / 2, attention)


def scaled(attention: nn.Module) -> None:
    del attention.scale
    attention.scale = nn.Parameter(torch.tensor([[[0.5]], [[2.0]]]))
    attention.fused_attn = False


def sharpened(attention: nn.Module) -> None:
    attention.scale = 2 * attention.scale
    attention.fused_attn = False


def cut_off(attention: nn.Module) -> None:
    attention.attn_drop = nn.Threshold(0.2, 0.0)
    attention.fused_attn = False


def put_through_relu(attention: nn.Module) -> None:
    attention.proj_drop = nn.ReLU()


@pytest.mark.parametrize("change", [as_subclass, on_instance, scaled, sharpened, cut_off, put_through_relu])
def test_a_changed_layer_is_left_out_with_a_warning(change: Callable[[nn.Module], None]) -> None:
    model = vit()
    change(model.blocks[1].attn)
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    with pytest.raises(SwapError, match="blocks.1.attn"):
        regard.swap(model, Softmax(), where="blocks.1.attn")
    assert "blocks.1.attn" in str(regard.plan_swap(model, Softmax()))
    with pytest.warns(UserWarning, match=r"blocks\.1\.attn .*is left as it is"):
        regard.swap(model, Softmax())
    torch.testing.assert_close(model(x), before)
    assert isinstance(model.blocks[1].attn, Attention)
    assert not isinstance(model.blocks[0].attn, Attention)
    regard.restore(model)
    with pytest.warns(UserWarning, match=r"blocks\.1\.attn .*is left as it is"):
        regard.swap(model, {"blocks.*.attn": Softmax()})


@pytest.mark.parametrize("name", ["forward", "__call__"])
def test_what_was_replaced_in_the_class_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Attention, name)
    monkeypatch.setattr(Attention, name, lambda self, *x, **named: original(self, *x, **named) / 2, raising=False)
    with pytest.raises(SwapError, match="of Attention was replaced"):
        regard.swap(vit(), Softmax())


def test_a_part_of_another_kind_is_refused_in_one_sentence() -> None:
    model = vit()
    model.blocks[0].attn.qkv = nn.Sequential(model.blocks[0].attn.qkv)
    with pytest.raises(SwapError, match="has not the parts"):
        regard.swap(model, Softmax())


def test_a_port_that_the_user_names_swaps_it_all_the_same() -> None:
    class Own(TimmViT):
        replaces = (Halved,)

    model = vit()
    model.blocks[1].attn.__class__ = Halved
    regard.swap(model, Softmax(), ports=[Own])
    assert isinstance(model.blocks[1].attn, Own)


class Named(Attention):
    """A user's own attention, whose class names its port."""

    port = TimmViT

    def forward(self, x: Tensor, *further: object, **named: object) -> Tensor:
        return super().forward(x)


def test_a_class_that_names_its_port_is_left_out_too_where_its_forward_was_replaced() -> None:
    model = vit()
    for block in model.blocks:
        block.attn.__class__ = Named
    own = model.blocks[1].attn.forward
    model.blocks[1].attn.forward = lambda x, **named: own(x) / 2
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    with pytest.warns(UserWarning, match=r"blocks\.1\.attn .*the forward of Named was replaced.* is left as it is"):
        regard.swap(model, Softmax())
    torch.testing.assert_close(model(x), before)
    assert [type(block.attn) for block in model.blocks] == [TimmViT, Named, TimmViT]


def test_a_class_that_names_its_port_may_take_a_function_as_its_forward() -> None:
    def shared(self: Attention, x: Tensor, *further: object, **named: object) -> Tensor:
        return Attention.forward(self, x)

    class Sharing(Attention):
        port = TimmViT
        forward = shared

    model = vit()
    model.blocks[1].attn.__class__ = Sharing
    regard.swap(model, Softmax())
    assert isinstance(model.blocks[1].attn, TimmViT)


def test_a_port_in_the_call_goes_before_that_of_the_class() -> None:
    class Own(TimmViT):
        replaces = (Named,)

    class Silent(Own):
        def forward(self, x: Tensor, **named: object) -> None:  # type: ignore[override]
            return None

    model = vit()
    model.blocks[1].attn.__class__ = Named
    with pytest.raises(SwapError, match=r"Silent at blocks\.1\.attn returns None: correct the port's forward"):
        regard.swap(model, Softmax(), ports=[Silent])
    regard.swap(model, Softmax(), ports=[Own])
    assert isinstance(model.blocks[1].attn, Own)
