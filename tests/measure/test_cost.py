"""Costs of whole models: formulas of mechanisms, and the rest as it is counted."""

import pytest
import torch

from regard import MiTA, Softmax, create_model
from regard.measure.cost import model_cost
from regard.swapping.count import count_macs
from regard.swapping.layer import Port


@pytest.mark.parametrize(
    "host", ["swin_tiny_patch4_window7_224", "swin_t_32", "cvt_13_32", "cait_s_32", "vit_s_32_spt", "caformer_s18"]
)
def test_windows_strided_keys_and_talking_heads_are_counted_as_the_host_runs_them(host: str) -> None:
    assert model_cost(host, Softmax()).macs == model_cost(host, None).macs


def test_sizes_reach_hosts_without_an_option_for_them_and_hosts_without_attention_are_counted() -> None:
    whole = model_cost("resnet18", None)
    half = model_cost("resnet18", None, (112, 224))
    assert whole.params == half.params == 11_689_512
    assert 1.9 < whole.macs / half.macs < 2.1
    found = model_cost("caformer_s18", Softmax(), (96, 160))
    assert found == model_cost("caformer_s18", None, (96, 160)) != model_cost("caformer_s18", None)


def test_a_mechanism_counts_by_its_formula_whichever_form_runs() -> None:
    host, config = "vit_desk(size=24, patch=2, dim=32, depth=2, heads=2)", MiTA(m=9, k=9)
    model = create_model(host, config)
    found = count_macs(model, torch.randn(1, 3, 24, 24))
    assert found == model_cost(host, config).macs
    softmax = model_cost(host, Softmax()).macs
    site = next(layer.mixer.site for layer in model.modules() if isinstance(layer, Port))
    assert found - softmax == 2 * (config.operator_cost(site).macs - Softmax().operator_cost(site).macs)
    before = model(torch.ones(1, 3, 24, 24))
    count_macs(model, torch.randn(1, 3, 24, 24))
    assert torch.equal(model(torch.ones(1, 3, 24, 24)), before)  # operators work again afterwards
