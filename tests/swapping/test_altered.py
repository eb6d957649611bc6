"""Weights that a tool has moved (adapters, pruning, weight norm, quantisation) are never lost in silence."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from regard.core import SwapError
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.swapping.swap import remove, restore, retune, swap
from small_hosts import draw_large_weights, torchvision, vit


class Adapter(nn.Module):
    """A low-rank addition around a linear map, as PEFT's LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class AdaptedLinear(nn.Linear):
    """The same as a subclass, as loralib has it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def around(attention: nn.Module) -> None:
    attention.qkv = Adapter(attention.qkv)  # type: ignore[arg-type]


def subclass(attention: nn.Module) -> None:
    attention.qkv.__class__ = AdaptedLinear  # type: ignore[assignment]


def pruned(attention: nn.Module) -> None:
    prune.l1_unstructured(attention.qkv, "weight", 0.5)


def normalised(attention: nn.Module) -> None:
    parametrizations.weight_norm(attention.proj)


def quantised(attention: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attention.qkv = torch.ao.quantization.quantize_dynamic(nn.Sequential(attention.qkv), dtype=torch.qint8)[0]


def patched(attention: nn.Module) -> None:
    inner = attention.qkv.forward
    attention.qkv.forward = lambda x: inner(x)  # type: ignore[assignment]


WAYS = {
    patched: "its qkv has a forward of its own",
    around: "its qkv is of .*Adapter",
    subclass: "its qkv is of .*AdaptedLinear",
    pruned: "its qkv is pruned",
    normalised: "its proj is parametrised",
    quantised: "its qkv is of torch.ao",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("change", [lambda model: swap(model, Softmax()), remove], ids=["swap", "remove"])
def test_a_host_whose_weights_lie_elsewhere_is_refused(
    way: Callable[[nn.Module], None], change: Callable[[nn.Module], nn.Module]
) -> None:
    """Before, the layer began with random queries, keys and values."""
    model, x = vit()
    way(model.blocks[1].attn)
    expected = model(x)
    with pytest.raises(SwapError, match=rf"^blocks\.1\.attn: {WAYS[way]}.* merge or remove it first"):
        change(model)
    assert torch.equal(model(x), expected)


def test_what_is_merged_or_left_out_can_be_swapped() -> None:
    model, x = vit()
    pruned(model.blocks[0].attn)
    normalised(model.blocks[1].attn)
    expected = model(x)
    prune.remove(model.blocks[0].attn.qkv, "weight")
    swap(model, Softmax(), where="blocks.0.*")
    torch.testing.assert_close(model(x), expected)
    parametrize.remove_parametrizations(model.blocks[1].attn.proj, "weight")
    torch.testing.assert_close(swap(model, Softmax())(x), expected)


def test_a_matrix_of_the_attention_itself_is_seen_too() -> None:
    """torchvision's attention has no child for queries, keys and values."""
    model, _ = torchvision()
    layer = next(module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    prune.random_unstructured(layer, "in_proj_weight", 0.5)
    with pytest.raises(SwapError, match="it is pruned"):
        swap(model, Softmax())


CHANGES = {
    "restore": restore,
    "retune": lambda model: retune(model, k=2),
    "swap": lambda model: swap(model, Softmax()),
}


IN_THE_LAYER = {
    "its proj": lambda layer: setattr(layer, "proj", Adapter(layer.proj)),
    "its qkv": lambda layer: prune.l1_unstructured(layer.qkv, "weight", 0.5),
    "it has a forward of its own": lambda layer: setattr(layer, "forward", layer.forward),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("said", IN_THE_LAYER)
def test_what_was_put_into_a_swapped_layer_is_not_lost(change: str, said: str) -> None:
    model, x = vit()
    draw_large_weights(swap(model, MiTA(m=4, k=3)))
    IN_THE_LAYER[said](model.blocks[1].attn.regard)
    expected = model(x)
    with pytest.raises(SwapError, match=rf"^blocks\.1\.attn: {said}"):
        CHANGES[change](model)
    assert torch.equal(model(x), expected)


def test_what_an_operator_is_made_of_is_its_own_affair() -> None:
    model, x = vit()
    expected = model(x)
    swap(model, Softmax())
    for block in model.blocks:
        block.attn.regard.operator.extra = Adapter(nn.Linear(4, 4))
    torch.testing.assert_close(restore(model)(x), expected)


def test_gradient_hooks_and_attributes_of_parts_that_are_cut_are_named() -> None:
    model, _ = vit()
    weight = model.blocks[1].attn.qkv.weight  # static keys need two thirds of its rows
    weight.lr_scale = 0.1
    weight.register_hook(lambda gradient: gradient)
    model.blocks[1].attn.proj.weight.lr_scale = 0.5  # is kept as it is
    named = r"blocks\.1\.attn: gradient hook of qkv\.weight, attribute lr_scale of qkv\.weight$"
    with pytest.warns(UserWarning, match=named):
        swap(model, SKA())
    assert model.blocks[1].attn.mixer.proj.weight.lr_scale == 0.5


def test_what_has_no_memory_is_refused_in_one_sentence() -> None:
    model, _ = vit()
    with torch.device("meta"), pytest.raises(SwapError, match="outside of it"):
        swap(model, SKA())
    model.head = nn.LazyLinear(3)
    with pytest.raises(SwapError, match="has no shape yet"):
        swap(model, SKA())
