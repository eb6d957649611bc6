"""Hosts and ports against code that Regard did not write: timm, transformers, vit-pytorch, equations anew."""

import pytest
import torch
from torch import nn

from regard.mixers.softmax import Softmax
from regard.models.create import create_model
from regard.models.cvt import cvt_13
from regard.swapping.swap import swap
from small_hosts import draw_large_weights


def cvt_pair(pixels):
    """transformers' CvT-13, and ours with its weights."""
    transformers = pytest.importorskip("transformers", reason="pip install 'regard[hf]'")
    torch.manual_seed(0)
    theirs = transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=7)).double()
    ours = cvt_13(num_classes=7, img_size=pixels).double()
    for module in ours.modules():
        if isinstance(module, nn.Module) and type(module).__name__ == "Mlp":
            module.act = nn.GELU()  # transformers' choice; the original has QuickGELU
    draw_large_weights(theirs)
    for name, value in theirs.named_buffers():
        if name.endswith("running_var"):
            nn.init.uniform_(value, 0.5, 1.5)
    state = {key: theirs.state_dict()[their_name(key)] for key in ours.state_dict()}
    state = {key: value.reshape(ours.state_dict()[key].shape) for key, value in state.items()}
    ours.load_state_dict(state)
    return theirs.eval(), ours.eval()


def their_name(key):
    """The name of a parameter of our cvt_13 in transformers."""
    whole = {"norm": "layernorm", "head": "classifier"}
    head, _, leaf = key.rpartition(".")
    if head in whole:
        return f"{whole[head]}.{leaf}"
    _, stage, rest = key.split(".", 2)
    parts = {
        "embed.proj": "embedding.convolution_embeddings.projection",
        "embed.norm": "embedding.convolution_embeddings.normalization",
        "attn.conv_q.conv": "attention.attention.convolution_projection_query.convolution_projection.convolution",
        "attn.conv_k.conv": "attention.attention.convolution_projection_key.convolution_projection.convolution",
        "attn.conv_v.conv": "attention.attention.convolution_projection_value.convolution_projection.convolution",
        "attn.conv_q.bn": "attention.attention.convolution_projection_query.convolution_projection.normalization",
        "attn.conv_k.bn": "attention.attention.convolution_projection_key.convolution_projection.normalization",
        "attn.conv_v.bn": "attention.attention.convolution_projection_value.convolution_projection.normalization",
        "attn.proj_q": "attention.attention.projection_query",
        "attn.proj_k": "attention.attention.projection_key",
        "attn.proj_v": "attention.attention.projection_value",
        "attn.proj": "attention.output.dense",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    start = f"cvt.encoder.stages.{stage}."
    if rest == "cls_token":
        return start + "cls_token"
    if rest.startswith("embed."):
        return start + parts[rest.rpartition(".")[0]] + "." + rest.rpartition(".")[2]
    _, block, inner = rest.split(".", 2)
    return f"{start}layers.{block}.{parts[inner.rpartition('.')[0]]}.{inner.rpartition('.')[2]}"


@pytest.mark.slow  # the import
@pytest.mark.parametrize("pixels", [32, 48])
def test_cvt_13_is_transformers_cvt(pixels):
    theirs, ours = cvt_pair(pixels)
    x = torch.randn(2, 3, pixels, pixels, dtype=torch.float64)
    expected = theirs(x).logits
    assert (ours(x) - expected).abs().max() <= 1e-9 * expected.abs().max()
    swap(ours, Softmax(), example=x[:1])
    assert (ours(x) - expected).abs().max() <= 1e-9 * expected.abs().max()


def cait_by_hand(state, x, heads):
    """cait_s_32 from its equations (Touvron et al. 2021, Eqs. 7-9; talking heads: Shazeer et al. 2020)."""
    f = nn.functional
    get = state.__getitem__

    def norm(name, y):
        return f.layer_norm(y, (512,), get(f"{name}.weight"), get(f"{name}.bias"), 1e-5)

    def attention(name, q, y):
        wq, wk, wv = get(f"{name}.qkv.weight").chunk(3)
        pairs = ((q, wq), (y, wk), (y, wv))
        q, k, v = (torch.einsum("bnc,hdc->bhnd", z, w.unflatten(0, (heads, -1))) for z, w in pairs)
        logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / q.shape[-1] ** 0.5
        a = torch.einsum("gh,bhnm->bgnm", get(f"{name}.proj_l.weight"), logits).softmax(-1)
        a = torch.einsum("gh,bhnm->bgnm", get(f"{name}.proj_w.weight"), a)
        o = torch.einsum("bhnm,bhmd->bnhd", a, v).flatten(2)
        return f.linear(o, get(f"{name}.proj.weight"), get(f"{name}.proj.bias"))

    def mlp(name, y):
        y = f.gelu(f.linear(y, get(f"{name}.fc1.weight"), get(f"{name}.fc1.bias")))
        return f.linear(y, get(f"{name}.fc2.weight"), get(f"{name}.fc2.bias"))

    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (B, 64, 48)
    y = f.linear(patches, get("patch_embed.proj.weight").flatten(1), get("patch_embed.proj.bias")) + get("pos_embed")
    for i in range(6):
        b = f"blocks.{i}"
        z = norm(f"{b}.norm1", y)
        y = y + get(f"{b}.gamma_1") * attention(f"{b}.attn", z, z)
        y = y + get(f"{b}.gamma_2") * mlp(f"{b}.mlp", norm(f"{b}.norm2", y))
    token = get("cls_token").expand(len(x), -1, -1)
    for i in range(2):
        b = f"blocks_token_only.{i}"
        z = norm(f"{b}.norm1", torch.cat([token, y], 1))
        token = token + get(f"{b}.gamma_1") * attention(f"{b}.attn", z[:, :1], z)
        token = token + get(f"{b}.gamma_2") * mlp(f"{b}.mlp", norm(f"{b}.norm2", token))
    return f.linear(norm("norm", token[:, 0]), get("head.weight"), get("head.bias"))


def test_cait_s_32_is_its_equations():
    model, x = ours_spread("cait_s_32")
    assert same(model(x), cait_by_hand(dict(model.named_parameters()), x, 8))


# vit-pytorch, which the SKA paper's code is built on


def ours_spread(name):
    torch.manual_seed(0)
    model = create_model(name, None).double().eval()
    for value in model.parameters():
        nn.init.normal_(value, std=0.08)
    return model, torch.randn(2, 3, 32, 32, dtype=torch.float64)


def given(theirs, ours, names, state):
    """Their model in float64 with our weights. names: theirs -> ours, of modules; state: theirs -> values."""
    own = ours.state_dict()
    for their, our in names.items():
        for leaf in ("weight", "bias"):
            if f"{our}.{leaf}" in own:
                state[f"{their}.{leaf}"] = own[f"{our}.{leaf}"]
    theirs = theirs.double().eval()
    shapes = {name: value.shape for name, value in theirs.state_dict().items()}
    theirs.load_state_dict({**state, **{name: state[name].reshape(shape) for name, shape in shapes.items()}})
    return theirs


def block_names(theirs, ours, wrapped=""):
    """Of a block: attention with its norm first, then the MLP with its norm. wrapped: how layer scale names it."""
    first, second = f"{theirs}.0.{wrapped}", f"{theirs}.1.{wrapped}net."
    return {
        f"{first}norm": f"{ours}.norm1",
        f"{first}to_out.0": f"{ours}.attn.proj",
        f"{second}0": f"{ours}.norm2",
        f"{second}1": f"{ours}.mlp.fc1",
        f"{second}4": f"{ours}.mlp.fc2",
    }


def same(ours, expected):
    return (ours - expected).abs().max() <= 1e-11 * expected.abs().max()


@pytest.mark.slow
def test_vit_s_32_spt_is_vit_pytorchs_vit_for_small_datasets():
    """The whole model; their patches have channels last."""
    module = pytest.importorskip("vit_pytorch.vit_for_small_dataset", reason="pip install vit-pytorch")
    ours, x = ours_spread("vit_s_32_spt")
    theirs = module.ViT(image_size=32, patch_size=4, num_classes=10, dim=512, depth=6, heads=8, mlp_dim=512)
    names = {"mlp_head.0": "norm", "mlp_head.1": "head"}
    state = {"pos_embedding": ours.pos_embed, "cls_token": ours.cls_token}
    patches, start = ours.patch_embed.proj, "to_patch_embedding.to_patch_tokens"
    last = torch.arange(15 * 16).view(15, 16).T.flatten()
    state |= {f"{start}.1.weight": patches.norm.weight[last], f"{start}.1.bias": patches.norm.bias[last]}
    state |= {f"{start}.2.weight": patches.linear.weight[:, last], f"{start}.2.bias": patches.linear.bias}
    for i, block in enumerate(ours.blocks):
        names |= block_names(f"transformer.layers.{i}", f"blocks.{i}") | {
            f"transformer.layers.{i}.0.to_qkv": f"blocks.{i}.attn.qkv"
        }
        state[f"transformer.layers.{i}.0.temperature"] = block.attn.temperature
    with torch.no_grad():
        assert same(ours(x), given(theirs, ours, names, state)(x))


@pytest.mark.slow
def test_vit_s_32_is_vit_pytorchs_vit_behind_the_patches():
    """Theirs has a norm before and after the matrix of patches, ours (timm's) none: the patches are ours in both."""
    module = pytest.importorskip("vit_pytorch.vit", reason="pip install vit-pytorch")
    ours, x = ours_spread("vit_s_32")
    theirs = module.ViT(image_size=32, patch_size=4, num_classes=10, dim=512, depth=6, heads=8, mlp_dim=512)
    theirs.to_patch_embedding = nn.Identity()
    names = {"transformer.norm": "norm", "mlp_head": "head"}
    for i in range(6):
        names |= block_names(f"transformer.layers.{i}", f"blocks.{i}") | {
            f"transformer.layers.{i}.0.to_qkv": f"blocks.{i}.attn.qkv"
        }
    theirs = given(theirs, ours, names, {"pos_embedding": ours.pos_embed, "cls_token": ours.cls_token})
    with torch.no_grad():
        expected = theirs(ours.patch_embed(x))
        assert same(ours(x), expected)
        swap(ours, Softmax(), example=x[:1])
        assert same(ours(x), expected)


@pytest.mark.slow
def test_cvt_13_32_is_vit_pytorchs_cvt():
    """The whole model, running means of the batch norms among its weights."""
    module = pytest.importorskip("vit_pytorch.cvt", reason="pip install vit-pytorch")
    ours, x = ours_spread("cvt_13_32")
    state, names = {}, {"to_logits.2": "head"}
    for name, value in ours.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            nn.init.uniform_(value, 0.5, 1.5)
    for s, stage in enumerate(ours.stages):
        names[f"layers.{s}.0"] = f"stages.{s}.embed.proj"
        state |= {f"layers.{s}.1.g": stage.embed.norm.weight, f"layers.{s}.1.b": stage.embed.norm.bias}
        for i, block in enumerate(stage.blocks):
            place, own, attention = f"layers.{s}.2.layers.{i}", f"stages.{s}.blocks.{i}", block.attn
            for norm, their in ((block.norm1, f"{place}.0.norm"), (block.norm2, f"{place}.1.net.0")):
                state |= {f"{their}.g": norm.weight, f"{their}.b": norm.bias}
            joined = torch.cat([attention.proj_k.weight, attention.proj_v.weight])
            for role, matrix in (("q", attention.proj_q.weight), ("kv", joined)):
                state[f"{place}.0.to_{role}.net.0.weight"] = getattr(attention, f"conv_{role}").conv.weight
                norm = getattr(attention, f"conv_{role}").bn.state_dict()
                state |= {f"{place}.0.to_{role}.net.1.{key}": value for key, value in norm.items()}
                state[f"{place}.0.to_{role}.net.2.weight"] = matrix
            names |= {f"{place}.0.to_out.0": f"{own}.attn.proj", f"{place}.1.net.1": f"{own}.mlp.fc1"}
            names |= {f"{place}.1.net.4": f"{own}.mlp.fc2"}
    with torch.no_grad():
        assert same(ours(x), given(module.CvT(num_classes=10), ours, names, state)(x))
