"""Which mechanisms suit a model's attention layers on this machine: exact counts and measured times side by side.

Counts and times are of the attention layers alone, with their projections; the rest of the model is the same for all
mechanisms. Counts are those of `regard cost` for the model, minus those of the model without attention. Times are those
of the layer that a swap installs, on as many grids (windows) as the images of a batch have there; layers that keep
modules of the host are timed on what they get in a pass of the model.
Accuracy is not measured: runs and studies are for that.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.core import Cost, Extra, Mask, Mixer, MixerConfig, RegardError, Site
from regard.core.validation import check_arguments
from regard.measure.bench import Placement, Run, check_placement, layer_pass, with_gradients
from regard.measure.bench_model import output_tensor
from regard.measure.cost import count_cost, host_and_image
from regard.measure.turns import in_turns, one_thread
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.models.catalog import user_ports
from regard.swapping.host_mixer import HostPort
from regard.swapping.inspect import input_shapes
from regard.swapping.layer import Port, Ports
from regard.swapping.per_window import PerWindow
from regard.swapping.removed import Removed
from regard.swapping.swap import plan_swap

from .substitutes import Substitutes


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One mechanism in all attention layers of a model; counts are for one image, times for one batch.

    params, macs: of the layers. forward, both: seconds of a forward pass, and of forward and backward. ratio: of `both`
    to softmax attention. pareto: no other mechanism is better in parameters, MACs and `both` at once. masks: kinds that
    it applies. other_grid: whether a built layer takes another image size, as far as is known. refused: why it cannot
    be used here; then there are no numbers.
    """

    mixer: str
    params: int | None = None
    macs: int | None = None
    forward: float | None = None
    both: float | None = None
    ratio: float | None = None
    pareto: bool = False
    masks: tuple[str, ...] = ()
    other_grid: bool | None = None
    refused: str = ""


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention layer of a model. windows: grids per image. port: the layer that a swap installs.

    masks: the kinds of mask that the host always passes. weights: shapes of the host's parameters, where the layer
    keeps modules of the host.
    """

    site: Site
    windows: int
    port: type[Port]
    masks: frozenset[str] = frozenset()
    weights: tuple[torch.Size, ...] = ()


class _Counts(NamedTuple):
    """rest: cost of the model without attention. costs: of it with each mechanism. layers: with softmax, by name."""

    rest: Cost
    costs: dict[MixerConfig, Cost]
    refused: dict[MixerConfig, str]
    layers: dict[str, tuple[Port, AttentionKind]]


def _swap_copy(model: nn.Module, config: MixerConfig, image: Tensor, ports: Ports = ()) -> nn.Module:
    """A copy of the model with a mechanism. Raises: RegardError."""
    return plan_swap(copy.deepcopy(model), config, example=image, ports=ports).apply()


def _kinds(model: nn.Module, image: Tensor) -> dict[str, tuple[Port, AttentionKind]]:
    """Each swapped layer of a model and its kind, by name; windows of an image are a larger batch."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Port)}
    shapes = input_shapes(model, layers, image)
    return {
        name: (
            layer,
            AttentionKind(
                replace(layer.mixer.site, layer=0, name="", drop=0.0), shapes[name][layer.batch_dim], type(layer),
                layer.host_masks(layer.host),
                tuple(value.shape for value in layer.host.parameters()) if isinstance(layer, HostPort) else (),
            ),
        )
        for name, layer in layers.items()
    }  # fmt: skip


def _count(host: str, configs: Sequence[MixerConfig], size: tuple[int, int] | None, extra: Extra) -> _Counts:
    """Count the model with each mechanism, softmax first, on the meta device. Raises: ConfigError, SwapError."""
    refused: dict[MixerConfig, str] = {}
    ports = user_ports(extra)
    with torch.device("meta"):
        model, image = host_and_image(host, size, extra)
        rest = count_cost(_swap_copy(model, Removed(), image, ports), image)
        softmax = _swap_copy(model, Softmax(), image, ports)
        layers = _kinds(softmax, image)
        costs: dict[MixerConfig, Cost] = {Softmax(): count_cost(softmax, image)}
        for config in dict.fromkeys(configs):
            if config in costs:
                continue
            try:
                costs[config] = count_cost(_swap_copy(model, config, image, ports), image)
            except RegardError as error:
                refused[config] = str(error)
    return _Counts(rest, costs, refused, layers)


@check_arguments
def advise(
    host: str, configs: Sequence[MixerConfig], *, size: tuple[int, int] | None = None, batch: int = 4,
    dtype: str = "fp32", device: str = "cpu", seconds: float = 0.3,
    report: Callable[[AttentionKind, int], None] | None = None, extra: Extra = (),
) -> list[Advice]:  # fmt: skip
    """Rank mechanisms at a model's attention layers, fastest training first; softmax is always among them.

    size: (height, width) of images, None = the host's own. batch: images. seconds: for each mechanism at each kind of
    layer, forward and again with backward. report: called with each kind of layer and the number of such layers,
    before it is timed. Passes of the mechanisms are interleaved, so that a busy machine slows all alike. Mechanisms
    that cannot be swapped in come last, with the reason. extra: the user's own models and ports.
    Raises: ConfigError as `bench` or for an unknown host, SwapError if it has no attention to replace.
    """
    placement = check_placement(device, dtype, batch=batch, seconds=seconds)
    counts = _count(host, configs, size, extra)
    times = {config: _Times() for config in counts.costs}
    kinds = Counter(kind for _, kind in counts.layers.values())
    for kind, number in kinds.items():
        if report is not None:
            report(kind, number)
        name, layer = next((name, layer) for name, (layer, own) in counts.layers.items() if own == kind)
        if isinstance(layer, HostPort):
            passes = _passes_in_place(host, name, list(times), size, batch, placement, extra)
        else:
            passes = _passes(kind, layer, list(times), batch, placement)
        for config in [config for config in times if isinstance(passes[config], str)]:
            counts.refused[config] = str(passes[config])
            del times[config]
        _add_times(times, passes, number, seconds, placement)
    results = [
        Advice(
            mixer=spell(config), params=cost.params - counts.rest.params, macs=cost.macs - counts.rest.macs,
            forward=time.forward, both=time.both, ratio=time.both / times[Softmax()].both,
            masks=tuple(sorted(config.masks)), other_grid=time.other_grid,
        )
        for config, time in times.items()
        for cost in [counts.costs[config]]
    ]  # fmt: skip
    ranked = [replace(result, pareto=not any(_dominates(rival, result) for rival in results)) for result in results]
    ranked.sort(key=lambda result: result.both or 0.0)
    return [*ranked, *(Advice(mixer=spell(config), refused=reason) for config, reason in counts.refused.items())]


@dataclass
class _Times:
    """The sums over layers so far, seconds; other_grid: of all layers, None where it is not known of one."""

    forward: float = 0.0
    both: float = 0.0
    other_grid: bool | None = True


class _Passes(NamedTuple):
    """A layer's forward pass, and forward and backward; other_grid: whether it takes another, None if not known."""

    forward: Run
    both: Run
    other_grid: bool | None


def _passes(
    kind: AttentionKind, example: Port, configs: Sequence[MixerConfig], batch: int, placement: Placement
) -> dict[MixerConfig, _Passes | str]:
    """Passes of a kind of layer with each mechanism, on random tokens."""
    grid, mask, grids = kind.site.grid, _zero_bias(kind, placement), batch * kind.windows
    passes: dict[MixerConfig, _Passes | str] = {}
    for config in configs:
        layer = _build_mixer(example, config, kind.site)
        other = _takes_another_grid(layer)
        forward, both = (
            layer_pass(layer, grid, mask, grids, placement, backward=backward, part="layer")
            for backward in (False, True)
        )
        passes[config] = _Passes(forward, both, other)
    return passes


def _passes_in_place(
    host: str, name: str, configs: Sequence[MixerConfig], size: tuple[int, int] | None, batch: int,
    placement: Placement, extra: Extra,
) -> dict[MixerConfig, _Passes | str]:  # fmt: skip
    """Passes of a layer that keeps modules of the host, on what it gets from random images; or why it has none."""
    device, dtype = placement
    torch.manual_seed(0)
    model, image = host_and_image(host, size, extra)
    model, images = model.to(device, dtype), torch.randn(batch, *image.shape[1:], device=device, dtype=dtype)
    with Substitutes(model, configs, images, name, user_ports(extra)) as substitutes:
        args, kwargs = substitutes.calls(images)[name]
    args = tuple(
        value.detach().clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in args
    )
    passes: dict[MixerConfig, _Passes | str] = {}
    for config in configs:
        layer = substitutes.layers[name].get(config)
        if layer is None:
            passes[config] = substitutes.refused[name, config]
            continue
        run = partial(_output, layer, args, kwargs)
        leaves = [value for value in (*args, *layer.parameters()) if isinstance(value, Tensor) and value.requires_grad]
        passes[config] = _Passes(torch.no_grad()(run), with_gradients(run, leaves), None)
    return passes


def _output(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return output_tensor(layer(*args, **kwargs))


def _add_times(
    times: dict[MixerConfig, _Times], passes: dict[MixerConfig, _Passes | str], number: int, seconds: float,
    placement: Placement,
) -> None:  # fmt: skip
    """Measure the passes of a kind of layer in turns, and add them for `number` layers."""
    usable = [(time, run) for config, time in times.items() if isinstance(run := passes[config], _Passes)]
    with one_thread():
        forward = in_turns([run.forward for _, run in usable], seconds, placement[0])
        both = in_turns([run.both for _, run in usable], seconds, placement[0])
    for (time, run), first, second in zip(usable, forward, both, strict=True):
        time.forward += number * first.median
        time.both += number * second.median
        unknown = run.other_grid is None or time.other_grid is None
        time.other_grid = None if unknown else time.other_grid and run.other_grid


def _build_mixer(layer: Port, config: MixerConfig, site: Site) -> Mixer:
    """The mixer that the port of a layer builds for a site, with weights; in evaluation mode, for batches of one."""
    torch.manual_seed(0)
    mixer = layer.build_mixer(config, site, config.shared()).eval()
    for module in mixer.modules():  # what a port copies from its host is on the meta device; times need no values
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                module._parameters[name] = nn.Parameter(0.02 * torch.randn(weight.shape, dtype=weight.dtype))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return mixer


def _zero_bias(kind: AttentionKind, placement: Placement) -> Mask | None:
    """A mask of the kind that the host always passes: a bias of zeros, or None."""
    if "bias" not in kind.masks:
        return None
    tokens, (device, dtype) = kind.site.grid.tokens, placement
    return Mask(bias=torch.zeros(1, 1, tokens, tokens, device=device, dtype=dtype))


def _takes_another_grid(layer: Mixer) -> bool:
    """Whether a built layer accepts a grid with sides half as large again, as from a larger image."""
    old = layer.site.grid
    grid = replace(old, height=old.height * 3 // 2 + 1, width=old.width * 3 // 2 + 1)
    operator = getattr(layer, "operator", None)
    windows = operator.windows if isinstance(operator, PerWindow) else 1  # a batch is whole images
    try:
        with torch.no_grad():
            layer(torch.randn(windows, grid.tokens, layer.site.dim), grid)
    except RegardError:
        return False
    return True


def _dominates(a: Advice, b: Advice) -> bool:
    """Whether a is at least as good as b in parameters, MACs and time, and better in one of them."""
    first = (a.params or 0, a.macs or 0, a.both or 0.0)
    second = (b.params or 0, b.macs or 0, b.both or 0.0)
    return all(x <= y for x, y in zip(first, second, strict=True)) and first != second
