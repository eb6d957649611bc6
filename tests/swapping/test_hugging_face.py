"""Hugging Face vision models: swaps keep outputs and names, and one that is lost in a folder is an error."""

import copy
import hashlib
import json
from dataclasses import dataclass

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'regard[hf]'")

from library_hosts import HUGGING_HOSTS, SQUARE, owlvit, prepared  # noqa: E402
from regard.core import ConfigError, StoreError, UnsupportedError  # noqa: E402
from regard.files.records import read_record, write_record  # noqa: E402
from regard.mixers.mita.mita import MiTA  # noqa: E402
from regard.mixers.softmax import Softmax  # noqa: E402
from regard.mixers.static_keys.ska import SKA  # noqa: E402
from regard.models.named import named_network  # noqa: E402
from regard.models.saving import load, save  # noqa: E402
from regard.swapping.layer import Port  # noqa: E402
from regard.swapping.swap import plan_swap, swap  # noqa: E402
from small_hosts import draw_large_weights  # noqa: E402


def make(kind):
    """A small random model in float64, and images."""
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS[f"{kind}Model"]())
    return model, inputs["pixel_values"]


def out(model, x):
    return model(pixel_values=x).last_hidden_state


def test_static_keys_drop_the_key_matrix():
    model, x = make("ViT")
    plain = copy.deepcopy(model)
    swap(model, SKA(), example=x[:1])
    missing = set(plain.state_dict()) - set(model.state_dict())
    assert missing == {f"layers.{i}.attention.k_proj.{part}" for i in (0, 1) for part in ("weight", "bias")}
    assert not model.load_state_dict(plain.state_dict(), strict=False).unexpected_keys


def test_a_swap_is_written_and_read_again(tmp_path):
    model, x = make("Dinov2")
    swap(model, MiTA(m=4, k=4), "*.0.*", x[:1])
    swap(model, SKA(), "*.1.*", x[:1])
    save(model.float(), tmp_path)
    loaded = load(tmp_path)
    assert torch.equal(out(loaded, x.float()), out(model, x.float()))
    assert [type(layer.attention.mixer.config) for layer in loaded.encoder.layer] == [MiTA, SKA]
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(StoreError, match="does not hold the model"):
        load(tmp_path)
    (tmp_path / "regard.json").unlink()
    with pytest.raises(StoreError, match=r"regard\.json"):
        load(tmp_path)


def test_a_swapped_model_whose_configuration_asks_for_attention_weights_is_not_written(tmp_path):
    config = transformers.ViTConfig(**SQUARE)
    config._attn_implementation = "eager"
    model = swap(transformers.ViTModel(config), Softmax())
    model.config.output_attentions = True
    with pytest.raises(ConfigError, match=r"^the configuration has output_attentions=True, .* = False"):
        save(model, tmp_path)
    model.config.output_attentions = False
    assert load(save(model, tmp_path))


@pytest.mark.parametrize("change", ["adapter", "wrapper"])
def test_what_could_not_be_built_again_is_not_written(tmp_path, change):
    """Such as LoRA around a layer, or around the model: the folder would be written and never read."""
    model, x = make("ViT")
    swap(model, MiTA(m=4, k=4), example=x[:1])
    if change == "adapter":
        layer = model.layers[1].attention.regard
        layer.proj = torch.nn.Sequential(layer.proj)
    else:
        config, model = model.config, torch.nn.Sequential(model)
        model.config = config
    with pytest.raises(ConfigError, match=r"proj\.0\.weight" if change == "adapter" else "not this Sequential"):
        save(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_the_trainer_is_read_by_transformers_and_swapped_again(tmp_path):
    """As the messages and docs/swap.md say; load_state_dict fails where transformers writes its old names."""
    model, x = make("ViT")
    model = model.float().eval()
    x = x.float()
    swap(model, MiTA(m=4, k=4), example=x[:1])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    swap(again, MiTA(m=4, k=4), example=x[:1])
    with torch.no_grad():
        assert torch.equal(again(x).last_hidden_state, model(x).last_hidden_state)


def test_masks_of_other_kernels_are_refused():
    model, x = make("ViT")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="sdpa"):
        swap(model, Softmax(), example=x[:1])


def test_a_model_without_its_pooler_is_written_and_read_again(tmp_path):
    model = transformers.ViTModel(transformers.ViTConfig(**SQUARE), add_pooling_layer=False).eval()
    swap(model, SKA())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(out(load(save(model, tmp_path)), x), out(model, x))


def test_clip_as_a_whole_is_swapped_written_and_read_again(tmp_path):
    model, inputs, layers = owlvit("CLIPModel")
    again = load(save(swap(model.eval(), SKA()), tmp_path))
    assert sum(isinstance(module, Port) for module in again.modules()) == layers
    assert torch.equal(again(**inputs).logits_per_image, model(**inputs).logits_per_image)


def test_masked_autoencoders_are_refused():
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**SQUARE))
    with pytest.raises(UnsupportedError, match="on no grid; load its weights as a ViT"):
        swap(model, Softmax(), example=torch.randn(1, 3, 64, 64))


@dataclass(frozen=True, kw_only=True)
class Mine(Softmax):
    """A user's own mechanism."""


def test_folders_keep_the_dtype_and_name_mechanisms_of_the_user(tmp_path):
    model, x = make("ViT")
    swap(model, Mine(), example=x[:1])
    save(model.bfloat16(), tmp_path)
    with pytest.raises(StoreError, match="Mine"):
        load(tmp_path)
    loaded = load(tmp_path, extra=[Mine])
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(out(loaded, x.bfloat16()), out(model, x.bfloat16()))


def test_a_plan_leaves_the_shift_of_windows_alone() -> None:
    """transformers' Swin sets it to 0 in a pass with small maps, for all later passes."""
    sizes = {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 8}
    model = transformers.SwinForImageClassification(transformers.SwinConfig(**sizes)).eval()
    draw_large_weights(model)
    pixels = torch.randn(1, 3, 128, 128)
    before = copy.deepcopy(model)(pixel_values=pixels, interpolate_pos_encoding=True).logits
    plan_swap(model, Softmax())
    assert torch.equal(model(pixel_values=pixels, interpolate_pos_encoding=True).logits, before)


def test_the_output_dropout_of_internvl_stays() -> None:
    model, inputs, _ = HUGGING_HOSTS["InternVLVisionModel"](projection_dropout=0.25)
    swap(model, Softmax(), example=inputs)
    assert [port.mixer.site.drop for port in model.modules() if isinstance(port, Port)] == [0.25] * 2


def test_a_changed_configuration_is_refused(tmp_path) -> None:
    """A number that leaves all shapes: the model would give other outputs. Folders of before have no digest of it."""
    save(transformers.ViTModel(transformers.ViTConfig(**SQUARE)), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-2'))
    with pytest.raises(StoreError, match=r"config\.json is damaged"):
        load(tmp_path)
    about = read_record(tmp_path / "regard.json")
    del about["config_sha256"]
    write_record(tmp_path / "regard.json", about)
    assert load(tmp_path).config.layer_norm_eps == 1e-2


@pytest.mark.parametrize(
    "config",
    [
        {"backbone": "hub/net"},
        {"backbone": "resnet50", "use_timm_backbone": False},
        {"backbone_config": {"backbone": "hub/net"}},
        {"model_type": "maskformer", "backbone_config": {"model_type": "x", "backbone": "hub/net"}},
        {"backbone": "hf-hub:timm/x", "use_timm_backbone": True},
        {"model_type": "chmv2", "backbone": "resnet50", "use_timm_backbone": True},
        {"model_type": "maskformer", "backbone": "resnet50", "use_timm_backbone": True},
        {"model_type": "detr", "backbone": "hub/net", "use_timm_backbone": True, "backbone_kwargs": {"x": 1}},
        {"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:timm/x"}},
    ],
    ids=lambda config: json.dumps(config)[:40],
)
def test_a_backbone_of_a_hub_is_refused_before_it_is_asked(config, tmp_path, monkeypatch) -> None:
    import huggingface_hub

    folder = save(transformers.ViTModel(transformers.ViTConfig(**SQUARE)), tmp_path / "saved")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    write_record(folder / "regard.json", read_record(folder / "regard.json") | {"config_sha256": digest})
    monkeypatch.setattr(huggingface_hub.file_download, "http_get", lambda *_, **__: pytest.fail("it asked"))
    with pytest.raises(StoreError, match=r"from the hub|asks no network"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "hf-hub:timm/x"}, {"architecture": "HF-Hub:timm/x"}, {"architecture": "local-dir:x"},
        {"model_args": {"img_size": 32, "depth": 1, "checkpoint_path": "other.pth"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_folder_of_transformers_takes_no_network_of_timm_from_elsewhere(change, tmp_path, monkeypatch) -> None:
    import huggingface_hub

    options = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 32, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=3, model_args=options)
    transformers.TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    assert named_network(f"hf:{tmp_path}").network.num_labels == 3
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    monkeypatch.setattr(huggingface_hub.file_download, "http_get", lambda *_, **__: pytest.fail("it asked"))
    with pytest.raises(StoreError, match="takes a network or weights from .*, which is not asked"):
        named_network(f"hf:{tmp_path}")


def test_an_adapter_beside_weights_is_not_added_to_them(tmp_path) -> None:
    """They may be merged already."""
    transformers.ViTModel(transformers.ViTConfig(**SQUARE)).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(StoreError, match="weights and an adapter of PEFT"):
        named_network(f"hf:{tmp_path}")


def test_an_option_that_transformers_ignores_refuses_no_folder(tmp_path) -> None:
    config = transformers.ViTConfig(**SQUARE)
    config.use_pretrained_backbone = True
    folder = save(swap(transformers.ViTForImageClassification(config), SKA()), tmp_path / "saved")
    assert json.loads((folder / "config.json").read_text())["use_pretrained_backbone"] is True
    assert load(folder).config.use_pretrained_backbone is False  # the folder has all weights
