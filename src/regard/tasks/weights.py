"""First weights: every parameter from its own stream (seed, name), so that rows share what they can."""

import math
import re
from typing import Any, Literal, cast

import torch
from torch import nn

from regard.core import ConfigError, Mixer, Operator, Projection
from regard.projections.linear import LinearProjection
from regard.projections.sne import Codes
from regard.tasks.data.streams import number

Init = Literal["zero", "fan_in", "host"]

_OUTPUT = re.compile(r"(^|\.)((self_|global_|window_)?attn|attention|token_mixer)(\.regard)?\.(proj|out_proj)$")
_SECOND = re.compile(r"(^|\.)(mlp|ffn)\d?\.fc2$")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def redraw(model: nn.Module, seed: int, init: Init) -> None:
    """Give a model its first weights, in place.

    "fan_in": matrices and convolutions are normal with std fan_in^-0.5, their biases 0; norms, embeddings, parts of
    mechanisms and linear layers and convolutions of a class with a start of its own as their `reset_parameters` says.
    "zero": the same, and the output layers of both branches (`outputs`: the attention's projection and the second layer
    of the MLP) are 0, so that every block starts as the identity. "host": nothing changes. Parameters that have no
    layer, such as positions, keep what the host gave them. Each module's draws come from the stream (seed, name); the
    name of a swapped layer is that of the layer it replaced.
    Raises: ConfigError if init is unknown, or "zero" and the host's output layers are not known.
    """
    if init not in ("zero", "fan_in", "host"):
        raise ConfigError(f'init is "zero", "fan_in" or "host", not {init!r}')
    if init == "host":
        return
    done: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(f"{parent}.") for parent in done) and _redraw_one(module, name, seed):
            done.append(name)
    if init == "zero":
        _zero(model)


def _redraw_one(module: nn.Module, name: str, seed: int) -> bool:
    """True if the module has drawn for its children too."""
    own = dict(module.named_parameters(recurse=False))
    reset = getattr(module, "reset_parameters", None)
    inside = isinstance(module, Operator | Projection | Codes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layer = isinstance(module, _LAYERS)
        if isinstance(module, LinearProjection) or (layer and not _starts_itself(module)):
            for label, parameter in own.items():
                draw(parameter, seed, f"{name}.{label}")
        elif reset is not None and (layer or inside or own and type(module).__module__.startswith("torch.nn")):
            torch.manual_seed(number("init", seed, plain(name)))
            reset()
            return inside
    return False


def _starts_itself(layer: nn.Module) -> bool:
    """Whether the class of a linear layer or convolution has another `reset_parameters` than torch's."""
    base: Any = next(kind for kind in _LAYERS if isinstance(layer, kind))
    return cast(Any, type(layer)).reset_parameters is not base.reset_parameters


def draw(parameter: torch.Tensor, seed: int, name: str) -> None:
    """Normal with std fan_in^-0.5 for two and more axes, 0 for a bias; on the CPU, whatever the device."""
    if parameter.ndim < 2:
        parameter.zero_()
        return
    stream = torch.Generator().manual_seed(number("init", seed, plain(name)))
    values = torch.randn(parameter.shape, generator=stream) * math.prod(parameter.shape[1:]) ** -0.5
    parameter.copy_(values)


def plain(name: str) -> str:
    """The name that a parameter would have in the host without a swap."""
    return re.sub(r"(^|\.)regard\.", r"\1", name)


def outputs(model: nn.Module) -> list[nn.Module]:
    """The output layers of the branches: of mechanisms, of the host's own attention, and of its MLPs.

    Not those of mechanisms behind a gamma of zero: that branch is 0 already, and with a zero output too neither it nor
    gamma would ever have a gradient.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}
    inner = {f"{name}.{mixer.output}" for name, mixer in mixers.items() if not _closed(model, name)}
    return [
        module
        for name, module in found.items()
        if name in inner
        or ((_OUTPUT.search(name) or _SECOND.search(name)) and not any(name.startswith(f"{m}.") for m in mixers))
    ]


def _closed(model: nn.Module, name: str) -> bool:
    """Whether the owner of a mechanism multiplies it by a gamma that is zero, as attended residual blocks do."""
    gamma = getattr(model.get_submodule(name.rpartition(".")[0]), "gamma", None)
    return isinstance(gamma, nn.Parameter) and not bool(gamma.any())


def _zero(model: nn.Module) -> None:
    layers = outputs(model)
    if not layers and not any(isinstance(m, Mixer) and _closed(model, name) for name, m in model.named_modules()):
        raise ConfigError(
            f'init="zero" knows no output layers in {type(model).__name__}; pass init="fan_in" or init="host"'
        )
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                parameter.zero_()
