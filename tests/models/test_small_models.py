"""The small hosts of the SKA paper: what stands around their attention stays around a mechanism that is swapped in."""

import pytest
import timm
import torch
from torch import nn

from regard.core import ConfigError, Grid, GridError, Mask, UnsupportedError
from regard.mixers.flatten import FLatten
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA
from regard.models.catalog import HOSTS, list_models
from regard.models.create import create_model
from regard.models.cvt import convolve
from regard.models.metaformer import load_fitting
from regard.models.timm_registry import register_timm
from regard.projections.sne import PSNE
from regard.swapping.capture import capture
from regard.swapping.inspect import input_channels
from regard.swapping.swap import restore, swap


def model_and_image(host):
    torch.manual_seed(0)
    model = create_model(host, None, num_classes=7)
    for value in model.parameters():
        nn.init.normal_(value, std=0.08)
    for name, value in model.named_buffers():
        if name.endswith("running_var"):
            nn.init.uniform_(value, 0.5, 1.5)
    return model.double().eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)


@pytest.mark.slow
def test_keeping_what_surrounds_attention_is_not_the_same_as_dropping_it():
    for kept, loose in (
        ("vit_s_32_spt(keep_lsa=True)", "vit_s_32_spt"),
        ("cait_s_32", "cait_s_32(keep_talking=False)"),
    ):
        model, x = model_and_image(kept)
        other, _ = model_and_image(loose)
        other.load_state_dict(model.state_dict())
        assert torch.equal(model(x), other(x))
        assert not torch.allclose(swap(model, Softmax())(x), swap(other, Softmax())(x))


@pytest.mark.slow
def test_keys_of_the_last_stage_of_cvt_are_one_cell_and_the_class_token():
    model, x = model_and_image("cvt_13")
    swap(model, SKA())
    layer = model.stages[2].blocks[0].attn
    assert layer.mixer.operator.keys.shape == (6, 1, 64)
    assert layer.mixer.operator.extra_keys.shape == (6, 1, 64)
    with capture(model, "stages.[02].blocks.0.*") as maps:
        model(x)
    assert [a.shape for a in maps.values()] == [(2, 1, 64, 16), (2, 6, 5, 2)]
    wide = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    assert model(wide).shape == (1, 7)
    with pytest.raises(UnsupportedError, match="kv_stride=1"):
        swap(restore(model), XCA())
    with pytest.raises(ConfigError, match="kv_stride=1"):
        swap(model, Softmax(dwc=3))


@pytest.mark.slow
def test_cvt_takes_other_projections_and_its_own_grid_takes_every_mechanism():
    model, x = model_and_image("cvt_13")
    swap(model, Softmax(projection=PSNE()))
    assert "stages.0.blocks.0.attn.conv_q.conv.weight" in model.state_dict()
    model(x)
    model, x = model_and_image("cvt_13(kv_stride=1)")
    swap(model, XCA())
    assert torch.isfinite(model(x)).all()
    swap(model, Softmax(dwc=3))
    assert torch.isfinite(model(x)).all()


def test_what_stands_beside_an_operator_is_not_lost_in_cvt():
    model, _ = model_and_image("cvt_13(kv_stride=1)")
    with pytest.raises(UnsupportedError, match="a layer of its own around its operator .LocalMixer"):
        swap(model, FLatten(local=5))
    swap(model, FLatten())


def test_hidden_tokens_do_not_pass_through_the_convolution_beside_attention_in_cvt():
    model, _ = model_and_image("cvt_13(kv_stride=1)")
    mixer = swap(model, Softmax(dwc=3)).stages[0].blocks[0].attn.mixer
    grid, x = Grid(4, 5), torch.randn(2, 20, mixer.site.dim, dtype=torch.float64)
    keep = torch.arange(20).expand(2, -1) != 7
    mixer.dwc.weight.data.fill_(1.0)
    for conv in (mixer.conv_q.conv, mixer.conv_k.conv, mixer.conv_v.conv):  # the host's own, which know no masks
        conv.weight.data.zero_()[..., 1, 1] = 1.0
    other = torch.where(keep[..., None], x, 9.0)
    out, again = (mixer(tokens, grid, Mask(keep=keep))[keep] for tokens in (x, other))
    assert torch.allclose(out, again, rtol=0, atol=1e-12)


def test_static_keys_for_each_window_are_those_of_the_shared_key_when_they_are_equal():
    one, x = model_and_image("swin_t_32")
    each, _ = model_and_image("swin_t_32(keys='window')")
    swap(one, SKA())
    swap(each, SKA())
    state = one.state_dict()
    for key, value in each.state_dict().items():
        source = state[key.replace("operator.inner.", "operator.")]
        value.copy_(source.repeat(len(value) // len(source), 1, 1) if value.shape != source.shape else source)
    assert torch.allclose(each(x), one(x), rtol=0, atol=1e-11)
    key = each.stages[0][1].attn.mixer.operator.inner.keys
    assert key.shape == (16 * 3, 16, 32)
    with torch.no_grad():
        key[15 * 3 :] += 1.0 * torch.randn_like(key[15 * 3 :])  # the last window alone
    stage = each.stages[0][:2]
    changed = (stage(x.movedim(1, -1)) - one.stages[0][:2](x.movedim(1, -1))).abs().amax((0, 3)) > 1e-9
    assert changed[12:, 12:].any()
    assert not changed[:12].any()
    assert not changed[:, :12].any()


def test_keys_for_each_window_refuse_another_number_of_windows():
    model, _ = model_and_image("swin_t_32(keys='window')")
    swap(model, SKA())
    layer = model.stages[0][1].attn
    with pytest.raises(GridError, match="not whole images of 16 windows, each with parameters of its own"):
        layer(torch.randn(3, 16, 96, dtype=torch.float64))


def test_shifted_windows_and_merging_follow_the_image():
    model, x = model_and_image("swin_t_32")
    assert [tuple(y.shape[1:]) for y in model.maps(x)] == [(96, 16, 16), (192, 8, 8), (384, 4, 4), (768, 4, 4)]
    merge = model.stages[0][0]
    nn.init.zeros_(merge.linear.weight).data[0, 3] = 1.0  # channel 0, lower right of the four
    nn.init.zeros_(merge.linear.bias)
    picked = merge(x.movedim(1, -1))[..., 0]
    assert torch.equal(picked, x[:, 0, 1::2, 1::2])


@pytest.mark.parametrize("host", ["cvt_13", "cvt_13_32", "swin_t_32"])
def test_linear_layers_of_published_hosts_start_as_published(host):
    """A normal distribution of deviation 0.02, biases 0; in CvT stochastic depth rises from 0 within the last stage."""
    torch.manual_seed(0)
    model = create_model(host, None)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) > 30
    for module in linear:
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert module.bias is None or not module.bias.any()
    if host == "cvt_13":
        rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.stages[2].blocks]
        assert rates == pytest.approx([0.1 * index / 9 for index in range(10)])


FEATURES = {"features_only": True}
SMALL = {"img_size": 64}


@pytest.mark.parametrize(
    ("host", "options", "message"),
    [
        ("swin_t_32(img_size=20)", {}, "multiples of 8"),
        ("swin_t_32(keys='all')", {}, "keys='shared'"),
        ("cvt_13(dims=(64, 190, 384))", {}, "multiples of 1, 3, 6"),
        ("cait_s_32(hedas=3)", {}, "did you mean"),
        ("xcit_desk(size=10)", {}, "cannot be cut into patches of 4x4"),
        ("xcit_desk(heads=3)", {}, "multiple of 3 heads"),
        ("cvt_13", {"out_indices": (5,), **FEATURES}, "the 3 stages are 0 to 2"),
        ("swin_t_32", {"out_indices": (0, -5), **FEATURES}, "the 4 stages are 0 to 3, or -1 to -4"),
        ("vit_s_32", {"out_indices": (6,), **FEATURES}, "the 6 stages are 0 to 5"),
        ("cvt_13", {"out_indices": (), **FEATURES}, "at least one"),
        ("skaformer_desk", {"out_indices": (4,), **FEATURES, **SMALL}, "the 4 stages are 0 to 3"),
        ("skaformer_desk(heads=5)", SMALL, "5 heads do not divide a width of 64"),
        ("skaformer_s18", {"mixers": ("conv", "ska"), **SMALL}, "are four"),
        ("skaformer_s18", {"mixers": ("conv", "skaa", "attn", "attn"), **SMALL}, "SKA"),
        ("skaformer_s18(resize='window')", {"mixers": ("conv", "XCA()", "attn", "attn"), **SMALL}, "has no resize"),
        ("skaformer_desk(query='identical')", SMALL, "identity"),
        ("skaformer_desk(query='identity')", {"mixers": ("conv", "conv", "attn", "attn")}, "stages with a mechanism"),
        ("skaformer_desk(query='identity')", {"mixers": ("conv", "Conv()", "attn", "attn")}, "which Conv"),
        (
            "skaformer_desk(query='identity')",
            {"mixers": ("conv", "SKA(projection=SNE())", "attn", "attn")},
            "replaces a linear query",
        ),
        ("vit5_small", {"num_registers": 3}, "registers form a square"),
        ("vit5_small", {"img_size": (224, 230)}, "224x230 cannot be cut"),
        ("vit5_small", {"embed_dim": 36, "num_heads": 6}, "multiple of 4"),
        ("vit5_small", {"registers": 4}, "num_registers"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused(host, options, message):
    with pytest.raises(ConfigError, match=message):
        create_model(host, None, **options)


@pytest.mark.parametrize(
    "host",
    ["vit_desk", "xcit_desk", "cait_s_32", "cvt_13", "skaformer_desk", "vit5_small", "vit_s_32_spt", "swin_t_32"],
)
def test_every_host_tells_its_channels(host):
    """Plans make an image of noise; the last two have no convolution that would say how many channels it has."""
    with torch.device("meta"):
        assert input_channels(create_model(host, None, in_chans=2)) == 2


@pytest.mark.parametrize("host", ["cvt_13", pytest.param("cvt_13_32", marks=pytest.mark.slow)])
def test_an_explicit_scale_is_the_scale_of_cvt(host):
    """The host's own factor, given as `scale`, is the host; 384^-0.5 in cvt_13, 64^-0.5 in the plainer variant."""
    model, x = model_and_image(host)
    before = model(x)
    scale = model.stages[2].blocks[0].attn.scale
    assert scale == (384 if host == "cvt_13" else 64) ** -0.5
    swap(model, Softmax(scale=scale), "stages.2.*")
    assert (model(x) - before).abs().max() <= 1e-12 * before.abs().max()
    mixer = swap(model, SKA(scale=1.0), "stages.2.*").stages[2].blocks[0].attn.mixer
    grid = mixer.site.grid
    tokens = torch.randn(2, grid.tokens, 384, dtype=torch.float64)
    raw = mixer.project(convolve(mixer, "q", tokens, grid), "q")[0]
    assert torch.equal(mixer.project_heads(tokens, grid)["q"], raw)


def test_features_of_every_small_host():
    x = torch.randn(1, 3, 32, 32)
    for host, channels in (("swin_t_32", [96, 192, 384, 768]), ("cvt_13", [64, 192, 384]), ("vit_s_32", [512] * 6)):
        model = create_model(host, None, features_only=True).eval()
        assert [y.shape[1] for y in model(x)] == channels == model.feature_info.channels()
        swap(model, Softmax(), example=x)
        assert len(model(x)) == len(channels)
    last = create_model("cvt_13", None, features_only=True, out_indices=(-1, 0))
    assert last.feature_info.channels() == [384, 64]


# SKAFormer, CSKAFormer


@pytest.mark.slow
@pytest.mark.parametrize("host", ["skaformer_s18", "cskaformer_s18"])
def test_a_metaformer_pyramid_on_a_larger_rectangle(host):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 80, 133)
    outs = {}
    for resize in ("window", "interpolate"):
        torch.manual_seed(1)
        model = create_model(f"{host}(img_size=64)", None, features_only=True, resize=resize).eval()
        for name, value in model.named_parameters():
            if "operator.keys" in name:
                nn.init.normal_(value)
        outs[resize] = model(x)
        assert [tuple(y.shape[1:]) for y in outs[resize]] == [(64, 20, 33), (128, 10, 17), (320, 5, 9), (512, 3, 5)]
    assert torch.equal(outs["window"][0], outs["interpolate"][0])
    assert not torch.allclose(outs["window"][1], outs["interpolate"][1])


@pytest.mark.slow
def test_checkpoints_load_into_every_layer_that_keeps_its_shape(tmp_path):
    plain = timm.create_model("caformer_s18", num_classes=1000)
    path = str(tmp_path / "caformer.pt")
    torch.save(plain.state_dict(), path)
    with pytest.warns(UserWarning, match="15 of the 206 tensors"):
        model = create_model("skaformer_s18", None, pretrained=path, img_size=64)
    state = plain.state_dict()
    for key, value in model.state_dict().items():
        if "stages.1" not in key or "mlp" in key or "norm" in key or "downsample" in key:
            assert torch.equal(value, state[key].reshape(value.shape)), key
    left = load_fitting(model, state)
    assert left
    assert all(key.startswith("stages.1.blocks.") and ".token_mixer." in key for key in left)
    with pytest.warns(UserWarning, match="left out: stages.1.blocks.0.token_mixer"):
        backbone = create_model("skaformer_s18", None, pretrained=path, features_only=True, img_size=64)
    assert torch.equal(backbone.stages_3.blocks[0].mlp.fc1.weight, state["stages.3.blocks.0.mlp.fc1.weight"])


@pytest.mark.slow
def test_placements_are_where_they_say():
    model = create_model("skaformer_s18(img_size=64, mixers=('conv', 'conv', 'SKA(scale=1.0)', 'attn'))", None)
    kinds = [type(stage.blocks[0].token_mixer).__name__ for stage in model.stages]
    assert kinds == ["SepConv", "SepConv", "TimmMetaFormer", "Attention"]
    assert model.stages[2].blocks[0].token_mixer.mixer.config == SKA(scale=1.0)
    assert str(model.stages[2].blocks[0].token_mixer.mixer.site.grid) == "4x4 patch + 0 prefix + 0 suffix tokens"


# timm's registry


def test_registration_is_explicit_and_may_be_repeated():
    names = register_timm()
    assert register_timm() == names == [f"regard_{name}" for name in HOSTS]
    assert set(timm.list_models("regard_*")) == set(names)
    model = timm.create_model("regard_vit_s_32", num_classes=3)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    backbone = timm.create_model("regard_skaformer_s18", features_only=True, img_size=64)
    assert backbone.feature_info.channels() == [64, 128, 320, 512]
    with pytest.raises(ValueError, match="no pretrained"):
        timm.create_model("regard_vit_s_32", pretrained=True)
    assert type(create_model("regard_vit_desk", None)) is type(create_model("vit_desk", None))
    assert list_models("regard_*") == list(HOSTS)
    assert not [name for name in list_models() if name.startswith("regard_")]


def test_shifted_patches_hold_the_image_and_its_shifts():
    model = create_model("vit_s_32_spt", None)
    shifted = model.patch_embed.proj
    x = torch.zeros(1, 3, 32, 32)
    x[0, 0, 3, 8] = 1.0  # the lowest row of patch (0, 2): the downward shift moves it into patch (1, 2)
    changed = (shifted(x) - shifted(torch.zeros_like(x))).abs().amax(1)[0] > 1e-6
    assert {tuple(cell) for cell in changed.nonzero().tolist()} == {(0, 2), (1, 2), (0, 1)}
