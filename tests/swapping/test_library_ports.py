"""Ports of transformers, torchvision, open_clip and diffusers keep what the host computes, and save and load."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="pip install 'regard[hf]'")

from library_hosts import CLIP, HOSTS, HUGGING_HOSTS, SQUARE, gap, hugging, outputs, prepared, video  # noqa: E402
from regard.core import ConfigError, Grid, GridError, SwapError, UnsupportedError  # noqa: E402
from regard.mixers.axial import Axial  # noqa: E402
from regard.mixers.convolutions.conv import Conv  # noqa: E402
from regard.mixers.factors.factors import Factors  # noqa: E402
from regard.mixers.linear import Linear  # noqa: E402
from regard.mixers.mita.mita import MiTA  # noqa: E402
from regard.mixers.pvt import PVT  # noqa: E402
from regard.mixers.softmax import Softmax  # noqa: E402
from regard.mixers.static_keys.cska import CSKA  # noqa: E402
from regard.models.saving import load, save  # noqa: E402
from regard.swapping.capture import capture  # noqa: E402
from regard.swapping.inspect import attention_layers  # noqa: E402
from regard.swapping.layer import Port  # noqa: E402
from regard.swapping.ports import PORTS  # noqa: E402
from regard.swapping.ports.hugging_face import rf_detr  # noqa: E402
from regard.swapping.swap import plan_swap, restore, swap  # noqa: E402

LIBRARIES = json.loads((Path(__file__).parents[2] / "docs" / "libraries.json").read_text())

UNASKED = frozenset({"Mask2FormerModel", "MobileViTModel", "MobileViTV2Model", "RfDetrModel"})
"""Hosts that return no weights of the layers that are swapped."""


QUICK = ("ViTModel", "BeitModel, shared biases", "SwinModel", "SegformerModel", "DetrModel", "YolosForObjectDetection")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HUGGING_HOSTS],
)
def test_a_swap_is_written_and_read_again_and_not_lost_to_a_quiet_softmax(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS[name](), torch.float32)
    swap(model, Softmax(scale=0.1), example=inputs)
    assert gap(outputs(load(save(model, tmp_path / "ours")), inputs), outputs(model, inputs)) <= 1e-6
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises((SwapError, ValueError), match=r"loaded without it|regard\.load"):
        outputs(type(model).from_pretrained(tmp_path), inputs)  # type: ignore[attr-defined]
    restore(model).save_pretrained(tmp_path)  # type: ignore[operator]
    again = type(model).from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    assert gap(outputs(again, inputs), outputs(model, inputs)) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize("name", HUGGING_HOSTS)
def test_attention_weights_are_refused(name: str) -> None:
    model, inputs, _ = HUGGING_HOSTS[name]()
    swap(model.eval(), Softmax(), example=inputs)
    if name in UNASKED:
        given = getattr(model(**inputs, output_attentions=True), "attentions", None) or ()
        assert name == "Mask2FormerModel" or len(given) == 0
        return
    with pytest.raises(UnsupportedError, match=r"returns no attentions.*regard\.capture"):
        model(**inputs, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ViTModel", "YolosForObjectDetection"])
def test_attention_weights_are_refused_where_the_configuration_asks_and_one_layer_is_swapped(name: str) -> None:
    model, inputs, _ = HUGGING_HOSTS[name]()
    model.eval().set_attn_implementation("eager")  # type: ignore[operator]
    model.config.output_attentions = True  # type: ignore[union-attr]
    assert len(model(**inputs).attentions) == 2
    swap(model, Softmax(), where=next(iter(attention_layers(model))), example=inputs)
    with pytest.raises(UnsupportedError, match="returns no attentions"):
        model(**inputs)


@torch.no_grad()
def test_a_padding_mask_that_an_encoder_made_additive_hides_the_same_keys() -> None:
    """nn.TransformerEncoder does so; a mechanism without biases takes it too, but no other numbers."""
    model, inputs, _ = prepared(HOSTS["torchvision"]["nn.TransformerEncoder, padding"]())
    swap(model, Linear(), example=inputs)
    layer = model.encoder.layers[0].self_attn  # type: ignore[union-attr, index]
    x, hidden = torch.randn(2, 25, 32, dtype=torch.float64), inputs["padding"]
    added = torch.zeros(2, 25).double().masked_fill(hidden, -torch.inf)
    assert torch.equal(layer(x, x, x, added)[0], layer(x, x, x, hidden)[0])
    with pytest.raises(UnsupportedError, match="bias"):
        layer(x, x, x, added - 1)


class Causal(nn.Module):
    """Tokens of an image that see those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.att = nn.Conv2d(3, 32, 8, 8), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patch_embed(x).flatten(2).mT
        later = torch.ones(t.shape[1], t.shape[1]).bool().triu(1)
        return self.att(t, t, t, attn_mask=later, need_weights=False)[0]


def test_a_plan_refuses_the_masks_that_its_swap_refuses() -> None:
    for form in (plan_swap, swap):
        with pytest.raises(UnsupportedError, match="mask"):
            form(Causal(), Linear(), example=torch.randn(1, 3, 32, 32))


@torch.no_grad()
def test_an_encoder_does_not_go_round_the_mechanism() -> None:
    """Its fast path computes softmax from the weights without calling the layer; nested tensors are refused."""
    torch.manual_seed(0)
    model, inputs, _ = prepared(HOSTS["torchvision"]["nn.TransformerEncoder"]())
    before = outputs(model, inputs)
    swap(model, Factors(terms="0000"), example=inputs)
    assert all(not module._forward_hooks for module in model.encoder.modules())  # type: ignore[union-attr]
    assert gap(outputs(model, inputs), before) > 1e-3
    padding = torch.arange(25) >= torch.tensor([[25], [19]])
    model.encoder.use_nested_tensor = True  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"use_nested_tensor = False"):
        model(inputs["x"], padding)


def test_video_models_have_grids_of_frames() -> None:
    grids = {
        "VideoMAEModel": {Grid(4, 6, depth=2)},
        "VivitModel": {Grid(4, 6, 1, depth=2)},
        "VJEPA2Model": {Grid(4, 4, depth=2)},
        "TimesformerModel": {Grid(4, 4, 1), Grid.sequence(3)},
    }
    for name, expected in grids.items():
        host = HOSTS["transformers"][name]()
        sites = plan_swap(host.model, MiTA(m=2, k=2), example=host.inputs).sites
        assert {site.layer.mixer.site.grid for site in sites} == expected


def test_a_new_convolution_of_clips_changes_nothing_at_first() -> None:
    model, inputs, _ = prepared(HOSTS["transformers"]["VideoMAEModel"]())
    before = outputs(model, inputs)
    assert gap(outputs(swap(model, Softmax(dwc=3), example=inputs), inputs), before) < 1e-12


def test_mechanisms_of_images_are_refused_in_video_models() -> None:
    host = HOSTS["transformers"]["VideoMAEModel"]()
    modules = list(host.model.modules())
    with pytest.raises(UnsupportedError, match="CSKA takes images, not 2 frames"):
        swap(host.model, CSKA(), example=host.inputs)
    assert all(a is b for a, b in zip(host.model.modules(), modules, strict=True))
    assert swap(HOSTS["transformers"]["TimesformerModel"]().model, Axial(), example=torch.randn(1, 3, 3, 64, 64))


def test_tokens_of_clips_that_lie_on_no_grid_are_refused() -> None:
    joint = hugging(
        "TimesformerModel", 2, {}, **SQUARE, num_frames=3, attention_type="joint_space_time"
    ).model  # fmt: skip
    with pytest.raises(SwapError, match="sorted by place, then by frame"):
        swap(joint, Softmax(), example=torch.randn(1, 3, 3, 64, 64))
    host = HOSTS["transformers"]["VJEPA2Model"]()
    swap(host.model, Softmax(), example=host.inputs)
    with pytest.raises(UnsupportedError, match="leave position_mask out"):
        host.model.encoder.layer[0].attention(torch.randn(1, 32, 32), position_mask=torch.arange(32)[None])
    masked = video("VideoMAEForPreTraining", decoder_hidden_size=16, decoder_num_attention_heads=2).model
    with pytest.raises(SwapError, match="it gets 24 tokens, fewer than the 48 cells of its grid"):
        swap(masked, Softmax(), example={
            "pixel_values": torch.randn(CLIP), "bool_masked_pos": torch.arange(48).expand(2, -1) % 2 == 0,
        })  # fmt: skip


def test_decoders_text_and_pools_stay() -> None:
    """Object queries, words and pools have no grid: only the layers of images are swapped."""
    names = {
        "transformers DetrModel": {"encoder.layers.0.self_attn", "encoder.layers.1.self_attn"},
        "transformers DFineModel": {"encoder.aifi.0.layers.0.self_attn", "encoder.aifi.0.layers.1.self_attn"},
        "transformers OwlViTModel": {f"vision_model.encoder.layers.{i}.self_attn" for i in (0, 1)},
        "open_clip VisionTransformer, attention pool": {f"visual.transformer.resblocks.{i}.attn" for i in (0, 1)},
    }
    for host_name, expected in names.items():
        library, name = host_name.split(" ", 1)
        pytest.importorskip(library)
        assert set(attention_layers(HOSTS[library][name]().model)) == expected


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "option", "stage"),
    [
        ("PvtV2Model", "sr_ratios", "*layers.{}*"),
        ("PvtModel", "sequence_reduction_ratios", "*block.{}.*"),
        ("GLPNModel", "sr_ratios", "*block.{}.*"),
        ("SegformerModel", "sr_ratios", "*stages.{}.*"),
    ],
)
def test_pvt_keeps_what_reduces_its_keys(kind: str, option: str, stage: str) -> None:
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS[kind](**{option: [4, 1]}))  # type: ignore[call-arg]
    before, state = outputs(model, inputs), list(model.state_dict())
    swap(model, PVT(ratio=4), stage.format(0), inputs)
    swap(model, Softmax(), stage.format(1), inputs)
    assert gap(outputs(model, inputs), before) <= 1e-11
    assert list(model.state_dict()) == state


def test_tokens_of_rf_detr_are_put_row_by_row() -> None:
    """The whole map of one layer, beside the windows that transformers itself makes of it."""
    model = HUGGING_HOSTS["RfDetrModel"]().model
    embeddings = next(module for module in model.modules() if hasattr(module, "window_partition"))
    tokens = torch.arange(65.0).view(1, 65, 1)
    windows = embeddings.window_partition(tokens, 64, 64)
    assert windows.shape == (4, 17, 1)
    cut = rf_detr.windows_of(Grid(8, 8), 2)
    found = rf_detr.row_by_row(windows.view(1, -1, 1), cut, 1)
    assert found.flatten().tolist() == [0.0] * 4 + list(range(1, 65))
    assert torch.equal(rf_detr.by_window(found, cut, 1), windows.view(1, -1, 1))


@torch.no_grad()
def test_tokens_of_lw_detr_are_put_row_by_row() -> None:
    """A convolution, which needs the order of the map, on images that are not square, beside torch's on the map."""
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS["LwDetrViTBackbone"]())
    swap(model, Conv(), example=inputs)
    seen: dict[str, Tensor] = {}
    layer = model.encoder.layer[1].attention  # type: ignore[index, union-attr]
    layer.mixer.register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0]))
    layer.register_forward_pre_hook(lambda module, args: seen.update(given=args[0]))
    model(**inputs)
    assert seen["tokens"].shape[1] == 8 * 12
    windows = seen["given"].unflatten(1, (2, 2, 4, 6)).transpose(2, 3)  # (B, 2, 4, 2, 6, C)
    assert torch.equal(windows.flatten(1, 4), seen["tokens"])


def test_a_swapped_rf_detr_refuses_images_whose_windows_transformers_mixes_up() -> None:
    model, inputs, _ = HUGGING_HOSTS["RfDetrModel"]()
    swap(model, MiTA(m=4, k=4), example=inputs)
    with pytest.raises(GridError, match="square images only, and these have 8x16 patches"):
        model(torch.randn(1, 3, 64, 128))


@pytest.mark.parametrize("path", [row["class"] for row in LIBRARIES["left"]])
def test_what_is_left_has_no_port(path: str) -> None:
    module, _, name = path.rpartition(".")
    pytest.importorskip(path.partition(".")[0])
    kind = getattr(importlib.import_module(module), name)
    assert not any(port.matches(kind.__new__(kind)) for port in PORTS)


def test_the_table_of_the_docs_has_every_host() -> None:
    compared = {(row["library"], row["model"]): row for row in LIBRARIES["compared"]}
    assert compared.keys() >= {(library, name) for library, hosts in HOSTS.items() for name in hosts}
    assert all(row["softmax"] <= 1e-6 and row["uniform"] >= 1e-3 for row in compared.values())


def test_models_of_other_libraries_are_not_saved_as_those_of_transformers(tmp_path: Any) -> None:
    pytest.importorskip("open_clip")
    with pytest.raises(ConfigError, match="not this CLIP"):
        save(HOSTS["open_clip"]["VisionTransformer"]().model, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["SwinModel", "HieraModel", "Sam2HieraDetModel", "SamVisionModel", "DetrModel", "RTDetrModel"]
)
def test_maps_of_layers_with_biases_and_pooled_queries_are_captured(name: str) -> None:
    model, inputs, layers = prepared(HUGGING_HOSTS[name]())
    swap(model, Softmax(), example=inputs)
    with capture(model) as maps:
        outputs(model, inputs)
    assert len(maps) == layers
    assert all(torch.allclose(rows.sum(-1), torch.ones(())) for rows in maps.values())


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 96), (96, 80)])
def test_detection_tokens_of_yolos_lie_behind_the_patches(size: tuple[int, int]) -> None:
    """Also at a size that the model was not swapped for."""
    model, inputs, _ = prepared(HUGGING_HOSTS["YolosForObjectDetection"]())
    swap(model, MiTA(m=4, k=4), example=inputs)
    grids: list[Grid] = []
    for port in (module for module in model.modules() if isinstance(module, Port)):
        port.mixer.register_forward_pre_hook(lambda mixer, arguments: grids.append(arguments[1]))
    assert torch.isfinite(model(torch.randn(2, 3, *size, dtype=torch.float64)).pred_boxes).all()
    assert grids == [Grid(size[0] // 16, size[1] // 16, prefix=1, suffix=5)] * 2


def test_a_causal_mask_of_torch_is_refused_where_later_tokens_are_read() -> None:
    """PyTorch wants the mask beside `is_causal`; a local branch and CSKA read tokens that it forbids."""
    causal = nn.Transformer.generate_square_subsequent_mask(16)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Conv2d(3, 32, 4, 4)
            self.block = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)

        def forward(self, images: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.patch_embed(images).flatten(2).mT
            out: torch.Tensor = self.block(x, src_mask=mask, is_causal=mask is not None)
            return out

    images = torch.randn(2, 3, 16, 16)
    for mixer in (Softmax(dwc=3), CSKA()):
        model = swap(Encoder().eval(), mixer, example=images)
        with pytest.raises(UnsupportedError, match="causal"):
            model(images, causal)
    host = Encoder().eval()
    plain = host(images, causal)
    assert torch.allclose(swap(host, Softmax(), example=images)(images, causal), plain, atol=1e-5)
    # what else the mask adds counts too, as in torch where the weights are asked for
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(32, 2, batch_first=True).eval(), torch.randn(2, 16, 32)
    slope = causal - 0.5 * (torch.arange(16)[:, None] - torch.arange(16)).abs()
    expected = attention(x, x, x, attn_mask=slope, is_causal=True)[0]
    host.block.self_attn = attention
    port = swap(host, Softmax(), example=images).block.self_attn
    assert torch.allclose(port(x, x, x, attn_mask=slope, is_causal=True)[0], expected, atol=1e-5)
