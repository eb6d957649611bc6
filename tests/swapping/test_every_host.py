"""A swap at every host: softmax computes what the host computes, others do not, and `restore` gives the host back."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from timm.models import pvt_v2, xcit
from timm.models.edgenext import CrossCovarianceAttn
from timm.models.twins import GlobalSubSampleAttn
from torch import Tensor, nn

import library_hosts
import small_hosts
import timm_hosts
from library_hosts import LibraryHost, gap, outputs, prepared
from regard import DeformableDETR, ViT3
from regard.core import ConfigError, GridError, MixerConfig, UnsupportedError
from regard.mixers.convolutions.conv import Conv
from regard.mixers.factors.factors import Factors
from regard.mixers.linear import Linear
from regard.mixers.mita.mita import MiTA
from regard.mixers.polaformer import PolaFormer
from regard.mixers.pvt import PVT
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.ska import SKA
from regard.mixers.topk.topk import TopK
from regard.mixers.window import Window
from regard.mixers.xca import XCA
from regard.projections.sne import PSNE
from regard.swapping.host_mixer import HostPort
from regard.swapping.inspect import attention_layers, layer_calls
from regard.swapping.layer import Port
from regard.swapping.removed import Removed
from regard.swapping.swap import plan_swap, restore, swap

HOSTS: dict[str, Mapping[str, Callable[[], Any]]] = {
    "small": small_hosts.HOSTS,
    "regard": small_hosts.REGARD_HOSTS,
    "timm": timm_hosts.TIMM_HOSTS,
    **library_hosts.HOSTS,
}
SLOW = {*list(small_hosts.REGARD_HOSTS)[2:]}
FLOAT32 = frozenset({"SamVisionModel, eager", "Sam3ViTModel"})
"""Hosts that compute the softmax, or rotate queries and keys, in float32 whatever their own dtype is."""


def ready(library: str, name: str) -> LibraryHost:
    """A small host in evaluation mode, float64, all of whose weights are drawn anew, tables that start at 0 too."""
    if library in library_hosts.HOSTS:
        pytest.importorskip(library)
    torch.manual_seed(0)
    host = {**HOSTS, "reinitialised": timm_hosts.REINITIALISED_HOSTS}[library][name]()
    if isinstance(host, LibraryHost):
        return prepared(host)
    model, x = host
    for key, value in model.named_buffers():
        if "running" in key:
            noise = 0.15 * torch.randn_like(value)
            value.add_(noise.abs() if key.endswith("running_var") else noise)
    return prepared(LibraryHost(model, x, 0))


@pytest.fixture(
    params=[
        pytest.param((library, name), id=f"{library}-{name}", marks=pytest.mark.slow if name in SLOW else ())
        for library, hosts in HOSTS.items()
        for name in hosts
    ]
)
def host(request: pytest.FixtureRequest) -> LibraryHost:
    return ready(*request.param)


def own_mechanisms(model: nn.Module) -> dict[str, MixerConfig]:
    """What each layer computes: `PVT` for keys on a map that a convolution halves, `XCA` between channels."""
    found: dict[str, MixerConfig] = {}
    for name in attention_layers(model):
        layer = model.get_submodule(name)
        reduced = isinstance(layer, GlobalSubSampleAttn | pvt_v2.Attention) and layer.sr is not None
        channels = isinstance(layer, CrossCovarianceAttn | xcit.XCA)
        found[name] = PVT(ratio=2) if reduced else XCA() if channels else Softmax()
    return found


@torch.no_grad()
def test_softmax_computes_what_the_host_computes(host: LibraryHost, request: pytest.FixtureRequest) -> None:
    model, inputs, layers = host
    library, name = request.node.callspec.params["host"]
    before, state = outputs(model, inputs), copy.deepcopy(model.state_dict())
    swap(model, own_mechanisms(model), example=inputs)
    assert sum(isinstance(module, Port) for module in model.modules()) == layers or not layers
    tolerance = 1e-6 if name in FLOAT32 else 1e-11 if library in library_hosts.HOSTS else 1e-12
    assert gap(outputs(model, inputs), before) <= tolerance
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.load_state_dict(state)
    restore(model)
    assert gap(outputs(model, inputs), before) == 0
    assert list(model.state_dict()) == list(state)
    assert not any(isinstance(module, Port) for module in model.modules())


@torch.no_grad()
def test_another_mechanism_computes_something_else_in_every_layer(host: LibraryHost) -> None:
    """On random tokens, as a small network makes tokens that are almost equal; with one key all weights are 1."""
    model, inputs, _ = host
    before = outputs(model, inputs)
    hosts = {name: model.get_submodule(name) for name in attention_layers(model)}
    calls = layer_calls(model, hosts, inputs)
    try:
        swap(model, Factors(terms="0000"), example=inputs)
    except UnsupportedError:  # mixes heads, which needs the logits of a mechanism
        swap(model, Softmax(scale=9.0), example=inputs)
    assert gap(outputs(model, inputs), before) > 1e-9
    for name, (arguments, options) in calls.items():
        if model.get_submodule(name).mixer.site.tokens("k") == 1:
            continue
        tokens = next(value for value in (*arguments, *options.values()) if isinstance(value, Tensor))
        drawn = torch.randn_like(tokens)
        arguments = [drawn if value is tokens else value for value in arguments]
        options = {key: drawn if value is tokens else value for key, value in options.items()}
        found = [layer(*arguments, **options) for layer in (hosts[name], model.get_submodule(name))]
        own, out = (output[0] if isinstance(output, tuple) else output for output in found)
        assert (out - own).abs().max() > 1e-3 * own.abs().max(), name


@pytest.mark.slow
def test_a_gradient_reaches_every_new_parameter(host: LibraryHost) -> None:
    model, inputs, _ = host
    if any(issubclass(port, HostPort) for port in attention_layers(model).values()):
        with pytest.raises(UnsupportedError, match="keeps the modules that make its queries, keys and values; leave"):
            swap(model, Softmax(projection=PSNE()), example=inputs)
        return
    swap(model, Softmax(projection=PSNE()), example=inputs)
    sum(value.square().sum() for value in outputs(model, inputs)).backward()  # type: ignore[union-attr]
    new = {name: value for name, value in model.named_parameters() if ".regard.qkv." in name}
    assert new
    assert all(value.grad is not None and value.grad.isfinite().all() for value in new.values())
    assert all(value.grad.any() for name, value in new.items() if name.endswith("weight"))  # type: ignore[union-attr]


@pytest.mark.slow
@torch.no_grad()
def test_a_mechanism_of_each_kind_runs_at_every_host(host: LibraryHost) -> None:
    """Static keys, chosen keys and convolutions, where they are not refused; a removal, and the host again."""
    model, inputs, _ = host
    before = outputs(model, inputs)
    for mixer in (SKA(), TopK(k=3), MiTA(m=4, k=4), Conv(kernel=3), Removed()):
        try:
            swap(model, mixer, example=inputs)
        except (ConfigError, UnsupportedError, GridError):  # by the plan, with a reason
            continue
        assert all(value.isfinite().all() for value in outputs(model, inputs))
    restore(model)
    assert gap(outputs(model, inputs), before) == 0


BIASES = ("relpos", "swinv2", "swinv2 cr", "maxvit", "coatnet with bias", "botnet")


@pytest.mark.parametrize(
    ("library", "name", "mixer", "message"),
    [
        *(("timm", name, Linear(), "passes a bias mask, which Linear") for name in BIASES),
        ("timm", "levit", MiTA(m=2, k=2), r"stages.0.blocks.0.attn passes a bias mask, which MiTA\(m=2, k=2\)"),
        ("timm", "nextvit", XCA(), "has 24 queries for 6 keys, and XCA has no cross-attention"),
        ("timm", "hiera", Conv(), "pools its queries, which Conv cannot"),
        ("timm", "tnt", PolaFormer(), "makes its queries, keys and values, .* that PolaFormer cannot keep"),
        *(("timm", "gemma", mixer, "by modules that .* cannot keep") for mixer in (ViT3(), DeformableDETR())),
        ("timm", "efficientformer_v2", Factors(), "the host mixes its heads before and after the softmax"),
        ("timm", "cait", MiTA(m=4, k=4), "mixes its heads"),
        ("timm", "coatnet", Removed(), "makes 64 channels of 32, which Removed cannot"),
        ("timm", "halonet", MiTA(m=2, k=2), "MiTA cannot apply|MiTA has no cross-attention|bias"),
        ("timm", "convit", XCA(dwc=3), "leave projection=, dwc=, gate= and heads= of XCA out"),
        ("timm", "differential", XCA(), "values of width 16 for keys of width 8, which XCA cannot take"),
        ("small", "swin", XCA(), "attn passes a bias mask.*XCA.*leave the layer out with where="),
        ("small", "swin", MiTA(m=1, k=1), "attn passes a bias mask, which MiTA.*leave the layer out with where="),
        ("transformers", "SwinModel", Linear(), "bias mask, which Linear"),
        ("transformers", "HieraModel", Window(), "pools its queries, which Window cannot"),
        ("transformers", "HieraModel", MiTA(m=4, k=4, dwc=3), "pools its queries, which MiTA cannot"),
        ("transformers", "DetrModel", PVT(), "adds positions to queries and keys, which PVT cannot"),
        ("torchvision", "SwinTransformer", Linear(), "bias mask, which Linear"),
    ],
    ids=lambda value: spell(value) if isinstance(value, MixerConfig) else str(value)[:20],
)
def test_what_a_mechanism_cannot_do_is_refused_by_the_plan(
    library: str, name: str, mixer: MixerConfig, message: str
) -> None:
    model, inputs, _ = ready(library, name)
    modules = list(model.modules())
    for change in (plan_swap, swap):
        with pytest.raises(UnsupportedError, match=message):
            change(model, mixer, example=inputs)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


COMPILED = {
    "small": ("vit5", "caformer", "swin", "xcit"),
    "regard": ("cait_s_32", "swin_t_32(keys='window')", "cvt_13", "vit_s_32_spt(keep_lsa=True)"),
    "timm": ("convit", "efficientvit_msra", "differential", "edgenext", "halonet", "botnet", "gemma", "mobilevitv2"),
    "torchvision": ("nn.TransformerEncoder", "SwinTransformer", "SwinTransformer V2"),
    "transformers": ("HieraModel", "SamVisionModel", "ViTModel"),
    "diffusers": ("DiTTransformer2DModel",),
    "reinitialised": tuple(timm_hosts.REINITIALISED_HOSTS),
}
QUICK = ("vit5", "convit", "botnet", "nn.TransformerEncoder", "SamVisionModel")


@pytest.mark.untyped
@torch.no_grad()
@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(library, name, marks=() if name in QUICK else pytest.mark.slow)
        for library, names in COMPILED.items()
        for name in names
    ],
)
def test_it_compiles_in_one_graph(library: str, name: str) -> None:
    model, inputs, _ = ready(library, name)
    others = {"xcit": XCA(), "vit5": MiTA(m=4, k=4)}
    mixer = others.get(name, SKA() if library == "regard" else Softmax())
    swap(model, mixer, example=inputs, reinitialise=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert gap(outputs(compiled, inputs), outputs(model, inputs)) <= 1e-9
