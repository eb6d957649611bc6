"""Which mechanisms suit a model's attention layers on this machine: exact counts and times beside each other.

Counts and times are of the attention layers alone, with their projections; the rest of the model is the same for all.
Counts are what `regard cost` counts for the model, less what it counts without attention. What is timed is the layer
that a swap installs, on as many grids (windows) as the images of a batch have there.
Nothing here says how well a mechanism learns: that is what runs and studies are for.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.core import Cost, Mask, Mixer, MixerConfig, RegardError, Site
from regard.measure.bench import DTYPES, bench_layers, check_numbers
from regard.measure.cost import bare, counted
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.swapping.inspect import inputs_of
from regard.swapping.layer import Port
from regard.swapping.per_window import PerWindow
from regard.swapping.removed import Nothing
from regard.swapping.swap import plan_swap


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One mechanism in all attention layers of a model, for one image in the counts and one batch in the times.

    params, macs: of the layers. forward, both: seconds of a forward pass, and of forward and backward. ratio: of `both`
    to softmax attention. pareto: no other mechanism is better in parameters, MACs and `both` at once. masks: kinds that
    it applies. other_grid: whether a layer that is built takes another image size. refused: why it cannot be used here;
    then there are no numbers.
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
class Place:
    """A kind of attention layer of a model. windows: grids that it gets of one image. port: what a swap puts there."""

    site: Site
    windows: int
    port: type[Port]


def attention_places(host: str, size: tuple[int, int] | None = None) -> dict[Place, int]:
    """The different attention layers of a model and how many it has of each; no weights are made.

    size: (height, width) of images, None = the host's own. Raises: ConfigError, SwapError.
    """
    with torch.device("meta"):
        model, image = bare(host, size)
        return dict(Counter(_places(_swapped(model, Softmax(), image), image).values()))


def _swapped(model: nn.Module, config: MixerConfig, image: Tensor) -> nn.Module:
    """A copy with a mechanism. Raises: RegardError."""
    return plan_swap(copy.deepcopy(model), config, example=image).apply()


def _places(model: nn.Module, image: Tensor) -> dict[Port, Place]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Port)}
    got = inputs_of(model, layers, image)
    return {
        layer: Place(replace(layer.mixer.site, layer=0, name="", drop=0.0), got[name][0], type(layer))
        for name, layer in layers.items()
    }


def advise(
    host: str,
    configs: Sequence[MixerConfig],
    *,
    size: tuple[int, int] | None = None,
    batch: int = 4,
    dtype: str = "fp32",
    device: str = "cpu",
    seconds: float = 0.3,
    report: Callable[[Place, int], None] | None = None,
) -> list[Advice]:
    """Rank mechanisms at a model's attention layers, fastest training first; softmax is always among them.

    batch: images. seconds: for each mechanism at each different layer, forward and again with backward. report: called
    with each kind of layer and how many there are, before they are timed. Candidates are timed in turn, so that a busy
    machine slows all alike. What a swap refuses stands at the end with why.
    Raises: ConfigError as `bench` or for an unknown host, SwapError if it has no attention to replace.
    """
    check_numbers(dtype, batch=batch, seconds=seconds)
    refused: dict[MixerConfig, str] = {}
    with torch.device("meta"):
        model, image = bare(host, size)
        rest = counted(_swapped(model, Nothing(), image), image)
        softmax = _swapped(model, Softmax(), image)
        first = _places(softmax, image)
        costs: dict[MixerConfig, Cost] = {Softmax(): counted(softmax, image)}
        for config in [one for one in dict.fromkeys(configs) if one not in costs]:
            try:
                costs[config] = counted(_swapped(model, config, image), image)
            except RegardError as error:
                refused[config] = str(error)
    usable = list(costs)
    one_of = {place: layer for layer, place in reversed(first.items())}
    places = Counter(first.values())
    forward = dict.fromkeys(usable, 0.0)
    both = dict.fromkeys(usable, 0.0)
    other_grid = dict.fromkeys(usable, True)
    made = (torch.device(device), DTYPES[dtype])
    for place, number in places.items():
        grid = place.site.grid
        if report is not None:
            report(place, number)
        mask = None
        if "bias" in place.port.sends:
            mask = Mask(bias=torch.zeros(1, 1, grid.tokens, grid.tokens, device=made[0], dtype=made[1]))
        layers = [_built(one_of[place], config, place.site) for config in usable]
        for config, layer in zip(usable, layers, strict=True):
            other_grid[config] &= _takes_another_grid(layer)
        for total, backward in ((forward, False), (both, True)):
            grids = batch * place.windows
            timings = bench_layers(layers, grid, mask, grids, made, backward=backward, part="layer", seconds=seconds)
            for config, timing in zip(usable, timings, strict=True):
                total[config] += number * timing.seconds
    found = [
        Advice(
            mixer=spell(config),
            params=costs[config].params - rest.params,
            macs=costs[config].macs - rest.macs,
            forward=forward[config],
            both=both[config],
            ratio=both[config] / both[usable[0]],
            masks=tuple(sorted(config.masks)),
            other_grid=other_grid[config],
        )
        for config in usable
    ]
    front = [replace(one, pareto=not any(_beats(other, one) for other in found)) for one in found]
    front.sort(key=lambda one: one.both or 0.0)
    return [*front, *(Advice(mixer=spell(config), refused=text) for config, text in refused.items())]


def _built(layer: Port, config: MixerConfig, site: Site) -> Mixer:
    """The mixer that the port of a layer puts at its site, with weights; batch normalisation takes a batch of one."""
    torch.manual_seed(0)
    return layer.built(config, site, config.shared()).eval()


def _takes_another_grid(layer: Mixer) -> bool:
    """Whether a built layer accepts a grid that is half as large again, as a larger image brings it."""
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


def _beats(other: Advice, one: Advice) -> bool:
    """At least as good in parameters, MACs and time, and better in one of them."""
    first = (other.params or 0, other.macs or 0, other.both or 0.0)
    second = (one.params or 0, one.macs or 0, one.both or 0.0)
    return all(a <= b for a, b in zip(first, second, strict=True)) and first != second
