"""`host_bias="drop"`: mechanisms that cannot add position biases go into hosts that have them."""

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from regard.core import ConfigError, UnsupportedError
from regard.mixers.agent import Agent
from regard.mixers.linear import Linear
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse, spell
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.swapping.swap import plan_swap, restore, retune, swap

BEIT = "beit_base_patch16_224(img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=5)"
SWIN = "swin_tiny_patch4_window7_224(img_size=56, embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=5)"
LEVIT = "levit_128s(num_classes=5)"
MIXERS = (MiTA(m=(2, 2), k=4, host_bias="drop"), Agent(m=(2, 2), host_bias="drop"), Linear(host_bias="drop"))
LEFT_OUT = "position biases of . layers are left out"


def drawn(host: str, **options: object) -> nn.Module:
    """A host in evaluation mode whose weights and position biases are far from 0."""
    torch.manual_seed(0)
    model = create_model(host, None, **options).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=3.0 if "relative_position" in name else 0.3)
    return model


def image(host: str) -> torch.Tensor:
    return torch.randn(2, 3, *({BEIT: (64, 64), SWIN: (56, 56)}.get(host, (224, 224))))


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: type(mixer).__name__)
@pytest.mark.parametrize("host", [BEIT, SWIN])
def test_a_mechanism_goes_into_a_biased_host(host: str, mixer: MiTA | Agent | Linear) -> None:
    """Without the option it is refused, and the error names it; with it all parameters are trained."""
    model, x = drawn(host), image(host)
    kept = parse(spell(mixer).replace("host_bias='drop'", "").replace("(, ", "(").replace(", )", ")"))
    with pytest.raises(UnsupportedError, match="passes a bias mask.*host_bias=.drop. leaves its position biases out"):
        swap(model, kept)
    before = model(x)
    notes = {note for site in plan_swap(model, mixer).sites for note in site.notes}
    assert any(note.startswith("position biases are left out") for note in notes)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        swap(model, mixer)
    after = model.train()(x)
    assert (after - before).abs().max() > 1e-3
    after.sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert torch.allclose(restore(model.eval())(x), before, atol=1e-5)


def test_softmax_without_biases_is_the_host_with_tables_of_zeros() -> None:
    x = image(BEIT)
    zeros, model = drawn(BEIT), drawn(BEIT)
    for name, parameter in zeros.named_parameters():
        if "relative_position" in name:
            nn.init.zeros_(parameter)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        swap(model, Softmax(host_bias="drop"))
    assert torch.allclose(model(x), zeros(x), atol=1e-5)
    assert not torch.allclose(drawn(BEIT)(x), zeros(x), atol=1e-3)


def test_layers_that_keep_host_modules_drop_biases_too() -> None:
    torch.manual_seed(0)
    model, x = timm.create_model("levit_128s", num_classes=5).eval(), torch.randn(1, 3, 224, 224)
    for name, parameter in model.named_parameters():
        if "attention_biases" in name:
            nn.init.normal_(parameter)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        swap(model, Softmax(host_bias="drop"), where="*blocks.0.attn")
    dropped = model(x)
    for name, parameter in model.named_parameters():
        if "attention_biases" in name and ".blocks.0." in name:
            nn.init.zeros_(parameter)
    assert torch.equal(model(x), dropped)


def test_a_host_without_biases_is_as_it_was() -> None:
    model, x = drawn("vit_desk(size=16, patch=4, dim=16, depth=2, heads=2)"), torch.randn(2, 3, 16, 16)
    before = model(x)
    assert torch.allclose(swap(model, Softmax(host_bias="drop"))(x), before, atol=1e-5)


def test_a_saved_model_leaves_them_out_too(tmp_path: Path) -> None:
    model, x = drawn(SWIN), image(SWIN)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        swap(model, MIXERS[0])
    assert torch.equal(load(save(model, tmp_path / "saved"))(x), model(x))


@pytest.mark.parametrize("host", [BEIT, SWIN, LEVIT])
def test_retune_leaves_them_out_still(host: str, tmp_path: Path) -> None:
    model, x = drawn(host), image(host)
    swap(model, parse('TopK(k=3, host_bias="drop")'), example=x)
    expected = model(x)
    assert torch.equal(retune(model, k=3)(x), expected)
    save(model, tmp_path / "model")
    assert torch.allclose(load(tmp_path / "model")(x), expected, atol=1e-6)


@pytest.mark.parametrize("host_bias", ["keep", "drop"])
def test_retune_changes_no_biases(host_bias: str) -> None:
    model = swap(drawn(BEIT), parse("TopK(k=3)"))
    with pytest.raises(ConfigError, match="use swap for that"):
        retune(model, host_bias=host_bias)
