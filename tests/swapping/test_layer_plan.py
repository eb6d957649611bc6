"""Plans of layers: as mapping, text and file, swapped all or nothing."""

import json
from pathlib import Path

import pytest
import torch

from regard import swap
from regard.core import ConfigError, SwapError
from regard.mixers.mita.mita import MiTA
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.swapping.layer import Port
from regard.swapping.layer_plan import (
    is_layer_plan,
    mixers_by_layer,
    read_layer_plan,
    spell_layer_plan,
    write_layer_plan,
)
from regard.swapping.removed import Removed
from regard.swapping.swap import plan_swap, restore

HOST = "vit_desk(size=(16, 24), patch=4, dim=16, depth=4, heads=2)"
TEXT = "blocks.0.attn=SKA(); blocks.[1-2].attn=MiTA(m=2, k=3); blocks.3.attn=None"
PLAN = {"blocks.0.attn": SKA(), "blocks.[1-2].attn": MiTA(m=2, k=3), "blocks.3.attn": Removed()}


def mixers(model: torch.nn.Module) -> dict[str, object]:
    return {name: layer.mixer.config for name, layer in model.named_modules() if isinstance(layer, Port)}


def test_text_mapping_and_file_say_the_same(tmp_path: Path) -> None:
    file = write_layer_plan(PLAN, tmp_path / "plan.json", "a model")
    for source in (TEXT, PLAN, file, str(file), {**PLAN, "blocks.3.attn": None}, dict.fromkeys(PLAN, "SKA()") | PLAN):
        assert is_layer_plan(source)
        assert read_layer_plan(source) == PLAN
    assert read_layer_plan(spell_layer_plan(PLAN)) == PLAN
    assert not any(map(is_layer_plan, ("SKA()", "MiTA(m=25)", SKA())))


def test_each_layer_gets_its_mechanism_and_restore_gives_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = create_model(HOST, None).eval(), torch.randn(3, 3, 16, 24)
    plain = model(images)
    swap(model, TEXT)
    found = mixers(model)
    assert found == {
        "blocks.0.attn": SKA(),
        "blocks.1.attn": MiTA(m=2, k=3),
        "blocks.2.attn": MiTA(m=2, k=3),
        "blocks.3.attn": Removed(),
    }
    swapped = model(images)
    assert (swapped - plain).abs().max() > 1e-4
    assert torch.equal(load(save(model, tmp_path / "saved"))(images), swapped)
    assert torch.equal(restore(model)(images), plain)


def test_a_plan_is_applied_completely_or_not_at_all() -> None:
    model = create_model(HOST, None).eval()
    before = list(model.named_modules())
    for plan, reason in (
        ({"blocks.0.attn": "SKA()", "blocks.9.attn": "SKA()"}, "no layer matches"),
        ({"blocks.0.attn": "SKA()", "blocks.[01].attn": "SKA()"}, "two mechanisms for blocks.0.attn"),
    ):
        with pytest.raises(SwapError, match=reason):
            swap(model, plan)
        assert list(model.named_modules()) == before
    with pytest.raises(ConfigError, match="a plan names its layers"):
        swap(model, TEXT, where="blocks.0.*")
    assert list(model.named_modules()) == before


def test_names_also_match_inside_a_larger_model() -> None:
    layers = ["backbone.blocks.0.attn", "backbone.blocks.1.attn"]
    assert list(mixers_by_layer({"blocks.1.attn": SKA()}, layers)) == ["backbone.blocks.1.attn"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("blocks.0.attn", "has no ="),
        ("blocks.0.attn=SKA(); blocks.0.attn=None", "two mechanisms"),
        ("=SKA()", "no name of a layer"),
        ("a =SKA(); a= None", "two mechanisms for a"),
        ("blocks.0.attn=Nothing()", "unknown name"),
        (" ; ", "the plan has no layer"),
        ("no/such/plan.json", "there is no plan"),
    ],
)
def test_a_wrong_plan_is_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_layer_plan(text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ('{"layers": {"a": "SKA()"}}', "is no plan"),
        ('{"format": "regard-plan", "layers": {"a": "SKA()", "a": "None"}}', "a key is given twice"),
        ({"layers": {"a": 3}}, "a mechanism, its spelling or None"),
        ({"layers": {"a": "SKA()"}, "layer": {}}, "has 'layer', which this Regard"),
        ({"layers": {"a": "SKA()", " a": None}}, "two mechanisms for a"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str | dict[str, object], reason: str) -> None:
    text = content if isinstance(content, str) else json.dumps({"format": "regard-plan", **content})
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_layer_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["a;b", "a=b", "", " "])
def test_a_name_that_no_text_of_a_plan_could_have_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="a plan is LAYER=MECHANISM"):
        read_layer_plan({name: SKA()})


def test_the_layers_of_a_plan_have_weights_of_their_own() -> None:
    torch.manual_seed(0)
    model, images = create_model(HOST, None).eval(), torch.randn(2, 3, 16, 24)
    plain = model(images)
    for value in torch.nn.ModuleList(plan_swap(model, "MiTA(m=2, k=3)").layers().values()).parameters():
        torch.nn.init.ones_(value)
    assert torch.equal(model(images), plain)
    assert not mixers(model)
