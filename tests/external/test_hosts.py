"""Hosts and ports against code that Regard did not write: timm, transformers, equations written out anew."""

import pytest
import timm
import torch
from torch import nn

from hosts.small_hosts import spread
from regard.hosts.cvt import cvt_13
from regard.hosts.swap import create_model, swap
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA


@pytest.mark.parametrize(
    ("name", "options", "mixer", "size"),
    [
        ("xcit_nano_12_p16_224", {"depth": 2}, XCA(), 64),
        ("caformer_s18", {}, Softmax(), 64),
        ("cait_xxs24_224", {"depth": 2, "img_size": 64}, Softmax(), 64),
    ],
    ids=lambda value: str(value)[:20],
)
def test_timm_models_with_our_attention_give_the_same_logits(name, options, mixer, size):
    print("timm", timm.__version__)
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options).double().eval()
    for value in model.parameters():
        nn.init.normal_(value, std=0.2) if value.ndim > 1 else nn.init.normal_(value, 1.0, 0.2)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    before = model(x)
    swap(model, mixer, example=x[:1])
    assert (model(x) - before).abs().max() <= 1e-11 * before.abs().max()


def cvt_pair(pixels):
    """transformers' CvT-13, and ours with its weights."""
    transformers = pytest.importorskip("transformers", reason="pip install 'regard[hf]'")
    print("transformers", transformers.__version__)
    torch.manual_seed(0)
    theirs = transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=7)).double()
    ours = cvt_13(num_classes=7, img_size=pixels).double()
    for module in ours.modules():
        if isinstance(module, nn.Module) and type(module).__name__ == "Mlp":
            module.act = nn.GELU()  # transformers' choice; the original has QuickGELU
    spread(theirs)
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


@pytest.mark.parametrize("pixels", [32, pytest.param(48, marks=pytest.mark.slow)])
def test_cvt_13_is_transformers_cvt(pixels):
    theirs, ours = cvt_pair(pixels)
    x = torch.randn(2, 3, pixels, pixels, dtype=torch.float64)
    wanted = theirs(x).logits
    assert (ours(x) - wanted).abs().max() <= 1e-9 * wanted.abs().max()
    swap(ours, Softmax(), example=x[:1])
    assert (ours(x) - wanted).abs().max() <= 1e-9 * wanted.abs().max()


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
    torch.manual_seed(0)
    model = create_model("cait_s_32", None).double().eval()
    for value in model.parameters():
        nn.init.normal_(value, std=0.08)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    wanted = cait_by_hand(dict(model.named_parameters()), x, 8)
    assert (model(x) - wanted).abs().max() <= 1e-11 * wanted.abs().max()
