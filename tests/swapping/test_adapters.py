"""LoRA of PEFT before and after a swap: adapters stay with their projection, and none is lost or merged in silence."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.core import SwapError
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.projections.sne import SNE
from regard.swapping.swap import plan_swap, remove, restore, retune, swap
from small_hosts import HOSTS, draw_large_weights, torchvision, vit

peft = pytest.importorskip("peft")

TARGETS = {
    "vit": ["qkv"],
    "xcit": ["qkv"],
    "caformer": ["qkv"],
    "swin": ["qkv", "proj"],
    "torchvision": ["qkv"],
    "eva": ["proj"],
    "eva with three matrices": ["q_proj", "v_proj"],
    "pvt": ["q", "kv"],
}


def adapted(model: nn.Module, targets: list[str]) -> nn.Module:
    """A model with adapters that change its output; the prefix of the names is PEFT's."""
    config = peft.LoraConfig(target_modules=r".*attn.*\.(" + "|".join(targets) + ")", r=2, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def trained(model: nn.Module, x: Tensor) -> set[str]:
    """The parameters that a loss changes."""
    model.zero_grad()
    model(x).square().sum().backward()
    return {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}


def loras(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace(".regard", ""): value for name, value in model.named_parameters() if "lora_" in name}


def without_loras(model: nn.Module) -> list[str]:
    return [key for key in model.state_dict() if "lora_" not in key]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("mixer", [Softmax(), SKA()], ids=["softmax", "ska"])
def test_lora_after_a_swap_finds_the_hosts_names(name: str, mixer: Any) -> None:
    torch.manual_seed(0)
    model, x = HOSTS[name]()
    draw_large_weights(swap(model, mixer))
    keys, plain = list(model.state_dict()), model.eval()(x)
    config = peft.LoraConfig(target_modules=r".*(attn|attention|token_mixer).*\.(" + "|".join(TARGETS[name]) + ")", r=2)
    tuned = peft.get_peft_model(model, config)
    torch.testing.assert_close(tuned(x), plain)  # LoRA starts at zero
    found = trained(tuned, x)
    assert found
    assert all("lora_B" in each and ".regard." in each for each in found)
    for value in loras(tuned).values():
        nn.init.normal_(value)
    changed = tuned(x)
    assert (changed - plain).abs().max() > 1e-3 * plain.abs().max()
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(x), changed, rtol=1e-3, atol=1e-4 * float(changed.detach().abs().max()))
    assert list(merged.state_dict()) == keys


def test_adapters_stay_with_the_projections_that_stay() -> None:
    """Softmax keeps everything: the same output, modules and parameters, and the host's names of what it had."""
    model, x = vit()
    draw_large_weights(model)
    tuned = adapted(model, ["qkv", "proj"]).eval()
    keys, objects, adapters = without_loras(tuned), loras(tuned), model.blocks[0].attn.qkv
    expected = tuned(x)
    plan = plan_swap(tuned, Softmax())
    assert [site.adapters for site in plan.sites] == [["qkv", "proj"]] * 2
    assert "adapters kept qkv, proj" in str(plan)
    assert not [name for site in plan.sites for name in site.new_objects]
    plan.apply()
    torch.testing.assert_close(tuned(x), expected)
    assert without_loras(tuned) == keys
    assert model.blocks[0].attn.regard.qkv is model.blocks[0].attn.qkv is adapters
    assert all(loras(tuned)[name] is value for name, value in objects.items())
    assert {name.partition(".lora_")[1] for name in trained(tuned, x)} == {".lora_"}
    restore(tuned)
    torch.testing.assert_close(tuned(x), expected)
    assert without_loras(tuned) == keys
    assert model.blocks[0].attn.qkv is adapters


def test_an_adapter_of_a_replaced_projection_is_listed_and_refused() -> None:
    """SKA has no keys, so the adapter of the fused matrix fits no more; that of the output projection does."""
    model, x = vit()
    tuned = adapted(model, ["qkv", "proj"]).eval()
    expected, state = tuned(x), tuned.state_dict()
    for mixer in (SKA(), Softmax(projection=SNE())):
        plan = plan_swap(tuned, mixer)
        assert [(site.adapters, site.lost_adapters) for site in plan.sites] == [(["proj"], ["qkv"])] * 2
        assert "adapters lost qkv" in str(plan)
        with pytest.raises(SwapError, match=r"blocks\.0\.attn: the adapter around qkv would be lost.*merge it first"):
            plan.apply()
    with pytest.raises(SwapError, match="the adapter around qkv, proj would be lost"):
        remove(tuned)
    assert torch.equal(tuned(x), expected)
    assert list(tuned.state_dict()) == list(state)
    swap(tuned.merge_and_unload(), SKA())


def test_adapters_go_on_through_further_changes() -> None:
    """Swapped twice, retuned, merged after that and restored: at the end the merged weights, in a plain host."""
    model, x = vit()
    draw_large_weights(model)
    tuned = adapted(model, ["qkv", "proj"]).eval()
    expected, objects = tuned(x), loras(tuned)
    swap(swap(tuned, Softmax()), MiTA(m=4, k=3))
    retune(tuned, m=6)
    assert all(loras(tuned)[name] is value for name, value in objects.items())
    merged = tuned.merge_and_unload()
    assert not loras(merged)
    restore(merged)
    torch.testing.assert_close(merged(x), expected, rtol=1e-3, atol=1e-4)
    assert type(merged.blocks[0].attn.qkv) is nn.Linear


def test_restoring_keeps_adapters_that_came_after_the_swap() -> None:
    model, x = vit()
    draw_large_weights(swap(model, Softmax()))
    tuned = adapted(model, ["qkv"]).eval()
    expected = tuned(x)
    restore(tuned)
    torch.testing.assert_close(tuned(x), expected)


def test_an_adapter_of_what_the_host_does_not_have_prevents_restoring() -> None:
    model, x = vit()
    tuned = adapted(swap(model, SKA()), ["qkv", "proj"]).eval()
    expected = tuned(x)
    with pytest.raises(SwapError, match="the adapter around qkv would be lost"):
        restore(tuned)
    assert torch.equal(tuned(x), expected)


def test_adapters_of_a_swapped_model_are_saved_and_loaded(tmp_path: Path) -> None:
    """Also a whole state dict of the model with adapters before the swap fits after it."""
    model, x = vit()
    draw_large_weights(model)
    other = copy.deepcopy(model)
    tuned = adapted(model, ["qkv"]).eval()
    before, expected = tuned.state_dict(), tuned(x)
    swap(tuned, Softmax()).save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(swap(other, Softmax()), tmp_path).eval()
    torch.testing.assert_close(again(x), expected)
    for value in again.parameters():
        nn.init.zeros_(value)
    again.load_state_dict(before)
    torch.testing.assert_close(again(x), expected)


def test_an_adapter_around_the_whole_attention_is_refused() -> None:
    """PEFT wraps nn.MultiheadAttention as a whole."""
    model, x = torchvision()
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["self_attention"], r=2)).eval()
    expected = tuned(x)
    with pytest.raises(SwapError, match="has an adapter around the whole attention; merge it first"):
        swap(tuned, Softmax())
    assert torch.equal(tuned(x), expected)


def test_a_module_assigned_by_the_hosts_name_is_put_into_the_mixer() -> None:
    model, x = torchvision()
    draw_large_weights(swap(model, Softmax()))
    before = model.eval()(x)
    layer: Any = model.encoder.layers[0].self_attention
    layer.out_proj = nn.Sequential(layer.out_proj, nn.ReLU())
    assert layer.regard.proj is layer.out_proj
    assert not torch.allclose(model(x), before)
