"""Ports of timm's families keep what the host computes: biases, scales, norms, layouts, windows, other channels."""

import copy
import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.models.cait import TalkingHeadAttn
from timm.models.edgenext import CrossCovarianceAttn
from timm.models.efficientformer_v2 import Attention2d
from timm.models.twins import GlobalSubSampleAttn
from torch import nn

from regard.core import Grid, GridError, MixerConfig, UnsupportedError
from regard.measure.cost import count_macs
from regard.mixers.convolutions.conv import Conv
from regard.mixers.factors.factors import Factors
from regard.mixers.linear import Linear
from regard.mixers.mita.mita import MiTA
from regard.mixers.polaformer import PolaFormer
from regard.mixers.pvt import PVT
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from regard.projections.sne import PSNE
from regard.swapping.host_mixer import HostPort
from regard.swapping.inspect import attention_layers, layer_calls
from regard.swapping.layer import Port
from regard.swapping.ports.timm.hiera import by_offset, row_by_row
from regard.swapping.swap import plan_swap, remove, restore, retune, swap
from regard.testing.subject import gap
from small_hosts import HostAndInput
from timm_hosts import TIMM_HOSTS

ROOT = Path(__file__).parents[2]
ROUNDING = 1e-12
"""Largest difference relative to the largest logit, float64."""
MIXED_HEADS = {TalkingHeadAttn, Attention2d}
"""They need the logits of a mechanism."""


@pytest.fixture(params=TIMM_HOSTS)
def host(request: pytest.FixtureRequest) -> HostAndInput:
    """A small host in evaluation mode, float64, all of whose weights are drawn anew, tables that start at 0 too."""
    torch.manual_seed(0)
    model, x = TIMM_HOSTS[request.param]()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(value, nn.Parameter) or "running" in name:
                noise = 0.15 * torch.randn_like(value)
                value.add_(noise.abs() if name.endswith("running_var") else noise)
    return model.double().eval(), x.double()


@torch.no_grad()
def test_softmax_computes_what_the_host_computes(host: HostAndInput) -> None:
    """`PVT` where the host attends to keys on a map that a convolution reduces by 2, `XCA` between channels."""
    model, x = host
    before, state = model(x), copy.deepcopy(model.state_dict())
    reduced = [name for name, module in model.named_modules() if isinstance(module, GlobalSubSampleAttn) and module.sr]
    channels = [name for name, module in model.named_modules() if isinstance(module, CrossCovarianceAttn)]
    swap(model, Softmax(), example=x[:1])
    for name in reduced:
        swap(model, PVT(ratio=2), name, example=x[:1])
    for name in channels:
        swap(model, XCA(), name, example=x[:1])
    assert (model(x) - before).abs().max() <= ROUNDING * before.abs().max()
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.load_state_dict(state)
    restore(model)
    assert torch.equal(model(x), before)
    assert not any(isinstance(module, Port) for module in model.modules())


@torch.no_grad()
def test_another_mechanism_computes_something_else_in_every_layer(host: HostAndInput) -> None:
    """On random tokens, as a small network makes tokens that are almost equal."""
    model, x = host
    hosts = {name: model.get_submodule(name) for name in attention_layers(model)}
    calls = layer_calls(model, hosts, x)
    mixed = bool(MIXED_HEADS & {type(module) for module in hosts.values()})
    mixer = Softmax(scale=9.0) if mixed else Factors(terms="0000")
    swap(model, mixer, example=x[:1])
    for name, ((tokens, *further), options) in calls.items():
        tokens = torch.randn_like(tokens)
        outputs = [layer(tokens, *further, **options) for layer in (hosts[name], model.get_submodule(name))]
        own, out = (output[0] if isinstance(output, tuple) else output for output in outputs)
        assert (out - own).abs().max() > 1e-3 * own.abs().max(), name


def test_a_gradient_reaches_every_new_parameter(host: HostAndInput) -> None:
    model, x = host
    if any(issubclass(port, HostPort) for port in attention_layers(model).values()):
        with pytest.raises(UnsupportedError, match="keeps the modules that make its queries, keys and values; leave"):
            swap(model, Softmax(projection=PSNE()), example=x[:1])
        return
    swap(model, Softmax(projection=PSNE()), example=x[:1])
    model.train()(x).square().sum().backward()
    new = {name: value for name, value in model.named_parameters() if ".regard." in name}
    assert new
    assert all(value.grad is not None and value.grad.isfinite().all() for value in new.values())
    assert all(value.grad.any() for name, value in new.items() if name.endswith("weight"))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["relpos", "swinv2", "swinv2 cr", "maxvit", "coatnet with bias"])
def test_a_mechanism_without_biases_is_refused(name: str) -> None:
    model, x = TIMM_HOSTS[name]()
    modules = list(model.modules())
    with pytest.raises(UnsupportedError, match="bias mask, which Linear"):
        swap(model, Linear(), example=x[:1])
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


@pytest.mark.parametrize(
    ("name", "mixer", "message"),
    [
        ("levit", MiTA(m=2, k=2), r"stages.0.blocks.0.attn passes a bias mask, which MiTA\(m=2, k=2\)"),
        ("nextvit", XCA(), "has 24 queries for 6 keys, and XCA has no cross-attention"),
        ("hiera", Conv(), "pools its queries, which Conv cannot"),
        ("tnt", PolaFormer(), "makes its queries, keys and values, .* that PolaFormer cannot keep"),
        ("efficientformer_v2", Factors(), "the host mixes its heads before and after the softmax"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_mechanism_that_cannot_serve_a_layer_is_refused_by_the_plan(
    name: str, mixer: MixerConfig, message: str
) -> None:
    model, x = TIMM_HOSTS[name]()
    with pytest.raises(UnsupportedError, match=message):
        plan_swap(model, mixer, example=x[:1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["levit", "hiera", "lowformer"])
def test_products_of_layers_with_the_modules_of_the_host_are_counted(name: str) -> None:
    model, x = TIMM_HOSTS[name]()
    own = count_macs(model.eval(), x)
    assert count_macs(swap(model, Softmax(), example=x[:1]), x) == own


@torch.no_grad()
@pytest.mark.parametrize("name", ["maxvit", "vit with norm", "levit", "mvitv2"])
def test_retune_keeps_what_the_layer_keeps_of_the_host(name: str) -> None:
    model, x = TIMM_HOSTS[name]()
    before = swap(model.eval(), Softmax(), example=x[:1])(x)
    retune(model, scale=2.0)
    assert not torch.equal(model(x), before)
    retune(model, scale=None)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("name", ["levit", "tiny_vit", "efficientformer", "efficientformer_v2"])
def test_biases_of_an_earlier_pass_are_not_copied(name: str) -> None:
    """In evaluation mode these hosts keep biases with a graph, which are stale after the next step of training."""
    model, x = TIMM_HOSTS[name]()
    x = x[:1]
    model.eval()(x)
    swap(model, Softmax(), example=x)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "bias" in key:
                value += 0.5
    swapped = model(x)
    assert gap(restore(model)(x), swapped) < 1e-4


def test_patches_with_coordinates_have_no_common_grid() -> None:
    model, x = TIMM_HOSTS["naflexvit"]()
    swap(model.eval(), Softmax(), example=x[:1])
    coordinates = torch.tensor([[[0, 0], [0, 1]], [[0, 0], [1, 0]]])
    with pytest.raises(GridError, match="no common grid; pass a swapped model images"):
        model(torch.randn(2, 2, 768), patch_coord=coordinates, patch_valid=torch.ones(2, 2, dtype=torch.bool))


@torch.no_grad()
def test_tokens_of_hiera_are_brought_into_the_order_of_the_map() -> None:
    model, _ = TIMM_HOSTS["hiera"]()
    x = torch.arange(16.0 * 24).reshape(1, -1, 1)
    unrolled_tokens = model.unroll(x)  # type: ignore[operator]
    assert not torch.equal(unrolled_tokens, x)
    assert torch.equal(row_by_row(unrolled_tokens, Grid(16, 24), 2), x)
    assert torch.equal(by_offset(x, Grid(16, 24), 2), unrolled_tokens)


def test_a_removal_that_would_need_other_channels_is_refused() -> None:
    model, x = TIMM_HOSTS["coatnet"]()
    modules = list(model.modules())
    with pytest.raises(UnsupportedError, match="makes 64 channels of 32, which Removed cannot"):
        remove(model, example=x[:1])
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


@pytest.mark.slow
def test_the_counted_table_is_not_stale() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import count_ports

    stored = json.loads(count_ports.FILE.read_text())
    if stored["timm"] != timm.__version__:
        pytest.skip(f"counted with timm {stored['timm']}")
    families = ("swin_transformer_v2", "swin_transformer_v2_cr", "hiera", "hieradet_sam2", "levit", "davit")
    names = [name for family in families for name in timm.list_models(module=family)]
    assert count_ports.summary(count_ports.count(names)) == {name: stored["families"][name] for name in families}
