"""Inspecting a model: which of its layers can be swapped, what inputs they get, and on which grid."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from regard.core import ConfigError, Grid, RegardError, SwapError, UnsupportedError
from regard.core.eval_mode import eval_mode, no_fast_path
from regard.core.validation import short_repr

from .changed_attention import change_of, changed_attention, has_own_forward, left_out_text, named_port
from .checks import OTHER_MASKS
from .grid_source import GridSource, require_watched_module
from .kept_parameters import like
from .layer import Port, Ports, first_tensor
from .ports import PORTS
from .shared_state import check_where, present_source

Example = Tensor | Mapping[str, Any]
"""One input of a model: images (1, C, H, W), or all arguments of its forward pass by name."""
OWN_MODEL = "a model of your own gets a port in a few lines: docs/your-own-model.md"


def port_of(model: nn.Module, name: str, ports: Ports = ()) -> type[Port] | None:
    """The port that replaces the layer `name`; None if it has none.

    These are asked, and the first that has an answer decides:
    - a swapped layer is its own port;
    - ports: the caller's own, the first that matches the layer;
    - the layer's class may name a `port`, which subclasses do not inherit, as their forward pass may differ;
    - the libraries' ports, the first that matches the layer and to which it belongs.
    The last two only if nobody changed the layer.
    """
    module = model.get_submodule(name)
    if isinstance(module, Port):
        return type(module)
    own = [port for port in ports if port.matches(module)]
    if not own and (port := named_port(module)) is not None:
        own = [port] if has_own_forward(module) else []
        return next((port for port in own if port.belongs(model, name)), None)
    known = own[:1] or [port for port in PORTS if port.matches(module) and not change_of(module)]
    return next((port for port in known if port.belongs(model, name)), None)


def original_attention(module: nn.Module) -> nn.Module:
    """The model's own attention: what a swapped layer replaced, or the module itself."""
    return module.host if isinstance(module, Port) else module


def attention_layers(model: nn.Module, ports: Ports = (), *, reinitialise: bool = False) -> dict[str, type[Port]]:
    """Names of all layers that are swapped or can be, in the model's order, with the port of each.

    reinitialise: also those whose own attention would be lost (`Port.loses`). Raises: ConfigError if it is no bool.
    """
    if not isinstance(reinitialise, bool):
        raise ConfigError(f"reinitialise is True or False, not {short_repr(reinitialise)}")
    layers = {}
    for name, module in model.named_modules():
        port = port_of(model, name, ports) if name else None
        if port and (isinstance(module, Port) or reinitialise or not port.loses):
            layers[name] = port
    return layers


def matching_layers(model: nn.Module, where: str = "*", ports: Ports = (), *, reinitialise: bool = False) -> list[str]:
    """Names of the layers that match a glob. reinitialise: as for `attention_layers`.

    Raises: SwapError if there are none, ConfigError if `where` is no string or `ports` no list of ports.
    """
    check_where(where)
    if not isinstance(ports, Sequence) or not all(isinstance(each, type) and issubclass(each, Port) for each in ports):
        raise ConfigError(f"ports is a list of subclasses of Port, such as [MyPort], not {short_repr(ports)}")
    layers = attention_layers(model, ports, reinitialise=reinitialise)
    names = [name for name in layers if fnmatchcase(name, where)]
    if not names:
        check_lost(model, where, ports)
        if changed := changed_attention(model, layers, where):
            raise SwapError(f"nothing was swapped: {left_out_text(changed)}")
        present = f"it has {', '.join(layers)}" if layers else _without_ports(model)
        raise SwapError(f"no attention module matching {where!r} in {type(model).__name__}; {present}")
    return names


def plannable_layers(
    model: nn.Module, plan: Collection[str], ports: Ports = (), *, reinitialise: bool = False
) -> dict[str, type[Port]]:
    """The layers that a plan may change: `attention_layers`, and those that it names in full.

    The second are replaced although their own attention is lost. plan: names or globs. A full name may leave out the
    first parts, as in a plan for a classifier that is now inside of a detector.
    Raises: SwapError for a glob that matches nothing but layers whose attention would be lost.
    """
    every = attention_layers(model, ports, reinitialise=True)
    usual = attention_layers(model, ports, reinitialise=reinitialise)
    layers = {
        name: port
        for name, port in every.items()
        if name in usual or any(f".{name}".endswith(f".{pattern}") for pattern in plan)
    }
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in layers):
            check_lost(model, pattern, ports)
    return layers


def check_lost(model: nn.Module, where: str, ports: Ports = ()) -> None:
    """Raises: SwapError if layers that match a glob are left out because their own attention would be lost."""
    layers = attention_layers(model, ports, reinitialise=True)
    lost = {name: port.loses for name, port in layers.items() if port.loses and fnmatchcase(name, where)}
    if lost:
        first, *others = lost
        further = f" and {len(others)} more" if others else ""
        raise SwapError(
            f"{first}{further} would lose {' and '.join(dict.fromkeys(lost.values()))}, which no mechanism computes; "
            "swap(..., reinitialise=True), --reinitialise, or a plan with their full names replaces them all the same; "
            "then they have to be trained"
        )


def _without_ports(model: nn.Module) -> str:
    """The error text for a model without a supported attention layer."""
    classes = {f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()}
    attentions = sorted(name for name in classes if re.search("attn|attention", name.rpartition(".")[2].lower()))
    ports = "none that a port knows"
    if nn.MultiheadAttention in map(type, model.modules()):
        return (
            "it has nn.MultiheadAttention, but two in one module, as a decoder, or no Conv2d that its port knows as "
            "patch embedding: subclass "
            "TorchAttention of regard.swapping.ports.torch_attention with watch = the name of yours (where it is no "
            "Conv2d, override belongs and call_grid too), and pass it as ports=[...]; "
            f"{OWN_MODEL}"
        )
    if attentions:
        return f"it has {', '.join(attentions)}, but {ports}; {OWN_MODEL}"
    return f"it has {ports}; a ResNet takes attention with regard.attend; {OWN_MODEL}"


def example_input(model: nn.Module, default: int | tuple[int, int] | None = None) -> Tensor:
    """Noise (1, C, H, W) of the image size that the model names, else of the default: (height, width) or both.

    The size is read from `img_size`, `image_size` or the pretrained configuration. Video models of transformers, which
    name their frames, get clips (1, frames, C, H, W). A model of other inputs has a method `example_input` without
    arguments, whose result is returned.
    Raises: SwapError if the model names no size and there is no default.
    """
    own_example = getattr(model, "example_input", None)
    if callable(own_example):
        return cast(Tensor, own_example())
    modules = list(model.modules())
    # of transformers; parts of SAM 3 name the smaller size of an earlier training
    configs = [getattr(module, "config", None) for module in modules]
    sizes = [getattr(config, "image_size", None) for config in configs]
    names = ("num_frames", "frames_per_clip")
    frames = [value for config in configs for name in names if (value := getattr(config, name, None))][:1]
    sizes += [getattr(module, name, None) for module in modules for name in ("img_size", "image_size")]
    # of timm, which keeps the size that some models are built for nowhere else
    traits = [getattr(module, "_traits", None) for module in modules]
    sizes += [trait.get("img_size") for trait in traits if isinstance(trait, Mapping)]
    for module in modules:
        config = getattr(module, "pretrained_cfg", None)
        shape = config.get("input_size") if isinstance(config, Mapping) else getattr(config, "input_size", None)
        sizes.append(tuple(shape[-2:]) if shape else None)
    for size in filter(None, [*sizes, default]):
        height, width = (size, size) if isinstance(size, int) else cast(tuple[int, int], tuple(size))  # type: ignore
        shape = (1, *frames, input_channels(model), height, width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
    raise SwapError(f"{type(model).__name__} does not name its image size; pass one input as example=")


def input_channels(model: nn.Module) -> int:
    """Input channels: `in_chans` of the first module that has it, or those of the first convolution; otherwise 3."""
    for module in model.modules():
        convolution = isinstance(module, nn.Conv2d | nn.Conv3d)
        channels = module.in_channels if convolution else getattr(module, "in_chans", None)
        if isinstance(channels, int):
            return channels
    return 3


@contextmanager
def explain_inputs(model: nn.Module, example: Example) -> Iterator[None]:
    """Replace an error inside the host's forward pass by one about the input's size. Raises: ConfigError."""
    try:
        yield
    except RegardError:
        raise
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{type(model).__name__} does not take inputs of {_describe(example)}: "
            f"{str(error).strip() or type(error).__name__}; "
            "pass images of the size that it was built for, or another input that it takes, as example=, build it for "
            "this size (img_size=, patch_size=), or swap only the part of it that takes images"
        ) from error


def _describe(example: Example) -> str:
    if isinstance(example, Tensor):
        return f"{'x'.join(map(str, example.shape[1:]))} (channels, height, width)"
    shown = {name: tuple(x.shape) if isinstance(x, Tensor) else short_repr(x) for name, x in example.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def input_shapes(model: nn.Module, layers: Mapping[str, nn.Module], example: Example) -> dict[str, torch.Size]:
    """The shape of each layer's first input in one forward pass. Layers that were not entered are left out."""
    return layer_calls(model, layers, example, lambda args, kwargs: (*args, *kwargs.values())[0].shape)


def layer_calls(
    model: nn.Module, layers: Mapping[str, nn.Module], example: Example,
    read: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda *call: call,
) -> dict[str, Any]:  # fmt: skip
    """What `read` returns for the arguments of each layer's last call in one forward pass, by default (args, kwargs).

    The pass runs in evaluation mode; for images alone, only the vision tower of CLIP and SigLIP runs.
    Layers that were not entered are left out; the others are in the order of the network.
    """
    results: dict[str, Any] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            results[name] = read(args, kwargs)

        return record

    with ExitStack() as hooks, eval_mode(model), no_fast_path():
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(hook(name), with_kwargs=True))
        _call(model, example)
    return results


def _call(model: nn.Module, example: Example) -> None:
    """One forward pass, with floating-point inputs in the model's dtype."""
    parameter = next(model.parameters())
    if isinstance(example, Tensor):
        towers = (getattr(module, "get_image_features", None) for module in model.modules())
        next(filter(None, towers), model)(like(example, parameter))
    else:
        model(**{name: like(value, parameter) for name, value in example.items()})


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """A call of a layer in a forward pass, the last of so many `times`. grid: of its tokens. shape: of its output, the
    first one of several."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: Grid
    shape: torch.Size
    times: int = 1

    @torch.no_grad()
    def check(self, layer: Port, name: str) -> None:
        """Run the layer that takes the place of the one that was called, in evaluation mode.

        Raises: SwapError if its output has another shape; UnsupportedError, with the layer's name, for a mask that
        the mechanism cannot apply; whatever else the layer raises for this input.
        """
        example = first_tensor(layer)
        with eval_mode(layer):
            layer.source.record(layer, (), torch.empty(1, 0, *self.grid.sides))
            args, kwargs = tree_map(lambda value: like(value, example), (self.args, self.kwargs))
            try:
                output = layer(*args, **kwargs)
            except UnsupportedError as error:
                remedy = f"; {OTHER_MASKS}" if "mask" in str(error) else ""
                raise UnsupportedError(f"{name}: {error}{remedy}") from error
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(first, Tensor):
            raise SwapError(f"{type(layer).__name__} at {name} returns {short_repr(first)}: correct the port's forward")
        if (shape := first.shape) != self.shape:
            raise SwapError(
                f"{type(layer).__name__} at {name} returns a tensor {tuple(shape)}, the model's own attention one of "
                f"{tuple(self.shape)}: correct the port's forward"
            )


def _output_shape(output: Any) -> torch.Size:
    return (output[0] if isinstance(output, tuple | list) else output).shape


@contextmanager
def stand_ins(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """For the length of a `with` block, copies of layers in the layers' places, with the same parameters and children.

    A hook on such a copy is called where the model calls the layer, but not where it is called from elsewhere, and
    leaves the layer's own hooks as they are.
    """
    twins: dict[nn.Module, Any] = {}
    for layer in layers.values():
        twins[layer] = object.__new__(type(layer))
        twins[layer].__dict__ = {name: item.copy() if "_hooks" in name else item for name, item in vars(layer).items()}
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    places = [(parent, name, child) for parent, name, child in places if child in twins]
    try:
        for parent, name, child in places:
            parent._modules[name] = twins[child]  # type: ignore[index]
        yield {name: twins[layer] for name, layer in layers.items()}
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def layer_grids(
    model: nn.Module, layers: Mapping[str, type[Port]], example: Example
) -> dict[str, tuple[Grid, GridSource, LayerCall]]:
    """The grid of each layer in a forward pass, the source of later grids, and the call; one source per watched module.

    layers: names, with the port of each.
    Raises: SwapError if a layer is not entered or gets fewer tokens than its grid; ConfigError for an input that the
    model does not take, or that is no tensor.
    """
    if not isinstance(example, Tensor | Mapping):
        raise ConfigError(
            f"example is one input of a model, such as torch.randn(1, 3, 224, 224), not {short_repr(example)}"
        )
    modules = {name: model.get_submodule(name) for name in layers}
    outputs: dict[nn.Module, list[torch.Size]] = defaultdict(list)
    with ExitStack() as hooks:
        sources = _grid_sources(model, layers, hooks)
        with explain_inputs(model, example), _kept_attributes(model), stand_ins(model, modules) as twins:
            for twin in twins.values():
                twin.register_forward_hook(lambda twin, args, output: outputs[twin].append(_output_shape(output)))
            calls = layer_calls(model, twins, example)
    grids = {}
    for name, port in layers.items():
        if name not in calls:
            compiled = modules[name]._compiled_call_impl is not None
            remedy = "swap before you compile it" if compiled else "leave it out with where="
            raise SwapError(f"the forward pass does not enter {name}; {remedy}")
        args, kwargs = calls[name]
        inputs = (*args, *kwargs.values())
        host = original_attention(twins[name])  # which ran, and may know its grid since then
        watched = sources[name].grid(0) if port.watch else None
        try:
            grid = port.call_grid(host, inputs, watched)
        except SwapError as error:
            raise SwapError(f"{name}: {error}") from error
        shapes = outputs[twins[name]]
        call = LayerCall(args=args, kwargs=kwargs, grid=grid, shape=shapes[-1], times=len(shapes))
        grids[name] = (grid, sources[name], call)
    return grids


@contextmanager
def _kept_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what a pass writes into attributes, such as the shift of Swin's windows, caches of biases, and buffers."""
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    plain = (x for x in model.buffers() if not (is_lazy(x) or x.is_inference() or x.is_meta or x.is_sparse))
    values = [(x, x.clone()) for x in plain]
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    caches = [cache for *_, attributes in before if isinstance(cache := attributes.get("attention_bias_cache"), dict)]
    cached = [dict(cache) for cache in caches]
    try:
        yield
    finally:
        for module, kind, attributes in before:
            if type(module) is kind:  # a lazy module has become another by the pass
                vars(module).update(attributes)
        for cache, entries in zip(caches, cached, strict=True):
            cache.clear()
            cache.update(entries)
        for present, former in buffers:
            present.update(former)
        for x, value in values:
            if not torch.equal(x, value):  # others may be saved for a backward pass
                x.data.copy_(value)


def _grid_sources(model: nn.Module, layers: Mapping[str, type[Port]], hooks: ExitStack) -> dict[str, GridSource]:
    """The grid source of each layer, present or new. hooks: gets those that are added for new ones."""
    of_module: dict[nn.Module, GridSource] = {}
    sources: dict[str, GridSource] = {}
    for name, port in layers.items():
        module = model.get_submodule(name)
        if isinstance(module, Port):
            sources[name] = module.source
            continue
        if not port.watch:
            sources[name] = GridSource()
            continue
        watched = require_watched_module(model, name, port.watch)
        if watched not in of_module:
            present = present_source(watched)
            of_module[watched] = present or GridSource()
            if present is None:
                hooks.enter_context(watched.register_forward_hook(of_module[watched].record))
        sources[name] = of_module[watched]
    return sources
