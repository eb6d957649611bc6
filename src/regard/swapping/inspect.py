"""Looking at a model: which of its layers can be swapped, what goes into them, and on which grid."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.core import ConfigError, Grid, RegardError, SwapError
from regard.core.eval_mode import resting
from regard.swapping.ports import PORTS

from .layer import GridSource, Port, find_watched
from .shared_state import is_source

OWN_MODEL = "a model of your own gets a port in a few lines: docs/your-own-model.md"


def port_of(module: nn.Module, ports: Sequence[type[Port]] = ()) -> type[Port] | None:
    """The port of an attention: the one that its class names as `port`, else the first that matches; None without one.

    Of a swapped layer, its own. A subclass does not inherit `port`: its forward pass may be another. ports: the
    caller's own, which come before those of the libraries.
    """
    if isinstance(module, Port):
        return type(module)
    named = type(module).__dict__.get("port")
    if isinstance(named, type) and issubclass(named, Port):
        return named
    return next((port for port in (*ports, *PORTS) if port.matches(module)), None)


def host_of(module: nn.Module) -> nn.Module:
    """The model's own attention: what a swapped layer replaced, or the module itself."""
    return module.host if isinstance(module, Port) else module


def all_sites(model: nn.Module, ports: Sequence[type[Port]] = ()) -> dict[str, type[Port]]:
    """Names of all layers that are or can be swapped, in the model's order, with the port of each."""
    known = {name: port_of(module, ports) for name, module in model.named_modules() if name}
    swapped = {name for name in known if isinstance(model.get_submodule(name), Port)}
    return {name: port for name, port in known.items() if port and (name in swapped or port.belongs(model, name))}


def matching(model: nn.Module, where: str = "*", ports: Sequence[type[Port]] = ()) -> list[str]:
    """Names of the layers that match a glob. Raises: SwapError if there are none."""
    if not isinstance(where, str):
        raise ConfigError(f"where is a glob on layer names, such as 'blocks.[0-3].*', not {where!r}; swap name by name")
    there = all_sites(model, ports)
    names = [name for name in there if fnmatchcase(name, where)]
    if not names:
        have = f"it has {', '.join(there)}" if there else _unknown(model)
        raise SwapError(f"no attention module matching {where!r} in {type(model).__name__}; {have}")
    return names


def _unknown(model: nn.Module) -> str:
    """What is said of a model without a layer that a port knows."""
    kinds = {f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()}
    theirs = sorted(kind for kind in kinds if re.search("attn|attention", kind.rpartition(".")[2].lower()))
    ports = f"none that a port knows ({', '.join(port.__name__ for port in PORTS)})"
    if theirs:
        return f"it has {', '.join(theirs)}, but {ports}; {OWN_MODEL}"
    return f"it has {ports}; a ResNet takes attention with regard.attend; {OWN_MODEL}"


def example_of(model: nn.Module, default: tuple[int, int] | None = None) -> Tensor:
    """Noise of the size (height, width) that the model says it expects, else of the default one.

    Raises: SwapError if it says none and there is no default.
    """
    modules = list(model.modules())
    sizes = [getattr(module, name, None) for module in modules for name in ("img_size", "image_size")]
    for module in modules:
        config = getattr(module, "pretrained_cfg", None)
        listed = config.get("input_size") if isinstance(config, Mapping) else getattr(config, "input_size", None)
        sizes.append(tuple(listed[-2:]) if listed else None)
        sizes.append(getattr(getattr(module, "config", None), "image_size", None))  # DINOv3 of transformers
    for size in filter(None, [*sizes, default]):
        height, width = (size, size) if isinstance(size, int) else cast(tuple[int, int], tuple(size))  # type: ignore
        return torch.randn(1, channels_of(model), height, width, generator=torch.Generator().manual_seed(0))
    raise SwapError(f"{type(model).__name__} does not tell its image size; pass example=, one input")


def channels_of(model: nn.Module) -> int:
    """Input channels: `in_chans` where a module tells it, or those of the first convolution; 3 without either."""
    for module in model.modules():
        told = module.in_channels if isinstance(module, nn.Conv2d) else getattr(module, "in_chans", None)
        if isinstance(told, int):
            return told
    return 3


@contextmanager
def taking(model: nn.Module, example: Tensor) -> Iterator[None]:
    """Turn the failure of a host's own forward pass into one that speaks of its input. Raises: ConfigError."""
    try:
        yield
    except RegardError:
        raise
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError, AttributeError) as error:
        shape = "x".join(map(str, example.shape[1:]))
        raise ConfigError(
            f"{type(model).__name__} does not take inputs of {shape} (channels, height, width): "
            f"{str(error).strip() or type(error).__name__}; "
            "give images of the size that it is made for, make it for these (img_size=, patch_size=), or swap the part "
            "of it that takes images alone"
        ) from error


def inputs_of(model: nn.Module, layers: Mapping[str, nn.Module], example: Tensor) -> dict[str, torch.Size]:
    """One forward pass; the shapes that the layers got. Layers that were not entered are left out."""
    return calls_of(model, layers, example, lambda args, kwargs: (*args, *kwargs.values())[0].shape)


def calls_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    example: Tensor,
    read: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda *call: call,
) -> dict[str, Any]:
    """One forward pass at rest; what `read` makes of the last arguments of each layer, by default (args, kwargs).

    Of CLIP and SigLIP only the images' part is run.
    Layers that were not entered are left out; the others stand in the order of the network.
    """
    seen: dict[str, Any] = {}

    def note(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = read(args, kwargs)

        return record

    handles = [layer.register_forward_pre_hook(note(name), with_kwargs=True) for name, layer in layers.items()]
    parameter = next(model.parameters())
    try:
        with resting(model):
            getattr(model, "get_image_features", model)(
                example.to(parameter.device, parameter.dtype if example.is_floating_point() else example.dtype)
            )
    finally:
        for handle in handles:
            handle.remove()
    return seen


def grids_of(model: nn.Module, layers: Mapping[str, type[Port]], example: Tensor) -> dict[str, tuple[Grid, GridSource]]:
    """The grid of each layer in a forward pass, and the source that will tell it later; one source a watched module.

    layers: names, with the port of each.
    """
    sources: dict[nn.Module, GridSource] = {}
    watched: dict[str, GridSource] = {}
    handles = []
    for name, port in layers.items():
        module = model.get_submodule(name)
        if isinstance(module, Port):
            watched[name] = module.source
            continue
        if not port.watch:
            watched[name] = GridSource()
            continue
        place = find_watched(model, name, port.watch)
        if place not in sources:
            known = [h.__self__ for h in place._forward_hooks.values() if is_source(h)]  # type: ignore[attr-defined]
            sources[place] = known[0] if known else GridSource()
            if not known:
                handles.append(place.register_forward_hook(sources[place].record))
        watched[name] = sources[place]
    modules = {name: model.get_submodule(name) for name in layers}
    try:
        with taking(model, example):
            seen = inputs_of(model, modules, example)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, port in layers.items():
        if name not in seen:
            raise SwapError(f"the forward pass does not enter {name}; leave it out with where=")
        own = port.grid_of(host_of(modules[name]))
        if own is None:
            cells = watched[name].grid(0)
            prefix = seen[name][1] - cells.cells
            if prefix < 0:
                raise SwapError(f"{name} gets {seen[name][1]} tokens, fewer than the {cells.cells} cells of its grid")
            own = watched[name].grid(prefix)
        found[name] = (own, watched[name])
    return found
