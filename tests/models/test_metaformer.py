"""SKAFormer with queries that are the input, as in the authors' code."""

import warnings

import pytest
import torch

from regard.core import ConfigError
from regard.measure.cost import count_macs
from regard.mixers.static_keys.ska import SKA, ska
from regard.models.create import create_model
from regard.projections.identity import IdentityQuery

DESK = "skaformer_desk(img_size=64, mixers=('conv', 'conv', 'ska', 'ska'), query='identity')"


@pytest.mark.slow
def test_fact_section4_3_official_skaformer_has_7_337_gflops() -> None:
    """Static keys in stages 3 and 4 without query matrices."""
    with torch.device("meta"):
        model = create_model("skaformer_s18(mixers=('conv', 'conv', 'ska', 'ska'), query='identity')", None)
    assert round(2 * count_macs(model, torch.empty(1, 3, 224, 224, device="meta")) / 1e9, 3) == 7.337


def test_queries_are_the_input() -> None:
    torch.manual_seed(0)
    model = create_model(DESK, None).eval()
    layer = model.stages[2].blocks[1].token_mixer.mixer
    assert layer.config == SKA(projection=IdentityQuery())
    x = torch.randn(2, 16, 96)
    v = layer.qkv.linear(x).unflatten(-1, (3, 32)).transpose(1, 2)
    out = ska(x.unflatten(-1, (3, 32)).transpose(1, 2), layer.operator.keys, v)
    assert torch.allclose(layer(x, layer.site.grid), out.transpose(1, 2).flatten(2) @ layer.proj.weight.mT, atol=1e-6)


@pytest.fixture
def own(tmp_path):
    """A skaformer_desk and the path of its weights."""
    torch.manual_seed(0)
    model = create_model("skaformer_desk", None, img_size=64)
    torch.save(model.state_dict(), tmp_path / "own.pt")
    return model, str(tmp_path / "own.pt")


def test_its_own_checkpoint_is_taken_whole(own) -> None:
    """With the keys of its static mechanism, without a warning."""
    model, path = own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = create_model("skaformer_desk", None, img_size=64, pretrained=path)
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


def test_what_a_checkpoint_leaves_out_is_said(own) -> None:
    model, path = own
    with pytest.warns(
        UserWarning, match="2 of the .* tensors of .*own.pt .* left out: head.fc.fc2.weight, head.fc.fc2.bias$"
    ):
        again = create_model("skaformer_desk", None, img_size=64, num_classes=3, pretrained=path)
    assert torch.equal(again.stages[3].blocks[0].mlp.fc1.weight, model.stages[3].blocks[0].mlp.fc1.weight)


def test_checkpoints_that_give_nothing_are_refused(tmp_path) -> None:
    files = {"foreign": create_model("vit_desk", None).state_dict(), "empty": {"epoch": 3}, "list": [1, 2]}
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "text.safetensors").write_text("no checkpoint")
    (tmp_path / "bytes.pt").write_bytes(b"M")  # an error of `struct`
    for pretrained, message in (
        (tmp_path / "foreign.pt", "none of the 51 tensors of .*foreign.pt fits, such as pos_embed"),
        (tmp_path / "empty.pt", "has no tensors"),
        (tmp_path / "list.pt", "is not a readable checkpoint"),
        (tmp_path / "text.pt", "is not a readable checkpoint"),
        (tmp_path / "text.safetensors", "is not a readable checkpoint"),
        (tmp_path / "bytes.pt", "is not a readable checkpoint"),
        (tmp_path / "nowhere.pt", "there is no such file"),
        (True, "no published weights of caformer_desk"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_model("skaformer_desk", None, img_size=64, pretrained=pretrained)
