"""Attention that no mechanism computes stays by default; reinitialise=True replaces it, and it can be restored."""

import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from regard.cli.app import run
from regard.core import ConfigError, MixerConfig, SwapError, heads, merge
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.swapping.inspect import attention_layers, layer_calls
from regard.swapping.layer import Port
from regard.swapping.layer_plan import read_layer_plan
from regard.swapping.swap import plan_swap, restore, swap
from small_hosts import HostAndInput, with_large_weights
from timm_hosts import REINITIALISED_HOSTS

SMALL_SWIFTFORMER = "swiftformer_xs(layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_classes=7)"


def host(name: str) -> HostAndInput:
    return with_large_weights(REINITIALISED_HOSTS[name])


def lost_layers(model: nn.Module) -> list[str]:
    """The names of layers whose own attention a swap would lose."""
    return [name for name, port in attention_layers(model, reinitialise=True).items() if port.loses]


@pytest.mark.parametrize("name", REINITIALISED_HOSTS)
def test_these_layers_stay_as_they_are_by_default(name: str) -> None:
    model, x = host(name)
    lost = {layer: model.get_submodule(layer) for layer in lost_layers(model)}
    others = set(attention_layers(model, reinitialise=True)) - set(lost)
    assert lost
    if others:
        swap(model, Softmax(), example=x[:1])
    with pytest.raises(SwapError, match=r"would lose .*, which no mechanism computes; swap\(..., reinitialise=True\)"):
        swap(model, Softmax(), next(iter(lost)), example=x[:1])
    assert all(model.get_submodule(layer) is module for layer, module in lost.items())
    assert all(isinstance(model.get_submodule(layer), Port) for layer in others)


@pytest.mark.untyped
@pytest.mark.parametrize("mixer", [Softmax(), {"network.2.*": "SKA()"}])
def test_the_option_is_true_or_false(mixer: Any) -> None:
    model, x = host("volo")
    with pytest.raises(ConfigError, match="reinitialise is True or False, not 'no'"):
        swap(model, mixer, example=x[:1], reinitialise="no")  # type: ignore[arg-type]
    assert not any(isinstance(module, Port) for module in model.modules())


def test_a_glob_of_a_plan_asks_for_the_option_too() -> None:
    model, x = host("volo")
    plan = {"network.0.*": Softmax(), "network.2.*": "SKA()"}
    with pytest.raises(SwapError, match=r"network.0.0.attn would lose outlook attention, .*reinitialise=True"):
        swap(model, plan, example=x[:1])
    assert not any(isinstance(module, Port) for module in model.modules())
    swap(model, plan, example=x[:1], reinitialise=True)
    assert swapped_layers(model) == ["network.0.0.attn", "network.2.0.attn"]


def test_the_full_name_in_a_plan_replaces_such_a_layer_and_warns() -> None:
    model, x = host("volo")
    before = model(x)
    with pytest.warns(UserWarning, match=r"^network.0.0.attn: outlook attention.* is lost, so the plan's layers"):
        swap(model, "network.0.0.attn=Softmax(); network.2.*=SKA()", example=x[:1])
    assert swapped_layers(model) == ["network.0.0.attn", "network.2.0.attn"]
    swap(model, {"network.0.0.attn": "Linear()"}, example=x[:1])  # lost already: no second warning
    assert torch.equal(restore(model)(x), before)


def test_a_plan_for_a_model_fits_it_inside_another_one() -> None:
    model, x = host("volo")
    outer = nn.Sequential(OrderedDict(body=model))
    with pytest.warns(UserWarning, match="^body.network.0.0.attn: "):
        swap(outer, {"network.0.0.attn": Softmax()}, example=x[:1])
    assert swapped_layers(model) == ["network.0.0.attn"]


def test_create_model_replaces_these_layers_if_it_is_asked_to() -> None:
    assert len(swapped_layers(create_model(SMALL_SWIFTFORMER, Softmax(), reinitialise=True))) == 4
    with pytest.raises(SwapError, match="would lose additive attention"):
        create_model(SMALL_SWIFTFORMER, Softmax())


def swapped_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Port)]


CHANGES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "volo": (
        ["v.weight", "proj.weight", "proj.bias"],
        ["regard.qkv.k.weight", "regard.qkv.q.weight"],
        ["attn.weight", "attn.bias"],
    ),
    "davit": (["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"], [], []),
    "swiftformer": (
        [f"{part}.{kind}" for part in ("to_query", "to_key", "proj", "final") for kind in ("weight", "bias")],
        [],
        ["w_g"],
    ),
}
"""Kept, new and dropped parameters."""


@pytest.mark.parametrize("name", CHANGES)
def test_the_plan_says_what_is_lost_and_what_stays(name: str) -> None:
    model, x = host(name)
    lost = lost_layers(model)
    plan = plan_swap(model, Softmax(), example=x[:1], reinitialise=True)
    for site in plan.sites:
        notes = [note for note in site.notes if note.startswith("re-initialised: ")]
        assert bool(notes) == (site.name in lost)
        if notes:
            assert notes == [f"re-initialised: {site.layer.loses} is lost, so the layer has to be trained"]
            assert notes[0] in str(plan)
            assert (site.kept, site.new, site.dropped) == CHANGES[name]


GRIDS = {
    "volo": [(8, 12)],
    "coat": [(16, 24), (8, 12), (4, 6), (2, 3), (8, 12), (4, 6), (2, 3)],
    "davit": [(16, 24), (8, 12)],
    "davit of florence": [(16, 24), (8, 12)],
    "swiftformer": [(16, 24), (8, 12), (4, 6), (2, 3)],
}


@pytest.mark.parametrize("name", GRIDS)
def test_each_layer_has_the_grid_of_its_stage(name: str) -> None:
    model, x = host(name)
    plan = plan_swap(model, Softmax(), example=x[:1], reinitialise=True)
    grids = [site.layer.mixer.site.grid for site in plan.sites if site.layer.loses]
    assert [(grid.height, grid.width) for grid in grids] == GRIDS[name]
    assert all(grid.prefix == (name == "coat") for grid in grids)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def outlook(own: Any, mixer: Any, x: Tensor) -> Tensor:
    tokens, count = x.flatten(1, 2), own.num_heads
    q, k = (heads(tokens @ matrix.weight.T, count) for matrix in (mixer.qkv.q, mixer.qkv.k))
    return own.proj(merge(plain(q, k, heads(own.v(tokens), count)))).reshape(x.shape)


def channel(own: Any, mixer: Any, x: Tensor) -> Tensor:
    count = getattr(own, "groups", None) or own.num_heads
    return own.proj(merge(plain(*(heads(part, count) for part in own.qkv(x).chunk(3, -1)))))


def factorised(own: Any, mixer: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    q, k, v = (heads(part, own.num_heads) for part in own.qkv(x).chunk(3, -1))
    return own.proj(merge(plain(q, k, v) + own.crpe(q, v, size=size)))


def additive(own: Any, mixer: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(2).mT
    q, k = F.normalize(own.to_query(tokens), dim=-1), F.normalize(own.to_key(tokens), dim=-1)
    return own.final(own.proj(plain(q, k, k)) + q).mT.reshape(x.shape)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "volo": outlook,
    "coat": factorised,
    "davit": channel,
    "davit of florence": channel,
    "swiftformer": additive,
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "size"), [*((name, ()) for name in FORMULAS), ("davit", (128, 64)), ("swiftformer", (128, 64))]
)
def test_the_mechanism_stands_between_the_weights_that_stay(name: str, size: tuple[int, ...]) -> None:
    """Also on images of another size."""
    model, x = host(name)
    lost = {layer: copy.deepcopy(model.get_submodule(layer)) for layer in lost_layers(model)}
    swap(model, Softmax(), example=x[:1], reinitialise=True)
    x = torch.randn(2, 3, *size, dtype=torch.float64) if size else x
    calls = layer_calls(model, {layer: model.get_submodule(layer) for layer in lost}, x)
    for layer, own in lost.items():
        swapped, (args, options) = model.get_submodule(layer), calls[layer]
        expected = FORMULAS[name](own, swapped.mixer, *args, **options)
        torch.testing.assert_close(swapped(*args, **options), expected, rtol=1e-10, atol=1e-10)
        assert (own(*args, **options) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_new_matrices_are_drawn_as_the_host_draws_them() -> None:
    model = create_model("volo_d1_224", None, num_classes=7)
    swap(model, Softmax(), "network.0.0.attn", reinitialise=True)
    layer: Any = model.get_submodule("network.0.0.attn")
    for matrix in (layer.mixer.qkv.q.weight, layer.mixer.qkv.k.weight):
        assert 0.0195 < float(matrix.detach().std()) < 0.0205
    assert not torch.equal(layer.mixer.qkv.q.weight, layer.mixer.qkv.k.weight)


@pytest.mark.parametrize("mixer", [Softmax(), SKA()], ids=["softmax", "static keys"])
@pytest.mark.parametrize("name", REINITIALISED_HOSTS)
def test_restore_brings_every_weight_back_after_other_layers_were_trained(name: str, mixer: MixerConfig) -> None:
    model, x = host(name)
    state = copy.deepcopy(model.state_dict())
    expected = model(x)
    swap(model, mixer, example=x[:1], reinitialise=True)
    swapped = [layer for layer, module in model.named_modules() if isinstance(module, Port)]
    shared = {key for layer in swapped for key in state if f"{layer}." in key or "crpe" in key}
    trained = {key: value for key, value in model.named_parameters() if key in state and key not in shared}
    model(x).square().sum().backward()
    with torch.no_grad():
        for value in trained.values():
            if value.grad is not None:
                value -= 1e-3 * value.grad
    restore(model)
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[key], state[key]) for key in shared)
    assert any(not torch.equal(after[key], state[key]) for key in trained)
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)


def test_the_command_shows_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["swap-check", SMALL_SWIFTFORMER, "Softmax()", "--reinitialise", "--size", "64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "re-initialised: additive attention by one query for all tokens is lost, so the layer has to be trained"
        in shown
    )
    assert run(["swap-check", SMALL_SWIFTFORMER, "Softmax()", "--size", "64"]) != 0
    assert "reinitialise=True" in capsys.readouterr().err


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(16):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(folder / f"{number}.png")
    return str(folder)


def test_the_command_measures_the_change_of_these_layers_too(pictures: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["swap-check", SMALL_SWIFTFORMER, "Softmax()", "--size", "64", "--data", pictures, "--images", "16"]
    assert run([*command, "--reinitialise", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in rows] == [*(f"stages.{stage}.blocks.0.attn" for stage in range(4)), "all"]
    assert all(row["output error"] > 1e-3 for row in rows[:-1])
    assert run(command) != 0
    assert "reinitialise" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_replaces_such_layers_only_if_it_is_asked_to(
    tmp_path: Path, pictures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model, out = (
        str(save(create_model(SMALL_SWIFTFORMER, None, num_classes=5), tmp_path / "model")),
        tmp_path / "advice",
    )
    command = ["advise", model, "--data", pictures, "--images", "16", "--minutes", "0.05", "--mixers", "SKA; None",
               "--out", str(out)]  # fmt: skip
    assert run(command) != 0
    assert "would lose additive attention" in capsys.readouterr().err
    assert run([*command, "--budget", "macs=0.99x", "--reinitialise"]) == 0
    plan = read_layer_plan(str(out / "plan.json"))
    assert plan
    assert all(name.startswith("stages.") for name in plan)
    capsys.readouterr()
    taught = tmp_path / "taught"
    distil = ["distill", model, "--plan", str(out / "plan.json"), "--data", pictures, "--images", "16", "--steps", "2",
              "--output-steps", "1", "--batch", "2", "--out", str(taught)]  # fmt: skip
    assert run(distil) == 0
    assert swapped_layers(load(taught)) == list(plan)
