"""Swapping keeps outputs, names and weights, and says when it cannot."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.func import functional_call

from library_hosts import HUGGING_HOSTS, LibraryHost, gap, outputs, prepared
from regard.core import ConfigError, GridError, Site, SwapError, UnsupportedError
from regard.mixers.convolutions.conv import Conv
from regard.mixers.flatten import FLatten
from regard.mixers.mita.mita import MiTA
from regard.mixers.pvt import PVT
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA
from regard.models.catalog import list_models
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.projections.sne import FSNE, PSNE, SNE
from regard.swapping.inspect import attention_layers
from regard.swapping.layer import Port
from regard.swapping.ports.timm.vit import TimmViT
from regard.swapping.swap import plan_swap, remove, restore, retune, swap
from small_hosts import HOSTS, VIT, draw_large_weights, swin, vit, with_large_weights


@pytest.fixture(params=HOSTS)
def small(request):
    return with_large_weights(HOSTS[request.param])


def own(model):
    """The mechanism that computes what the host computes."""
    return {"Xcit": XCA(), "PyramidVisionTransformerV2": PVT(ratio=2)}.get(type(model).__name__, Softmax())


def same_state(model, state):
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_removed_attention_changes_the_output(small):
    model, x = small
    before = model(x)
    assert (remove(model)(x) - before).abs().max() > 1e-3 * before.abs().max()
    assert torch.equal(restore(model)(x), before)


def test_removed_attention_is_the_residual_branch_alone():
    model, x = vit()
    remove(model, "blocks.1.*")
    block = model.blocks[1]
    y = torch.randn(3, 25, 32)
    assert torch.equal(block(y), y + block.mlp(block.norm2(y)))
    gone = {*vit()[0].state_dict()} - {*model.state_dict()}
    assert gone == {f"blocks.1.attn.{name}" for name in vit()[0].blocks[1].attn.state_dict()}
    model(x).sum().backward()


def test_a_plain_checkpoint_gives_its_rows_to_what_is_left_of_them():
    plain, _ = vit()
    model = swap(vit()[0], SKA(dwc=3))
    assert not model.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    rows = plain.blocks[0].attn.qkv.weight.unflatten(0, (3, -1))
    assert torch.equal(model.blocks[0].attn.qkv.weight.unflatten(0, (2, -1)), rows[[0, 2]])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(vit(embed_dim=48)[0].state_dict(), strict=False)


def test_going_through_other_mechanisms_comes_back_to_the_same():
    model, x = vit()
    draw_large_weights(model.eval())
    before, state = model(x), copy.deepcopy(model.state_dict())
    swap(model, SKA())
    swap(model, Softmax(projection=PSNE()), "blocks.0.*")
    swap(model, Softmax())
    assert torch.equal(model(x), before)
    same_state(model, state)
    swap(model, SKA())
    restore(model)
    same_state(model, state)


def test_names_of_the_state_are_paths_through_the_modules(small):
    model, x = small
    swap(model, own(model))
    before = model(x)
    state = {key: value * 1.1 if value.is_floating_point() else value for key, value in model.state_dict().items()}
    got = functional_call(model, state, (x,))
    assert torch.equal(model(x), before)
    model.load_state_dict(state)
    assert torch.allclose(got, model(x), rtol=0, atol=1e-10 * got.abs().max().item())
    assert set(get_model_state_dict(model)) == set(state)


def test_copies_have_their_own_grid():
    model, _ = vit(dynamic_img_size=True)
    swap(model.eval(), Softmax())
    twin = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    third = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    for other in (twin, third):
        model(torch.randn(1, 3, 32, 48))
        small, wide = model.blocks[0].attn.grid(), torch.randn(1, 3, 16, 64)
        assert torch.allclose(other.eval()(wide), model.eval()(wide), atol=1e-6)
        other(torch.randn(1, 3, 48, 48))
        assert (other.blocks[0].attn.grid().height, other.blocks[1].attn.source) == (6, other.blocks[0].attn.source)
        assert (model.blocks[0].attn.grid().height, model.blocks[0].attn.grid().width) == (2, 8)
        assert (small.height, small.width) == (4, 6)


def test_features_only():
    options = {"features_only": True, "out_indices": (0, 1), "img_size": (32, 48)}
    plain = create_model(VIT, None, **options).eval()
    model = create_model(VIT, Softmax(projection=FSNE(code=4)), **options).eval()
    x = torch.randn(2, 3, 32, 48)
    before, keys = plain(x), list(plain.state_dict())
    assert [y.shape for y in model(x)] == [y.shape for y in before] == [(2, 32, 4, 6)] * 2
    assert torch.allclose(swap(plain, Softmax())(x)[1], before[1], atol=1e-5)
    assert list(plain.state_dict()) == keys


def test_features_only_of_a_chain_of_stages_owns_codes_below_a_layer():
    model = create_model("caformer_s18", None, features_only=True).eval()
    swap(model, Softmax(projection=FSNE(code=4)), "*", torch.randn(1, 3, 64, 64))
    assert [y.shape[-1] for y in model(torch.randn(1, 3, 64, 96))] == [24, 12, 6, 3]
    assert sum("regard_shared" in key for key in model.state_dict()) == 1


def test_codes_are_saved_once_and_owned_as_long_as_they_are_used():
    model, x = vit()
    swap(model, Softmax(projection=FSNE(code=4)))
    codes = [key for key in model.state_dict() if "regard_shared" in key]
    assert codes == ["regard_shared.0.weight"]
    assert len({id(value) for value in model.parameters()}) == len(list(model.named_parameters(remove_duplicate=False)))
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    assert twin.regard_shared[0].weight.grad.abs().max() > 0
    assert model.regard_shared[0].weight.grad is None
    swap(model, Softmax(), "blocks.0.*")
    assert len(model.regard_shared) == 1
    swap(model, Softmax())
    assert not hasattr(model, "regard_shared")
    for block in (0, 1):
        swap(model, Softmax(projection=FSNE(code=4)), f"blocks.{block}.*")
    assert len(model.regard_shared) == 2


@pytest.mark.parametrize("first", [None, Softmax(projection=FSNE(code=4))], ids=["a host", "codes"])
@pytest.mark.parametrize("where", ["*", "blocks.1.*"])
def test_a_plan_names_codes_that_an_optimizer_does_not_have(first, where):
    model, _ = vit()
    if first is not None:
        swap(model, first)
    before = {id(value) for value in model.parameters()}
    plan = plan_swap(model, SKA(projection=FSNE(code=4)) if first is None else Softmax(projection=FSNE(code=4)), where)
    assert "regard_shared." in str(plan)
    plan.apply()
    fresh = {key for key, value in model.named_parameters() if id(value) not in before}
    assert any("regard_shared" in key for key in fresh) == (first is None or where != "*")
    assert fresh == {name for site in plan.sites for name in site.new_objects}


def test_retune_keeps_the_execution_that_was_set():
    model = swap(vit()[0], MiTA(m=4, k=4))
    operator = lambda: model.blocks[0].attn.mixer.operator  # noqa: E731
    operator().execution = "dense"
    assert retune(model, k=3) is model
    assert (operator().execution, operator().config.k) == ("dense", 3)


def test_retune_keeps_every_parameter_and_what_is_frozen():
    model, x = vit()
    draw_large_weights(swap(model.eval(), MiTA(m=6, k=4)))
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    before, values = model(x), [(id(value), value.requires_grad) for value in model.parameters()]
    retune(model, m=24, k=24)
    assert not torch.allclose(model(x), before)
    with pytest.raises(ConfigError, match="did you mean|known"):
        retune(model, mm=3)
    with pytest.raises(ConfigError, match="would change parameters"):
        retune(model, dwc=3)
    with pytest.raises(ConfigError, match="init= would change nothing"):
        retune(swap(vit()[0], SKA()), init="paper")
    assert [(id(value), value.requires_grad) for value in model.parameters()] == values
    retune(model, m=6, k=4)
    assert torch.equal(model(x), before)


def test_a_plan_says_what_becomes_of_the_parameters_and_changes_nothing():
    model, _ = vit()
    state = copy.deepcopy(model.state_dict())
    plan = plan_swap(model, SKA())
    assert not any(isinstance(module, Port) for module in model.modules())
    site = plan.sites[0]
    assert [site.layer.mixer.site.layer for site in plan.sites] == [0, 1]
    assert site.kept == ["qkv.weight[qv]", "qkv.bias[qv]", "proj.weight", "proj.bias"]
    assert site.dropped == ["qkv.weight[k]", "qkv.bias[k]"]
    assert site.new
    assert all(name.startswith("regard.operator.") for name in site.new)
    assert "4x6 patch + 1 prefix + 0 suffix tokens" in str(plan)
    assert "content term" in str(plan)
    same_state(model, state)
    assert not model.patch_embed.proj._forward_hooks


@pytest.mark.parametrize(("name", "blocks"), [("xcit", "cls_attn_blocks"), ("cait_s_32", "blocks_token_only")])
def test_class_attention_stays(name, blocks):
    model = create_model("cait_s_32(heads=2, width=24)", None) if name == "cait_s_32" else HOSTS[name]()[0]
    kinds = [type(block.attn) for block in getattr(model, blocks)]
    swap(model, SKA())
    assert [type(block.attn) for block in getattr(model, blocks)] == kinds
    assert all(isinstance(block.attn, Port) for block in model.blocks)


def test_frozen_hosts_stay_frozen_under_other_names(small):
    model, _ = small
    model.requires_grad_(False)
    swap(model, own(model))
    assert not any(value.requires_grad for value in model.parameters())
    assert not any(value.requires_grad for value in restore(model).parameters())


def test_restore_brings_back_the_present_freeze_and_what_was_dropped_as_it_was():
    model, _ = vit()
    swap(model, SKA())
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    model.blocks[1].attn.proj.requires_grad_(False)
    frozen = {name for name, value in restore(model).named_parameters() if not value.requires_grad}
    assert frozen == {"blocks.0.attn.qkv.weight", "blocks.1.attn.proj.weight", "blocks.1.attn.proj.bias"}
    remove(model)
    assert {name for name, value in restore(model).named_parameters() if not value.requires_grad} == frozen


def test_frozen_codes_and_gates_stay_frozen():
    model, _ = vit()
    swap(model, Softmax(projection=FSNE(code=4), gate=True))
    model.regard_shared.requires_grad_(False)
    model.blocks[0].attn.regard.gate.requires_grad_(False)
    swap(model, Softmax(projection=FSNE(code=4), gate=True, scale=1.0))
    assert not model.regard_shared[0].weight.requires_grad
    assert [block.attn.regard.gate.weight.requires_grad for block in model.blocks] == [False, True]


@pytest.mark.parametrize("back", [restore, lambda model: swap(model, Softmax())], ids=["restore", "swap"])
@pytest.mark.parametrize("make", [vit, swin], ids=lambda make: make.__name__)
def test_a_removed_layer_follows_the_models_dtype(make, back):
    model, x = make()
    before = model.eval()(x)
    remove(model).double()
    assert {value.dtype for value in back(model).parameters()} == {torch.float64}
    assert torch.allclose(model(x.double()).float(), before, atol=1e-5)


class OneLayer(nn.Module):
    """Attention of PyTorch on patches; with `crossed`, its keys and values are other tokens."""

    def __init__(self, batch_first=True, crossed=False):
        super().__init__()
        self.conv_proj, self.attn = nn.Conv2d(3, 8, 8, 8), nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.crossed = crossed

    def forward(self, x, mask=None):
        tokens = self.conv_proj(x).flatten(2).mT
        tokens = tokens if self.attn.batch_first else tokens.transpose(0, 1)
        keys = tokens.flip(1) if self.crossed else tokens
        return self.attn(tokens, keys, keys, attn_mask=mask, need_weights=False)[0]


def test_cross_attention_is_refused():
    model = OneLayer(crossed=True)
    with pytest.raises(UnsupportedError, match="the port is for self-attention"):
        swap(model, Softmax(), example=torch.randn(1, 3, 32, 48))
    assert isinstance(model.attn, nn.MultiheadAttention)


def test_modes_of_modules_stay():
    model, _ = vit()
    model.train()
    model.blocks[0].eval()
    swap(model, Softmax())
    parts = (model.blocks[0].attn, model.blocks[1].attn, model.blocks[1].attn.regard)
    assert [part.training for part in parts] == [False, True, True]


def test_decay_names_grow_with_the_mixers():
    model, _ = vit()
    host = set(model.no_weight_decay())
    swap(model, Softmax())
    assert set(model.no_weight_decay()) == host
    swap(model, FLatten(), "blocks.0.*")
    names = {f"blocks.0.attn.regard.operator.{name}" for name in ("sigma", "positions.cells", "positions.extra")}
    assert set(model.no_weight_decay()) == host | names
    assert set(restore(model).no_weight_decay()) == host


DROPOUT = {"attn_drop_rate": 0.25, "depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}
WITH_DROPOUT = {
    "timm": lambda: (create_model("vit_tiny_patch16_224", None, **DROPOUT), None),
    **{
        name: lambda name=name: HUGGING_HOSTS[name](attention_probs_dropout_prob=0.25)[:2]
        for name in ("ViTModel", "DPTModel", "SwinModel")
    },
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_of_attention_weights_is_not_left_out_in_silence(name):
    model, inputs = WITH_DROPOUT[name]()
    with pytest.warns(UserWarning, match=r"dropout 0\.25 of attention weights is left out"):
        swap(model, Softmax(), example=inputs)


@pytest.mark.filterwarnings("error")
def test_a_reduction_of_keys_is_not_left_out_in_silence():
    model, x = HOSTS["pvt"]()
    with pytest.warns(UserWarning, match=r"MiTA\(m=4, k=4\): .* no place for sr, norm .* output of 3 layers"):
        swap(model, MiTA(m=4, k=4), example=x)
    remove(restore(model), example=x)


@pytest.mark.parametrize("host", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "naflexvit_base_patch16_gap"])
def test_a_model_that_drops_patches_in_training_is_refused(host):
    model = create_model(host, None, depth=1, patch_drop_rate=0.75)
    with pytest.raises(UnsupportedError, match="patch_drop drops 0.75 of the patches in training.*patch_drop.prob = 0"):
        swap(model, SKA())
    assert not any(isinstance(module, Port) for module in model.modules())
    model.patch_drop.prob = 0.0
    swap(model, SKA())


def test_a_quarter_of_the_tokens_is_not_taken_for_a_smaller_grid():
    class Pruned(VisionTransformer):
        def _pos_embed(self, x):
            return super()._pos_embed(x)[:, ::4] if self.training else super()._pos_embed(x)

    model = swap(
        Pruned(img_size=64, patch_size=8, embed_dim=24, depth=1, num_heads=2, class_token=False, global_pool="avg"),
        SKA(),
    )
    with pytest.raises(GridError, match="16 tokens"):
        model.train()(torch.zeros(1, 3, 64, 64))


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_each_image_and_head_are_those_of_torch(batch_first):
    model, x = OneLayer(batch_first).eval(), torch.randn(3, 3, 16, 24)
    masks = [torch.rand(6, 6, 6) < 0.3, torch.randn(6, 6, 6)]
    masks[0].diagonal(dim1=1, dim2=2).zero_()  # a query attends to itself at least
    expected = [model(x, mask) for mask in masks]
    swap(model, Softmax(), example=x[:1])
    for mask, before in zip(masks, expected, strict=True):
        assert torch.allclose(model(x, mask), before, atol=1e-5)


REFUSED = {
    "no attention module matching .nowhere.*it has blocks.0.attn": lambda: swap(vit()[0], Softmax(), "nowhere.*"),
    "a port knows; a ResNet .*regard.attend.*your-own-model": lambda: swap(nn.Conv2d(3, 4, 3), Softmax()),
    "it has timm.models.byobnet.SelfAttnBlock, but none that a": lambda: swap(
        create_model("lambda_resnet26t", None), Softmax()
    ),
    "nn.MultiheadAttention.*subclass TorchAttention.*watch": lambda: swap(nn.TransformerEncoderLayer(8, 2), Softmax()),
    "nothing is swapped": lambda: restore(vit()[0]),
    ".*nothing is swapped": lambda: retune(vit()[0], m=3),
    "there is no host.*vit_tiny_patch16_224": lambda: create_model("vit_tinny_patch16_224", Softmax()),
    "cannot be built with": lambda: create_model("vit_tiny_patch16_224", Softmax(), no_such_option=1),
    "expected name": lambda: create_model("vit_desk(__import__('os'))", None),
    "KeepingPort.kept_parameters names 'proj', which is no parameter of OwnAtt": lambda: swap(
        OwnModel(), Softmax(), ports=[KeepingPort]
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_done_is_said(said):
    with pytest.raises((SwapError, ConfigError), match=said):
        REFUSED[said]()


def test_a_gated_attention_is_refused_by_a_layer_that_cannot_gate():
    model, _ = vit()
    model.blocks[1].attn = Attention(32, num_heads=2, gated=True)
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.attn normalises or gates its output, which Conv cannot"):
        swap(model, Conv())
    assert isinstance(swap(model, Conv(), "blocks.0.*").blocks[0].attn, Port)


def test_a_layer_that_is_not_entered_is_an_error():
    model, _ = vit()
    model.blocks[0].add_module("spare", Attention(32, num_heads=2))
    with pytest.raises(SwapError, match=r"does not enter blocks\.0\.spare"):
        swap(model, Softmax())


@pytest.mark.untyped
def test_other_types_are_said():
    with pytest.raises(ConfigError, match=r"not None; regard\.remove\(model\) takes attention out"):
        swap(vit()[0], None)
    with pytest.raises(ConfigError, match=r"^where is a glob on layer names, such as '.*', not \['blocks\.0\.attn'\]"):
        swap(vit()[0], Softmax(), ["blocks.0.attn"])
    for change in (lambda model: swap(model, Softmax()), restore, lambda model: retune(model, k=2)):
        with pytest.raises(ConfigError, match="takes a torch module, not 'vit_desk'|a model is a torch module"):
            change("vit_desk")


@pytest.mark.parametrize(
    "make",
    [
        *(HOSTS[name] for name in ("vit", "eva", "eva with three matrices", "beit", "pvt")),
        lambda: HUGGING_HOSTS["ViTModel"]()[:2],
    ],
)
def test_other_projections_start_from_the_host(make):
    """An embedding of one layer is linear: begun from the host's matrices and biases it computes the same."""
    torch.manual_seed(0)
    model, inputs, _ = prepared(LibraryHost(*make(), 0))
    before = outputs(model, inputs)
    swap(model, replace(own(model), projection=SNE(layers=1, init="svd")), example=inputs)
    assert gap(outputs(model, inputs), before) <= 1e-9
    swap(model, Softmax(projection=SNE(layers=1)), example=inputs)
    assert gap(outputs(model, inputs), before) > 1e-3


def test_biases_apart_follow_their_roles():
    """Static keys keep the queries' and values' rows of the fused matrix, and their biases under the host's names."""
    model, x = HOSTS["eva"]()
    draw_large_weights(model)
    theirs, token = copy.deepcopy(model.blocks[0].attn), torch.randn(1, 1, 32)
    plan = plan_swap(model, SKA())
    assert plan.sites[0].kept == ["q_bias", "v_bias", "qkv.weight[qv]", "proj.weight", "proj.bias"]
    swap(model, SKA())
    assert {"blocks.0.attn.q_bias", "blocks.0.attn.v_bias"} <= set(model.state_dict())
    query, key, value = (theirs.qkv(token) + torch.cat([theirs.q_bias, theirs.k_bias, theirs.v_bias])).chunk(3, -1)
    for role, expected in (("q", query), ("v", value)):
        got = model.blocks[0].attn.regard.project(token, role)[0]
        assert torch.allclose(got.flatten(), expected.flatten(), atol=1e-6), role


def test_rows_of_a_matrix_of_keys_and_values_follow_their_roles():
    """Static keys have queries and values alone; the host's keys come back as they were, its values as trained."""
    model, _ = HOSTS["pvt"]()
    draw_large_weights(model)
    theirs, token = copy.deepcopy(model.stages[0].blocks[0].attn), torch.randn(1, 1, 16)
    site = plan_swap(model, SKA()).sites[0]
    assert site.kept == ["q.weight", "q.bias", "kv.weight[v]", "kv.bias[v]", "proj.weight", "proj.bias"]
    assert site.dropped == ["kv.weight[k]", "kv.bias[k]", "sr.weight", "sr.bias", "norm.weight", "norm.bias"]
    swap(model, SKA())
    projection = model.stages[0].blocks[0].attn.regard.qkv
    value = theirs.kv(token).chunk(2, -1)[1]
    assert torch.allclose(projection(token, "v")[0].flatten(), value.flatten(), atol=1e-6)
    nn.init.zeros_(projection.kv.weight)
    restored = restore(model).stages[0].blocks[0].attn
    key, value = restored.kv.weight.chunk(2)
    assert torch.equal(key, theirs.kv.weight.chunk(2)[0])
    assert not value.any()
    assert torch.equal(restored.sr.weight, theirs.sr.weight)


def test_lists_have_our_hosts_and_timm():
    names = list_models("vit_*")
    assert names[:3] == ["vit_desk", "vit_s_32", "vit_s_32_spt"]
    assert "vit_tiny_patch16_224" in names
    assert list_models("nothing_*") == []


@pytest.mark.filterwarnings("error")
def test_a_copied_layer_of_regard_is_swapped_again_without_a_warning() -> None:
    """torch wraps the hooks of a copied module, so they no longer name the module that they are of."""
    swap(copy.deepcopy(create_model("vit_desk(size=12, patch=4, dim=16, depth=2, heads=2)", SKA())), MiTA(m=4, k=2))


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.to_qkv, self.proj = 2, nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(x)


class HeadsByWidth(OwnAttention):
    def __init__(self, **given):
        super().__init__()
        del self.num_heads
        vars(self).update(given)


class ReadPort(Port):
    replaces = (HeadsByWidth,)
    watch = "patches"
    parameter_names = {"to_qkv": "qkv"}

    def forward(self, x):
        return self.mixer(x, self.grid())


@pytest.mark.parametrize("given", [{"head_dim": 2, "groups": 2}, {"heads": "4", "head_dim": 2}, {"n_heads": 4}])
def test_the_number_of_heads_of_an_own_attention_is_read_from_the_names_of_the_docs(given):
    model = OwnModel()
    model.attn = HeadsByWidth(**given)
    assert swap(model, Softmax(), ports=[ReadPort]).attn.mixer.site.heads == 4


@pytest.mark.parametrize("given", [{"n_head": 4}, {"heads": 0}, {"head_dim": 0}, {"heads": "4"}])
def test_an_own_attention_without_a_number_of_heads_is_told_to_define_its_site(given):
    model = OwnModel()
    model.attn = HeadsByWidth(**given)
    with pytest.raises(ConfigError, match=r"^attn has no number of heads, .* or head_dim: let the port define site"):
        swap(model, Softmax(), ports=[ReadPort])


class OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.attn, self.img_size = nn.Conv2d(3, 8, 8, 8), OwnAttention(), 16

    def forward(self, x):
        return self.attn(self.patches(x).flatten(2).mT)


class OwnPort(Port):
    replaces = (OwnAttention,)
    watch = "patches"

    @classmethod
    def site(cls, module, grid, name, layer):
        return Site(dim=8, heads=2, grid=grid, qkv_bias=False, name=name, layer=layer)

    def forward(self, x):
        return self.mixer(x, self.grid())


class NamedPort(OwnPort):
    parameter_names = {"to_qkv": "qkv"}


class KeepingPort(NamedPort):
    kept_parameters = ("proj",)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mixer", [Softmax(), SKA()])
def test_a_port_that_forgets_the_name_of_a_matrix_does_not_start_at_random_in_silence(mixer):
    with pytest.warns(UserWarning, match="attn: to_qkv.weight of the host is not used, and qkv.weight of.* at random"):
        swap(OwnModel(), mixer, ports=[OwnPort])
    swap(OwnModel(), mixer, ports=[NamedPort])
    swap(OwnModel(), MiTA(m=2, k=2, projection=SNE()), ports=[NamedPort])


@pytest.mark.filterwarnings("error")
def test_a_learned_parameter_of_an_own_attention_is_not_left_out_in_silence():
    model = OwnModel()
    model.attn.temperature = nn.Parameter(torch.ones(2, 1, 1))
    with pytest.warns(UserWarning, match="^attn: there is no place for temperature of Own.*NamedPort.kept_param"):
        swap(model, Softmax(), ports=[NamedPort])

    class TemperedPort(NamedPort):
        kept_parameters = ("temperature",)

    swap(restore(model), SKA(), ports=[TemperedPort])
    remove(restore(model), ports=[NamedPort])


class Adapted(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_layer_of_ones_own_does_not_become_a_plain_one():
    model = OwnModel()
    model.attn.to_qkv.__class__ = Adapted
    with pytest.raises(SwapError, match=r"^attn: its to_qkv is of .*\.Adapted, whose forward would be lost; put"):
        swap(model, Softmax(), ports=[NamedPort])
    restore(remove(model, ports=[NamedPort]))
    assert type(model.attn.to_qkv) is Adapted


class ThreeMatrices(OwnAttention):
    def __init__(self):
        super().__init__()
        self.to_qkv = None
        self.query, self.value = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.key = self.query


@pytest.mark.filterwarnings("error")
def test_three_matrices_are_kept_by_any_name_also_if_two_are_one():
    model = OwnModel()
    model.attn = ThreeMatrices()
    names = {role: f"qkv.{role[0]}_proj" for role in ("q_proj", "k_proj", "v_proj", "query", "key", "value")}
    of_variants = type("P", (OwnPort,), {"replaces": (ThreeMatrices,), "parameter_names": names})
    plan = plan_swap(model, Softmax(), ports=[of_variants])
    assert {"query.weight", "key.weight", "value.weight"} <= set(plan.sites[0].kept)


def test_a_port_of_the_users_own_decides_alone_which_layers_it_takes():
    class First(TimmViT):
        @classmethod
        def belongs(cls, model, name):
            return name.startswith("blocks.0.")

    assert list(attention_layers(vit()[0], [First])) == ["blocks.0.attn"]


def test_a_head_named_as_a_part_of_mobilevit_does_not_make_a_model_one():
    class Segmenter(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit, self.conv_1x1 = vit()[0], nn.Conv2d(8, 8, 1)

    assert set(attention_layers(Segmenter()).values()) == {TimmViT}


# a mechanism with another number of heads than its host: no row of the host is its row, and a swap is undone whole


DESK = "vit_desk(size=12, patch=3, dim=16, depth=2, heads=2)"
# with 3 heads, q and v have as many rows as the host's q, k and v
NUMBERS = [SKA(heads=1), SKA(heads=3), SKA(heads=4), SKA(heads=4, projection=SNE(init="svd")), CSKA(heads=3)]


def model_and_image():
    torch.manual_seed(0)
    model = create_model(DESK, None).double().eval()
    draw_large_weights(model)
    return model, torch.randn(2, 3, 12, 12, dtype=torch.float64)


@pytest.mark.parametrize("mixer", NUMBERS, ids=spell)
def test_other_numbers_of_heads_are_undone(mixer):
    model, x = model_and_image()
    before, state = model(x), copy.deepcopy(model.state_dict())
    changed = swap(model, mixer)(x)
    assert (changed - before).abs().max() > 1e-3 * before.abs().max()
    assert (swap(model, Softmax())(x) - before).abs().max() <= 1e-12 * before.abs().max()
    swap(model, mixer)
    assert (remove(model)(x) - before).abs().max() > 1e-3 * before.abs().max()
    swap(restore(model), mixer)
    assert torch.equal(restore(model)(x), before)
    same_state(model, state)


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_a_plan_with_other_heads_keeps_no_row(heads):
    model, _ = model_and_image()
    site = plan_swap(model, SKA(heads=heads)).sites[0]
    assert site.kept == ["proj.bias"]
    assert site.dropped == ["qkv.weight", "proj.weight"]
    assert site.new == ["regard.operator.keys", "regard.proj.weight", "regard.qkv.weight"]
    kept = plan_swap(model, SKA(heads=2)).sites[0].kept
    assert kept == ["qkv.weight[qv]", "proj.weight", "proj.bias"]


def test_a_state_with_other_heads_has_its_own_names(tmp_path):
    model, x = model_and_image()
    plain = copy.deepcopy(model.state_dict())
    swap(model, SKA(heads=3))
    assert "blocks.0.attn.qkv.weight" not in model.state_dict()
    assert model.state_dict()["blocks.0.attn.regard.qkv.weight"].shape == (48, 16)
    message = model.load_state_dict(plain, strict=False)
    assert "blocks.0.attn.regard.qkv.weight" in message.missing_keys
    assert not message.unexpected_keys
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)(x), model(x))


def test_a_bias_of_the_hosts_heads_refuses_others():
    model, x = swin()
    before = model.eval()(x)
    with pytest.raises(UnsupportedError, match="biases of 2 heads, which do not fit the 4 heads of SKA"):
        swap(model, SKA(heads=4))
    assert torch.equal(model(x), before)
    swap(model, SKA(heads=2), "layers.0.*")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replaces", nn.Linear),
        ("class_paths", "a.B"),
        ("watch", 5),
        ("parameter_names", ["qkv"]),
        ("mask_kinds", "bias"),
    ],
)
def test_a_member_of_a_port_that_is_of_another_kind_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"Wrong\.{name} is a "):
        type("Wrong", (Port,), {name: value, "__qualname__": "Wrong"})


@pytest.mark.parametrize("mixer", ["None", "SKA()", "Reformer(chunk=4)", "Conv()", "Softmax(projection=SNE())"])
def test_a_loaded_checkpoint_is_what_restore_brings_back(mixer: str) -> None:
    """Also of what the mechanism has no place for."""
    (trained, x), (model, _) = vit(), vit()
    swap(model, f"*={mixer}", example=x)
    model.load_state_dict(trained.state_dict(), strict=False)
    assert torch.equal(restore(model)(x), trained(x))
