"""Costs of whole models: mechanisms by their formulas, the rest by PyTorch's counter."""

import copy
import threading

import pytest
import torch
from torch import nn

from regard import DAT, MIXERS, PVT, MiTA, RegardError, Softmax, create_model
from regard.core import ConfigError, MixerConfig
from regard.measure.cost import count_macs, host_and_image, model_cost
from regard.mixers.spelling import spell
from regard.swapping.layer import Port
from regard.swapping.swap import plan_swap
from threads import in_threads

CLASS_TOKEN = "deit_tiny_patch16_224(depth=2)"


@pytest.mark.parametrize(
    "host",
    [
        "cait_s_32",
        "vit_s_32_spt",
        "swin_t_32",
        *(
            pytest.param(host, marks=pytest.mark.slow)
            for host in ("swin_tiny_patch4_window7_224", "cvt_13_32", "caformer_s18")
        ),
    ],
)
def test_windows_strided_keys_and_talking_heads_are_counted_as_the_host_runs_them(host: str) -> None:
    assert model_cost(host, Softmax()).macs == model_cost(host, None).macs


@pytest.mark.slow
def test_sizes_reach_hosts_without_an_option_for_them_and_hosts_without_attention_are_counted() -> None:
    whole = model_cost("resnet18", None)
    half = model_cost("resnet18", None, (112, 224))
    assert whole.params == half.params == 11_689_512
    assert 1.9 < whole.macs / half.macs < 2.1
    swapped = model_cost("caformer_s18", Softmax(), (96, 160))
    assert swapped == model_cost("caformer_s18", None, (96, 160)) != model_cost("caformer_s18", None)


def test_a_mechanism_counts_by_its_formula_whichever_form_runs() -> None:
    host, config = "vit_desk(size=24, patch=2, dim=32, depth=2, heads=2)", MiTA(m=9, k=9)
    model = create_model(host, config)
    macs = count_macs(model, torch.randn(1, 3, 24, 24))
    assert macs == model_cost(host, config).macs
    softmax = model_cost(host, Softmax()).macs
    site = next(layer.mixer.site for layer in model.modules() if isinstance(layer, Port))
    assert macs - softmax == 2 * (config.operator_cost(site).macs - Softmax().operator_cost(site).macs)
    before = model(torch.ones(1, 3, 24, 24))
    count_macs(model, torch.randn(1, 3, 24, 24))
    assert torch.equal(model(torch.ones(1, 3, 24, 24)), before)  # operators work again afterwards


@pytest.mark.parametrize("config", [PVT(ratio=2), DAT(stride=2)], ids=["PVT", "DAT"])
def test_what_makes_a_memory_is_counted_once(config: MixerConfig) -> None:
    """The reduction of keys, the network of offsets: parts of the formula, and modules that could run beside it."""
    host = "vit_desk(size=24, patch=2, dim=32, depth=2, heads=2)"
    model = create_model(host, config)
    site = next(layer.mixer.site for layer in model.modules() if isinstance(layer, Port))
    difference = model_cost(host, config).macs - model_cost(host, Softmax()).macs
    assert difference == 2 * (config.cost(site).macs - Softmax().cost(site).macs)
    before = model(torch.ones(1, 3, 24, 24))
    count_macs(model, torch.randn(1, 3, 24, 24))
    assert torch.equal(model(torch.ones(1, 3, 24, 24)), before)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.__name__)
def test_every_mechanism_has_a_plan_and_a_cost_beside_a_class_token(mixer: type[MixerConfig]) -> None:
    """On the meta device, as in `regard cost`; a mechanism that does not fit may refuse with a RegardError."""
    try:
        with torch.device("meta"):
            model, image = host_and_image(CLASS_TOKEN, None)
            plan = plan_swap(model, mixer(), example=image)
        cost = model_cost(CLASS_TOKEN, mixer())
    except RegardError:
        return
    assert len(plan.sites) == 2
    assert spell(mixer()) in str(plan)
    assert cost.params > 0
    assert cost.macs > 0


def test_what_torch_fuses_is_counted() -> None:
    """The fast path of nn.TransformerEncoder, which a pass without gradients takes, is one unknown operation."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    images = torch.randn(1, 9, 16)
    assert count_macs(model, images) == count_macs(copy.deepcopy(model).to("meta"), images.to("meta"))
    with torch.no_grad():
        assert count_macs(model, images) == 2 * (9 * 16 * (4 * 16 + 2 * 32) + 2 * 9 * 9 * 16)


def test_products_that_pytorch_does_not_count() -> None:
    lstm = nn.LSTM(4, 8, num_layers=2, bidirectional=True)
    assert count_macs(lstm, torch.zeros(3, 2, 4)) == 3 * 2 * 2 * 4 * 8 * (4 + 8 + 16 + 8)

    class Products(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x[0] + x[0].dot(x[1])

    assert count_macs(Products(), torch.ones(3, 5)) == 3 * 5 + 5
    bilinear = nn.Bilinear(4, 5, 6)
    assert count_macs(bilinear, (torch.zeros(3, 4), torch.zeros(3, 5))) == 3 * (4 * 5 * 6 + 5 * 6)


def test_inputs_that_the_model_does_not_take_are_said() -> None:
    for inputs, said in (
        ((1, 3, 32, 32), "no. 1: 1, no. 2: 3"),
        ((torch.zeros(1, 3, 8, 8),), r"no. 1: \(1, 3, 8, 8\)"),
    ):
        with pytest.raises(ConfigError, match=f"does not take inputs of {said}"):
            count_macs(create_model("vit_desk"), inputs)


def test_a_model_predicts_in_other_threads_while_it_is_counted() -> None:
    model = create_model("vit_desk", MiTA(m=4, k=4)).eval()
    image = torch.randn(1, 3, 32, 32)
    expected, here, found = model(image).detach(), threading.get_ident(), list[torch.Tensor]()

    def predict() -> None:
        with torch.no_grad():
            found.append(model(image))

    def meanwhile(*_: object) -> None:
        if threading.get_ident() == here:
            in_threads(predict)

    hook = model.head.register_forward_hook(meanwhile)
    count_macs(model, image)
    hook.remove()
    assert torch.equal(found[0], expected)
