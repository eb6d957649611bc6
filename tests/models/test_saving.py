"""Folders: what was saved comes back in a new process, and nothing else is taken for it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn

from regard.core import ConfigError, StoreError, SwapError
from regard.files.records import read_record, write_record
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.load import load_run
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.recipe import fill
from regard.models.resnet import attend
from regard.models.saving import load, read_description, save
from regard.models.segmentation import make_segmenter
from regard.projections.sne import FSNE
from regard.swapping.swap import plan_swap, remove, restore, retune, swap
from small_hosts import VIT, draw_large_weights, swin, vit5

DESK = "vit_desk(size=(16, 24), dim=16, depth=3, heads=2)"


@pytest.fixture
def mixed():
    """Three layers: retuned MiTA, softmax on shared codes, nothing."""
    torch.manual_seed(0)
    model = create_model(DESK, MiTA(m=6, k=4))
    swap(model, Softmax(projection=FSNE(code=4)), "blocks.[12].*")
    remove(model, "blocks.2.*")
    retune(model, "blocks.0.*", m=4)
    draw_large_weights(model.eval())
    return model


class Sizeless(nn.Module):
    """A user's model that takes `img_size` and does not keep it."""

    def __init__(self, img_size: tuple[int, int] = (16, 16), num_classes: int = 10, in_chans: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(in_chans, 16, 8, 8)
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(images).flatten(2).mT
        return self.head((x + self.attn(x, x, x, need_weights=False)[0]).mean(1))


def with_codes_of_retuned_layers() -> nn.Module:
    return retune(swap(create_model(DESK), SKA(projection=FSNE(code=4))), "blocks.1.*", scale=0.5)


def with_a_new_head() -> nn.Module:
    model = create_model("attended_resnet18(channels=(8, 8, 16, 16), img_size=64, stages=(4,), mixer='SKA()')", None)
    model.reset_classifier(5)
    return model


def of_another_size(host: str, mixer: Softmax | None = None) -> nn.Module:
    """For images of 64 x 96 pixels by timm's own `set_input_size`."""
    model = create_model(host, None, num_classes=5)
    model.set_input_size(img_size=(64, 96))  # type: ignore[operator]
    return swap(model, mixer, example=torch.randn(1, 3, 64, 96)) if mixer else model


SIZED = (
    "swin_tiny_patch4_window7_224(depths=(2, 2), num_heads=(1, 2), embed_dim=16)",
    "swinv2_cr_tiny_224(depths=(1, 1), num_heads=(1, 2), embed_dim=16)",
    "vit_tiny_patch16_224(depth=1, embed_dim=16, num_heads=2)",
)
COARSE = ("lowformer_b0", "hiera_tiny_224(embed_dim=32, num_heads=1, stages=(1, 1, 1, 1))")
SKAFORMER = "skaformer_desk(img_size=64, mixers=('conv', 'conv', 'ska', 'ska'), query='identity')"
SWIFTFORMER = "swiftformer_xs(layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_classes=7)"
SAVED: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "a new head, and a mechanism in the host's spelling": (with_a_new_head, (64, 64)),
    "a size that a user's model does not keep": (
        lambda: create_model("Sizeless", SKA(), extra=(Sizeless,), img_size=(24, 40)), (24, 40)
    ),
    "an option of the host": (lambda: create_model(SKAFORMER, None), (64, 64)),
    "codes of retuned layers": (with_codes_of_retuned_layers, (16, 24)),
    "suffix tokens": (lambda: swap(vit5()[0], MiTA(m=4, k=5, dwc=3)), (32, 48)),
    "reinitialised layers": (lambda: create_model(SWIFTFORMER, Softmax(), reinitialise=True), (64, 96)),
    **{f"another size of {host}": (partial(of_another_size, host), (64, 96)) for host in SIZED},
    **{f"another size of swapped {host}": (partial(of_another_size, host, Softmax()), (64, 96)) for host in SIZED},
    **{f"keys of a coarser map in {host}": (partial(create_model, host, SKA()), (224, 224)) for host in COARSE},
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, size = SAVED[name]
    model, x = make().eval(), torch.randn(2, 3, *size)
    draw_large_weights(model)
    assert torch.equal(load(save(model, tmp_path), extra=(Sizeless,)).eval()(x), model(x))


@pytest.mark.slow
def test_a_new_process_gives_the_same_logits(mixed, tmp_path):
    x = torch.randn(2, 3, 16, 24)
    save(mixed, tmp_path / "model")
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch; from regard.models.saving import load; folder = sys.argv[1];"
        "model = load(folder + '/model'); torch.save(model(torch.load(folder + '/x.pt')), folder + '/y.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), mixed(x))
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.json", "model.safetensors"}


def test_the_folder_tells_what_it_holds(mixed, tmp_path):
    about = json.loads((save(mixed, tmp_path) / "model.json").read_text())
    assert about["host"] == DESK
    assert [group["mixer"] for group in about["swaps"]] == [
        "MiTA(m=4, k=4)",
        "Softmax(projection=FSNE(code=4))",
        "removed",
    ]
    assert about["swaps"][0]["layers"] == {"blocks.0.attn": [4, 6, 0, 0]}


def test_a_model_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"regard\.create_model.*transformers.*torch\.save\(model\.state_dict"):
        save(swin()[0], tmp_path)
    model = create_model("vit_desk", None)
    model.regard_host = ("vit_desk", {"norm_layer": torch.nn.LayerNorm})
    with pytest.raises(ConfigError, match="cannot be spelled"):
        save(model, tmp_path)


def test_replaced_forwards_and_hooks_are_not_left_out_silently(mixed, tmp_path):
    mixed.blocks[0].attn.forward = lambda x, *given, **named: x
    mixed.patch_embed.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))
    with pytest.warns(match="replaced forward of blocks.0.attn"), pytest.warns(match="forward hooks of patch_embed"):
        save(mixed, tmp_path / "model")


class OtherBlock(Block):
    """A block with another forward pass, say."""


def changed(path: str, attribute: str, value: object) -> nn.Module:
    """A ViT with static keys in one layer, and with an attribute of one module that it was not built with."""
    model = swap(create_model(VIT, None), SKA(), where="blocks.1.*")
    setattr(model.get_submodule(path), attribute, value)
    return model


def pooled() -> nn.Module:
    model = create_model(VIT, None)
    model.reset_classifier(7, global_pool="avg")
    return model


SLOTS = "attended_resnet18(channels=(8, 8, 16, 16), stem=1, img_size=12)"
CHANGED: dict[str, Callable[[], nn.Module]] = {
    "built again, is not this model: norm": lambda: changed("norm", "eps", 0.5),
    "is not this model: blocks.0.mlp.act": lambda: changed("blocks.0.mlp.act", "approximate", "tanh"),
    r"act is ReLU\(\) here and GELU\(": lambda: changed("blocks.0.mlp", "act", nn.ReLU()),
    "is not this model: blocks.0.attn": lambda: changed("blocks.0.attn", "num_heads", 4),
    "is not this model: blocks.1.attn": lambda: changed("blocks.1.attn.mixer.operator", "config", SKA(scale=1.0)),
    "is not this model: patch_embed.proj": lambda: changed("patch_embed.proj", "padding", (1, 1)),
    "blocks.0 is OtherBlock here and Block there": lambda: changed("blocks.0", "__class__", OtherBlock),
    "global_pool is avg here and token there": pooled,
    r"head.weight is \(3, 32\) here and \(7, 32\) there.*num_classes=": lambda: changed("", "head", nn.Linear(32, 3)),
    "is not this model: .*attended_resnet18": lambda: attend(
        create_model("resnet18(num_classes=7)", None), "Factors(terms='0110')", (4,), example=torch.randn(1, 3, 64, 64)
    ),
    "is not this model: layer3.0.attn.heads is ": lambda: attend(create_model(SLOTS, None), Softmax(), heads=4),
    "is not this model: layer3.0.attn.parallel is ": lambda: attend(
        create_model(SLOTS, None), Softmax(), parallel=True
    ),
}


@pytest.mark.parametrize("said", CHANGED)
def test_what_load_could_not_build_is_refused_when_it_is_saved(said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        save(CHANGED[said](), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_dropout_does_nothing_in_evaluation_and_may_change(tmp_path: Path) -> None:
    save(changed("", "head_drop", nn.Dropout(0.5)), tmp_path)


def test_a_checkpoint_that_a_model_started_from_is_not_in_its_recipe(tmp_path):
    torch.save(create_model(VIT, None).state_dict(), tmp_path / "start.pth")
    model = create_model(VIT, None, checkpoint_path=str(tmp_path / "start.pth")).eval()
    (tmp_path / "start.pth").unlink()
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(load(save(model, tmp_path))(x), model(x))


def test_foreign_and_damaged_folders_are_named(mixed, tmp_path):
    with pytest.raises(StoreError, match=r"has no model\.json"):
        load(tmp_path)
    about = read_record(save(mixed, tmp_path) / "model.json")

    def attempt(match, **changes):
        write_record(tmp_path / "model.json", {**about, **changes})
        with pytest.raises(StoreError, match=match):
            load(tmp_path)

    attempt("not written by regard", format="other")
    attempt("'swaps' is missing", swaps=None)
    attempt(r"\A.{1,900}\Z", host="vit_desk(dim=32)")  # one line, where torch lists every weight that does not fit
    attempt("does not hold the model", host="no_such_host")
    for swaps in ([3], [{"mixer": "SKA()"}], [{"mixer": 5, "layers": {"blocks.0.attn": [4, 6, 0, 0]}}]):
        attempt(r"does not hold the model that its model\.json describes", swaps=swaps)
    attempt("does not hold the model", swaps=[{"mixer": "SKA()", "layers": {"blocks.9.attn": [4, 6, 0, 0]}}])
    attempt("does not hold the model", swaps=[{"mixer": "NoSuch()", "layers": {"blocks.0.attn": [4, 6, 0, 0]}}])
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(StoreError, match=r"model\.json is not JSON"):
        load(tmp_path)
    write_record(tmp_path / "model.json", about)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(StoreError, match="damaged or belongs to another"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(StoreError, match=r"no readable model\.safetensors"):
        load(tmp_path)


def test_a_mechanism_of_ones_own_is_named_by_extra(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Mine(Softmax):
        """Softmax attention by another name."""

    model = create_model(VIT, Mine(), img_size=32).eval()
    save(model, tmp_path)
    with pytest.raises(StoreError, match=r"unknown name 'Mine'.*your own mechanisms, models and ports as extra="):
        load(tmp_path)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load(tmp_path, extra=[Mine])(x), model(x))


def test_a_place_that_cannot_be_written_is_an_error(mixed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        save(mixed, tmp_path / "file" / "model")


def test_a_damaged_recipe_of_a_run_is_named(tmp_path):
    folder = Results(tmp_path).folder("0123456789ab")
    write_record(folder / "run.json", {"spelling": "Run()"})
    checkpoint.save(folder, {"model": {}, "ema": None})
    for recipe in ({"host": DESK}, {"host": DESK, "swaps": [{"mixer": "SKA()", "layers": {"blocks.9.attn": [4, 6]}}]}):
        Results(tmp_path).finish(folder.name, {"status": "done", "metrics": {"top1": 1.0}, "model": recipe})
        with pytest.raises(StoreError, match=r"does not hold the model that its outcome\.json describes"):
            load_run(folder)


@pytest.mark.parametrize("head", ["mask", "conv(attention=True, heads=2)"])
def test_a_segmenter_comes_back_with_its_head_and_mechanisms(head, tmp_path):
    host = "attended_resnet18(channels=(8, 8, 16, 16), heads=2)" if "conv" in head else "vit_desk(dim=16, depth=2)"
    model = make_segmenter(host, MiTA(m=2, k=2), head, classes=3, size=(64, 96), channels=1)
    draw_large_weights(model.eval())
    x = torch.randn(2, 1, 64, 96)
    loaded = load(save(model, tmp_path))
    assert loaded(x).shape == (2, 3, 64, 96)
    assert torch.equal(loaded(x), model(x))
    swap(loaded, Softmax())
    assert torch.equal(load(save(loaded, tmp_path))(x), loaded(x))
    assert not torch.equal(loaded(x), model(x))


def test_a_model_that_does_not_keep_its_image_size_needs_one() -> None:
    with pytest.raises(SwapError, match="does not name its image size"):
        create_model("Sizeless", SKA(), extra=(Sizeless,))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"class_names": {0: "cat", 1: "dog"}}, "class_names is a list of texts"),
        ({"class_names": ["a", "b"]}, "class_names has 2 names, but the model has 10 outputs"),
        ({"class_names": [0, 1]}, "class_names is a list of texts"),
        ({"normal": [0.5, 0.5]}, r"normal is \[mean, deviation\]"),
        ({"normal": [[0.5], [0.0]]}, "deviations are above 0"),
        ({"normal": [[0.5, 0.5], [0.1]]}, "a number of each channel in both"),
        ({"name": 3}, "name is a text"),
    ],
)
def test_wrong_data_are_refused_before_anything_is_written(data: dict, said: str, tmp_path: Path) -> None:
    model = create_model(DESK, None)
    with pytest.raises(ConfigError, match=said):
        save(model, tmp_path / "model", data=data)
    assert not (tmp_path / "model").exists()


def test_arrays_tuples_and_what_is_not_known_are_recorded(tmp_path: Path) -> None:
    data = {"normal": torch.tensor([[0.5] * 3, [0.25] * 3]), "class_names": ("a", "b"), "name": None}
    save(create_model(DESK, None, num_classes=2), tmp_path, data=data)
    assert read_description(tmp_path)["data"] == {"normal": [[0.5] * 3, [0.25] * 3], "class_names": ["a", "b"]}


class _Code:
    def __reduce__(self) -> tuple:
        return print, ("executed",)


def test_a_pickle_of_other_things_is_refused_without_advice_to_run_it(tmp_path: Path) -> None:
    torch.save({"a": _Code()}, tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match="is a pickle") as refused:
        create_model(VIT, None, checkpoint_path=str(tmp_path / "weights.pth"))
    assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize("key", ["blocks.0.attn.proj.weight", "blocks.0.attn.regard.operator.keys"])
def test_weights_of_a_swapped_layer_that_are_not_finite_are_neither_saved_nor_loaded(key: str, tmp_path: Path) -> None:
    model = create_model(DESK, SKA())
    model.state_dict()[key].flatten()[0] = torch.nan
    with pytest.raises(ConfigError, match=f"^{key} has values that are not finite, which load would refuse"):
        save(model, tmp_path)
    with pytest.raises(ValueError, match=f"^{key} has values that are not finite"):
        fill(create_model(DESK, SKA()), model.state_dict())


@pytest.mark.parametrize("mixer", ["Softmax()", "SKA()", "Factors(dwc=3)"])
def test_a_model_of_two_dtypes_keeps_both(mixer: str, tmp_path: Path) -> None:
    model = swap(create_model("vit_desk(patch=8, dim=16, depth=1, heads=2)"), mixer).bfloat16().eval()
    model.fc_norm.float()  # type: ignore[operator, union-attr]
    loaded = load(save(model, tmp_path))
    kinds = {name: value.dtype for name, value in loaded.state_dict().items()}
    assert kinds == {name: value.dtype for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("error")
def test_what_a_mechanism_dropped_is_not_taken_for_the_hosts_after_loading(tmp_path: Path) -> None:
    save(swap(create_model(DESK), SKA()), tmp_path)
    with pytest.warns(UserWarning, match=r"qkv.weight\[k\] of blocks.0.attn and of 2 more layers: .* were not saved"):
        restore(load(tmp_path))
    model = load(tmp_path)
    swap(model, SKA(dwc=3))  # which has no keys either
    assert "as in a new model, since they were not saved: qkv.weight[k]" in str(plan_swap(model, Softmax()))
    with pytest.warns(UserWarning, match=r"qkv.weight\[k\] of blocks.1.attn: "):
        swap(model, Softmax(), "blocks.1.*")
    restore(model, "blocks.1.*")  # with the weights as they are now


def test_a_folder_of_the_other_library_is_left_as_it_is(tmp_path: Path) -> None:
    """Each would be read by the description of the other."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(image_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    models = {"timm": create_model(DESK), "hub": swap(ViTModel(config), SKA())}
    for name, model in models.items():
        save(model, tmp_path / name)
    for name, other in zip(models, reversed(models.values()), strict=True):
        with pytest.raises(StoreError, match="save into another folder"):
            save(other, tmp_path / name)
        load(tmp_path / name)
    models["hub"].save_pretrained(tmp_path / "own")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.json").write_text('{"mine": 1}')
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"mine")
    for name, model in (("own", "timm"), ("own", "hub"), ("foreign", "timm"), ("weights", "timm"), ("weights", "hub")):
        before = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        with pytest.raises(StoreError, match="another library|no record of Regard"):
            save(models[model], tmp_path / name)
        assert {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} == before
