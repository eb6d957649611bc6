"""Ports of transformers, torchvision, open_clip and diffusers keep what the host computes, and save and load."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="pip install 'regard[hf]'")

from library_hosts import HUGGING_HOSTS, LibraryHost, outputs  # noqa: E402
from regard.core import SwapError, UnsupportedError  # noqa: E402
from regard.mixers.factors.factors import Factors  # noqa: E402
from regard.mixers.softmax import Softmax  # noqa: E402
from regard.models.hugging_face import from_pretrained, save_pretrained  # noqa: E402
from regard.swapping.layer import Port  # noqa: E402
from regard.swapping.swap import restore, swap  # noqa: E402

FLOAT32 = frozenset({"SamVisionModel, eager"})
"""Hosts that compute the softmax in float32 whatever their own dtype is."""

UNASKED = frozenset({"SamVisionModel", "SamVisionModel, eager", "DPTModel", "Mask2FormerModel"})
"""Hosts that do not tell their layers, or their backbone, that attention weights are asked for."""


def prepared(host: LibraryHost, dtype: torch.dtype = torch.float64) -> LibraryHost:
    """The host in evaluation mode, all of whose parameters are drawn anew, tables that start at 0 too."""
    with torch.no_grad():
        for value in host.model.parameters():
            value.add_(0.15 * torch.randn_like(value))
    inputs = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in host.inputs.items()
    }
    return LibraryHost(host.model.to(dtype).eval(), inputs, host.layers)


@pytest.fixture(params=HUGGING_HOSTS)
def host(request: pytest.FixtureRequest) -> LibraryHost:
    torch.manual_seed(0)
    return prepared(HUGGING_HOSTS[request.param]())


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of two lists of outputs, relative to the largest value of each."""
    assert len(a) == len(b) > 0
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))


@torch.no_grad()
def test_softmax_computes_what_the_host_computes(host: LibraryHost, request: pytest.FixtureRequest) -> None:
    model, inputs, layers = host
    before, state = outputs(model, inputs), copy.deepcopy(model.state_dict())
    swap(model, Softmax(), example=inputs)
    assert sum(isinstance(module, Port) for module in model.modules()) == layers
    tolerance = 1e-6 if request.node.callspec.params["host"] in FLOAT32 else 1e-11
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
    again = from_pretrained(save_pretrained(model, tmp_path))
    assert gap(outputs(again, inputs), outputs(model, inputs)) <= 1e-6


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HUGGING_HOSTS)
def test_a_lost_swap_is_an_error_and_not_quietly_softmax(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, inputs, _ = prepared(HUGGING_HOSTS[name](), torch.float32)
    swap(model, Softmax(), example=inputs)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises((SwapError, ValueError), match=r"loaded without it|regard\.from_pretrained"):
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
        given = model(**inputs, output_attentions=True).attentions or ()
        assert name == "Mask2FormerModel" or all(maps is None for maps in given)
        return
    with pytest.raises(UnsupportedError, match=r"returns no attentions.*regard\.capture"):
        model(**inputs, output_attentions=True)
