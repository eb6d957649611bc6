"""Ports of transformers, torchvision, open_clip and diffusers keep what the host computes, and save and load."""

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="pip install 'regard[hf]'")

from library_hosts import (  # noqa: E402
    HOSTS,
    HUGGING_HOSTS,
    HUGGING_PVT,
    HUGGING_PVT1,
    LEFT,
    SQUARE,
    SWIN,
    LibraryHost,
    gap,
    hugging,
    images,
    outputs,
    prepared,
)
from regard.core import ConfigError, Grid, GridError, SwapError, UnsupportedError  # noqa: E402
from regard.mixers.convolutions.conv import Conv  # noqa: E402
from regard.mixers.factors.factors import Factors  # noqa: E402
from regard.mixers.linear import Linear  # noqa: E402
from regard.mixers.mita.mita import MiTA  # noqa: E402
from regard.mixers.pvt import PVT  # noqa: E402
from regard.mixers.softmax import Softmax  # noqa: E402
from regard.mixers.spelling import spell  # noqa: E402
from regard.mixers.static_keys.ska import SKA  # noqa: E402
from regard.mixers.topk.topk import TopK  # noqa: E402
from regard.mixers.window import Window  # noqa: E402
from regard.models.saving import load, save  # noqa: E402
from regard.projections.sne import PSNE  # noqa: E402
from regard.swapping.capture import capture  # noqa: E402
from regard.swapping.host_mixer import HostPort  # noqa: E402
from regard.swapping.inspect import attention_layers  # noqa: E402
from regard.swapping.layer import Port  # noqa: E402
from regard.swapping.ports import PORTS  # noqa: E402
from regard.swapping.ports.hugging_face import rf_detr  # noqa: E402
from regard.swapping.removed import Removed  # noqa: E402
from regard.swapping.swap import plan_swap, restore, swap  # noqa: E402

FLOAT32 = frozenset({"SamVisionModel, eager", "Sam3ViTModel"})
"""Hosts that compute the softmax, or rotate queries and keys, in float32 whatever their own dtype is."""

UNASKED = frozenset(
    {
        "SamVisionModel",
        "SamVisionModel, eager",
        "DPTModel",
        "InternVLVisionModel",
        "Mask2FormerModel",
        "MobileViTModel",
        "MobileViTV2Model",
        "RfDetrModel",
        "YolosForObjectDetection",
        "YolosModel, middle positions",
        "EomtForUniversalSegmentation",
        "EomtDinov3ForUniversalSegmentation, masked",
    }
)
"""Hosts that do not tell their layers, or their backbone, that attention weights are asked for."""


@pytest.fixture(params=[(library, name) for library, hosts in HOSTS.items() for name in hosts], ids="-".join)
def host(request: pytest.FixtureRequest) -> LibraryHost:
    library, name = request.param
    pytest.importorskip(library)
    torch.manual_seed(0)
    return prepared(HOSTS[library][name]())


@torch.no_grad()
def test_softmax_computes_what_the_host_computes(host: LibraryHost, request: pytest.FixtureRequest) -> None:
    model, inputs, layers = host
    before, state = outputs(model, inputs), copy.deepcopy(model.state_dict())
    swap(model, Softmax(), example=inputs)
    assert sum(isinstance(module, Port) for module in model.modules()) == layers
    tolerance = 1e-6 if request.node.callspec.params["host"][1] in FLOAT32 else 1e-11
    assert gap(outputs(model, inputs), before) <= tolerance
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.load_state_dict(state)
    swap(model, Factors(terms="0000"), example=inputs)
    assert gap(outputs(model, inputs), before) > 1e-3
    restore(model)
    assert gap(outputs(model, inputs), before) == 0
    assert not any(isinstance(module, Port) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", HUGGING_HOSTS)
def test_every_model_is_written_and_read_again(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS[name](), torch.float32)
    swap(model, Softmax(scale=0.1), example=inputs)
    again = load(save(model, tmp_path))
    assert gap(outputs(again, inputs), outputs(model, inputs)) <= 1e-6


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HUGGING_HOSTS)
def test_a_lost_swap_is_an_error_and_not_quietly_softmax(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS[name](), torch.float32)
    swap(model, Softmax(), example=inputs)
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
        assert name == "Mask2FormerModel" or all(maps is None for maps in given)
        return
    with pytest.raises(UnsupportedError, match=r"returns no attentions.*regard\.capture"):
        model(**inputs, output_attentions=True)


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


@pytest.mark.parametrize("kind", ["VideoMAE", "Vivit", "Timesformer", "VJEPA2"])
def test_video_is_refused_with_the_reason(kind: str) -> None:
    import transformers

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
    crop = {"crop_size": 32, "frames_per_clip": 2} if kind == "VJEPA2" else {"num_frames": 2}
    config = getattr(transformers, f"{kind}Config")(hidden_size=48, **sizes, **crop)
    model = getattr(transformers, f"{kind}Model")(config)
    modules = list(model.modules())
    with pytest.raises(UnsupportedError, match="height, width and time, and a Grid has no time"):
        swap(model, Softmax(), example=torch.zeros(1, 2, 3, 32, 32))
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


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


@pytest.mark.parametrize(
    ("library", "name", "mixer", "message"),
    [
        ("transformers", "SwinModel", Linear(), "bias mask, which Linear"),
        ("transformers", "HieraModel", Window(), "pools its queries, which Window cannot"),
        ("transformers", "HieraModel", MiTA(m=4, k=4, dwc=3), "pools its queries, which MiTA cannot"),
        ("transformers", "DetrModel", PVT(), "adds positions to queries and keys, which PVT cannot"),
        ("torchvision", "SwinTransformer", Linear(), "bias mask, which Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else spell(value),
)
def test_what_a_mechanism_cannot_do_is_refused_by_the_plan(library: str, name: str, mixer: Any, message: str) -> None:
    model, inputs, _ = HOSTS[library][name]()
    modules = list(model.modules())
    with pytest.raises(UnsupportedError, match=message):
        plan_swap(model, mixer, example=inputs)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options", "stage"),
    [
        ("PvtV2Model", {**HUGGING_PVT, "sr_ratios": [4, 1]}, "*layers.{}*"),
        ("PvtModel", {**HUGGING_PVT1, "image_size": 64, "sequence_reduction_ratios": [4, 1]}, "*block.{}.*"),
        ("GLPNModel", {**HUGGING_PVT, "sr_ratios": [4, 1]}, "*block.{}.*"),
        ("SegformerModel", {**HUGGING_PVT, "sr_ratios": [4, 1]}, "*stages.{}.*"),
    ],
)
def test_pvt_keeps_what_reduces_its_keys(kind: str, options: dict[str, Any], stage: str) -> None:
    torch.manual_seed(0)
    model, inputs, _ = prepared(hugging(kind, 2, images(64, 64), **options))
    before, state = outputs(model, inputs), copy.deepcopy(model.state_dict())
    swap(model, PVT(ratio=4), stage.format(0), inputs)
    swap(model, Softmax(), stage.format(1), inputs)
    assert gap(outputs(model, inputs), before) <= 1e-11
    assert list(model.state_dict()) == list(state)


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


def test_dropout_of_weights_is_told_apart_from_that_of_the_output() -> None:
    hosts = (("DPTModel", 64, {**SQUARE, "backbone_out_indices": [0, 1]}), ("SwinModel", 96, SWIN))
    for kind, width, config in hosts:
        host = hugging(kind, 2, images(64, width), **config, attention_probs_dropout_prob=0.25)
        with pytest.warns(UserWarning, match=r"dropout 0\.25 of attention weights"):
            swap(host.model, Softmax(), example=host.inputs)


@pytest.mark.slow
@torch.no_grad()
def test_a_mechanism_of_each_kind_runs_at_every_host(host: LibraryHost) -> None:
    """Static keys, chosen keys and convolutions, where they are not refused; a removal, and the host again."""
    model, inputs, _ = host
    before = outputs(model, inputs)
    for mixer in (SKA(), TopK(k=3), MiTA(m=4, k=4), Conv(kernel=3), Removed()):
        try:
            swap(model, mixer, example=inputs)
        except (UnsupportedError, GridError):  # by the plan, with a reason
            continue
        assert all(value.isfinite().all() for value in outputs(model, inputs))
    restore(model)
    assert gap(outputs(model, inputs), before) == 0


def test_a_gradient_reaches_every_new_parameter(host: LibraryHost) -> None:
    model, inputs, _ = host
    if any(issubclass(port, HostPort) for port in attention_layers(model).values()):
        pytest.skip("it keeps the modules that make its queries, keys and values")
    swap(model, Softmax(projection=PSNE()), example=inputs)
    sum(value.square().sum() for value in outputs(model, inputs)).backward()  # type: ignore[union-attr]
    new = {name: value for name, value in model.named_parameters() if ".regard.qkv." in name}
    assert new
    assert all(value.grad is not None and value.grad.isfinite().all() for value in new.values())


@pytest.mark.parametrize("path", LEFT)
def test_what_is_left_has_no_port(path: str) -> None:
    module, _, name = path.rpartition(".")
    pytest.importorskip(path.partition(".")[0])
    kind = getattr(importlib.import_module(module), name)
    assert not any(port.matches(kind.__new__(kind)) for port in PORTS)


def test_the_table_of_the_docs_has_every_host() -> None:
    stored = json.loads((Path(__file__).parents[2] / "docs" / "libraries.json").read_text())
    compared = {(row["library"], row["model"]): row for row in stored["compared"]}
    assert compared.keys() >= {(library, name) for library, hosts in HOSTS.items() for name in hosts}
    assert all(row["softmax"] <= 1e-6 and row["uniform"] >= 1e-3 for row in compared.values())
    assert {row["class"]: row["reason"] for row in stored["left"]} == LEFT


def test_models_of_other_libraries_are_not_saved_as_those_of_transformers(tmp_path: Any) -> None:
    pytest.importorskip("open_clip")
    with pytest.raises(ConfigError, match="not this CLIP"):
        save(HOSTS["open_clip"]["VisionTransformer"]().model, tmp_path)


@pytest.mark.untyped
@torch.no_grad()
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("torchvision", "SwinTransformer"),
        ("torchvision", "SwinTransformer V2"),
        ("torchvision", "nn.TransformerEncoder"),
        ("transformers", "HieraModel"),
        ("transformers", "SamVisionModel"),
        ("transformers", "ViTModel"),
        ("diffusers", "DiTTransformer2DModel"),
    ],
)
def test_swapped_models_compile(library: str, name: str) -> None:
    pytest.importorskip(library)
    torch._dynamo.reset()
    model, inputs, _ = prepared(HOSTS[library][name]())
    swap(model, Softmax(), example=inputs)
    assert gap(outputs(torch.compile(model, backend="eager", fullgraph=True), inputs), outputs(model, inputs)) <= 1e-11


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
