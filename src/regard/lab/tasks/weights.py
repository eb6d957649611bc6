"""Initial weights: each parameter has its own random stream (seed, name), so that parameters of the
same name and shape have the same values in all models."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import nn

from regard.core import ConfigError, Mixer, MixerConfig, Operator, Projection
from regard.images.streams import number
from regard.mixers.spelling import spell
from regard.projections.sne import Codes
from regard.swapping.host_names import MIXER_CHILD
from regard.swapping.inspect import attention_layers
from regard.swapping.layer import Port

Init = Literal["zero", "fan_in", "host"]


@contextmanager
def host_seed(seed: int) -> Iterator[None]:
    """Within it, torch's generator draws the initial weights of a host; afterwards it is as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number("host", seed))
        yield


def check_removed(mixer: MixerConfig | None, removed: bool) -> None:
    """Raises: ConfigError for a model that should have both a mechanism and no attention."""
    if removed and mixer is not None:
        raise ConfigError(f"removed=True removes attention; it needs mixer=None, not {spell(mixer)}")


_OUTPUT = re.compile(r"(^|\.)((self_|global_|window_)?attn|attention|token_mixer)(\.regard)?\.(proj|out_proj)$")
_SECOND = re.compile(r"(^|\.)(mlp|ffn)\d?\.fc2$")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def redraw(model: nn.Module, seed: int, init: Init) -> None:
    """Initialise the weights of a model, in place.

    "fan_in": linear layers and convolutions get normal weights with std fan_in^-0.5 and zero biases; normalisations,
    embeddings, parts of mechanisms, and subclasses of linear layers with another `reset_parameters` call it.
    "zero": the same, but the output layers of both branches (`outputs`: the attention's projection and the second layer
    of the MLP) are 0, so that every block starts as the identity. "host": nothing changes. Parameters outside such
    layers, such as position embeddings, keep the host's values. Each module has the random stream (seed, name); a
    swapped layer has the name of the layer that it replaced, and with a port of the user's own the names of its parts.
    Raises: ConfigError if init is unknown, or for "zero" if the host's output layers are not found.
    """
    if init not in ("zero", "fan_in", "host"):
        raise ConfigError(f'init is "zero", "fan_in" or "host", not {init!r}')
    if init == "host":
        return
    initialised: list[str] = []
    ports = {name: module for name, module in model.named_modules() if isinstance(module, Port)}
    for name, module in model.named_modules():
        stream = host_parameter_name(name, ports)
        if not any(name.startswith(f"{parent}.") for parent in initialised) and _redraw_module(module, stream, seed):
            initialised.append(name)
    if init == "zero":
        _zero(model)


def _redraw_module(module: nn.Module, name: str, seed: int) -> bool:
    """Initialise the module's own parameters; True if its children are initialised too. name: of its stream."""
    parameters = dict(module.named_parameters(recurse=False))
    reset = getattr(module, "reset_parameters", None)
    with_children = isinstance(module, Operator | Projection | Codes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layer, of_torch = isinstance(module, _LAYERS), type(module).__module__.startswith("torch.nn")
        if layer and not _has_own_reset(module):
            for label, parameter in parameters.items():
                draw(parameter, seed, f"{name}.{label}")
        elif reset is not None and (layer or with_children or (parameters and of_torch)):
            torch.manual_seed(number("init", seed, name))
            reset()
            return with_children
    return False


def _has_own_reset(layer: nn.Module) -> bool:
    """Whether the class of a linear layer or convolution overrides PyTorch's `reset_parameters`."""
    base: Any = next(kind for kind in _LAYERS if isinstance(layer, kind))
    return cast(Any, type(layer)).reset_parameters is not base.reset_parameters


def draw(parameter: torch.Tensor, seed: int, name: str) -> None:
    """Normal with std fan_in^-0.5 for two or more axes, 0 for a bias; drawn on the CPU for every device."""
    if parameter.ndim < 2:
        parameter.zero_()
        return
    stream = torch.Generator().manual_seed(number("init", seed, name))
    values = torch.randn(parameter.shape, generator=stream) * math.prod(parameter.shape[1:]) ** -0.5
    parameter.copy_(values)


def host_parameter_name(name: str, ports: Mapping[str, Port]) -> str:
    """The name that a module or parameter has in the host without a swap. ports: the swapped layers by name.

    Regard's own ports keep the names of their mixers' parts: other streams would change results that have a key.
    """
    for path, port in ports.items():
        inside = name.removeprefix(f"{path}.{MIXER_CHILD}.")
        if inside != name and not type(port).__module__.startswith("regard."):
            return f"{path}.{port.host_name(inside)}"
    return re.sub(r"(^|\.)regard\.", r"\1", name)


def outputs(model: nn.Module) -> list[nn.Module]:
    """The output layers of residual branches: of mechanisms, of the host's own attention, and of its MLPs.

    Mechanisms that are multiplied by a gamma of zero are left out: their branch is 0 already, and with a zero output
    layer neither would ever have a gradient.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}
    inner = {f"{name}.{mixer.output}" for name, mixer in mixers.items() if not _gamma_is_zero(model, name)}
    for name, port in attention_layers(model).items():
        inner |= {f"{name}.{host_name}" for host_name, name_here in port.parameter_names.items() if name_here == "proj"}
    return [
        module
        for name, module in layers.items()
        if name in inner
        or ((_OUTPUT.search(name) or _SECOND.search(name)) and not any(name.startswith(f"{m}.") for m in mixers))
    ]


def _gamma_is_zero(model: nn.Module, name: str) -> bool:
    """Whether a mechanism is multiplied by a parameter gamma that is zero, as in attended residual blocks."""
    gamma = getattr(model.get_submodule(name.rpartition(".")[0]), "gamma", None)
    return isinstance(gamma, nn.Parameter) and not bool(gamma.any())


def _zero(model: nn.Module) -> None:
    layers = outputs(model)
    if not layers and not any(isinstance(module, Mixer) for module in model.modules()):
        raise ConfigError(
            f'init="zero" finds no output layers in {type(model).__name__}; use init="fan_in" or init="host"'
        )
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                parameter.zero_()
