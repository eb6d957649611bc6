"""What a swap must not do by half: each test fails when one line of the hosts is taken out."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from regard.core import ConfigError, StoreError
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import build_sized, create_model
from regard.models.saving import load, save
from regard.swapping.swap import swap
from small_hosts import draw_large_weights, vit

DESK = "vit_desk(size=(16, 24), dim=16, depth=2, heads=2)"


@dataclass(frozen=True, kw_only=True)
class Other(SKA):
    """A mechanism of another kind whose operator has parameters of the same names and shapes."""


def operator(model, block=0):
    return dict(model.blocks[block].attn.regard.operator.named_parameters())


def test_weights_of_an_operator_stay_within_their_kind():
    model = swap(vit()[0], SKA())
    for value in operator(model).values():
        nn.init.constant_(value, 7.0)
    swap(model, SKA(dwc=3))
    assert all((value == 7.0).all() for value in operator(model).values())
    assert operator(model)
    swap(model, Other())
    assert not any((value == 7.0).any() for value in operator(model).values())


def test_what_was_projected_in_another_way_is_not_carried():
    """The rows of SKA's projection are those of q and v; softmax's keys come from the host, not from them."""
    model = vit()[0]
    keys = model.blocks[0].attn.qkv.weight.detach().unflatten(0, (3, -1))[1].clone()
    swap(model, SKA())
    nn.init.constant_(model.blocks[0].attn.regard.qkv.weight, 7.0)
    swap(model, Softmax())
    rows = model.blocks[0].attn.regard.qkv.weight.unflatten(0, (3, -1))
    assert torch.equal(rows[1], keys)
    assert (rows[[0, 2]] == 7.0).all()


def test_a_new_convolution_is_zero_and_a_trained_one_is_kept():
    from_scratch = create_model(DESK, Softmax(dwc=3))
    assert from_scratch.blocks[0].attn.dwc.weight.abs().max() > 0
    model = swap(vit()[0], Softmax(dwc=3))
    for block in model.blocks:
        assert {name for name, _ in block.attn.regard.dwc.named_parameters()} == {"weight", "bias"}
        assert not any(value.any() for value in block.attn.regard.dwc.parameters())
    draw_large_weights(model)
    before = [value.detach().clone() for value in model.blocks[1].attn.regard.dwc.parameters()]
    swap(model, SKA(dwc=3))
    after = list(model.blocks[1].attn.regard.dwc.parameters())
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    swap(model, SKA(dwc=5))
    assert not any(value.any() for value in model.blocks[1].attn.regard.dwc.parameters())


def test_a_saved_model_is_rebuilt_on_the_grids_that_it_was_made_for(tmp_path):
    """A mechanism whose numbers fit the grid it was built on, which is not that of the host's own image size."""
    model = create_model("vit_desk(size=(16, 24), dim=16, depth=2, heads=2, dynamic_img_size=True)", None).double()
    swap(model, MiTA(m=8, k=4), example=torch.randn(1, 3, 20, 32))
    swap(model, MiTA(m=6, k=4), "blocks.1.*", torch.randn(1, 3, 16, 16))
    about = json.loads((save(model, tmp_path) / "model.json").read_text())
    grids = [list(group["layers"].values()) for group in about["swaps"]]
    back = load(tmp_path)
    assert back.head.weight.dtype == torch.float64
    sites = [block.attn.regard.site.grid for block in back.blocks]
    assert sites == [block.attn.regard.site.grid for block in model.blocks]
    assert [[site.height, site.width, site.prefix, site.suffix] for site in sites] == [grid for (grid,) in grids]
    assert len(set(sites)) == 2


@pytest.mark.parametrize("change", ["values", "header"])
def test_weights_of_another_model_are_not_taken(tmp_path, change):
    """A whole file, readable and of the right shapes, that is not the one that model.json was written for."""
    save(create_model(DESK, Softmax()), tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    if change == "values":
        tensors["head.weight"] = tensors["head.weight"] + 1.0
    save_file(tensors, weights, metadata={"made": "elsewhere"} if change == "header" else None)
    with pytest.raises(StoreError, match="damaged or belongs to another"):
        load(tmp_path)


def test_locality_attention_is_softmax_over_the_other_tokens():
    """vit_s_32_spt: every token looks at all others and never at itself, with weights that are not uniform."""
    torch.manual_seed(0)
    attention = create_model("vit_s_32_spt", None).double().eval().blocks[0].attn
    with torch.no_grad():
        attention.qkv.weight.mul_(4.0)
        attention.temperature.add_(0.3)
    x = torch.randn(2, 7, 512, dtype=torch.float64)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 8, 64)).unbind(2)
    heads = torch.empty(2, 7, 8, 64, dtype=torch.float64)
    for token in range(7):
        others = [other for other in range(7) if other != token]
        logits = torch.einsum("bhd,bmhd->bhm", q[:, token], k[:, others]) * attention.temperature.exp()
        heads[:, token] = torch.einsum("bhm,bmhd->bhd", logits.softmax(-1), v[:, others])
    assert torch.allclose(attention(x), attention.proj(heads.flatten(2)), rtol=0, atol=1e-12)


def test_a_size_that_a_host_refuses_is_not_left_out():
    """Only a host without `img_size` is built for its own size."""
    with torch.device("meta"):
        for host in ("resnet18", "caformer_s18"):
            assert build_sized(host, None, (230, 230)).num_classes == 1000
        for host, message in (("twins_svt_small", "should be divided by patch_size"), ("nest_tiny", "must divide")):
            with pytest.raises(ConfigError, match=rf"{host} cannot be built with img_size=\(230, 230\): .*{message}"):
                build_sized(host, None, (230, 230))
