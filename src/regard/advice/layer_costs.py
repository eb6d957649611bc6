"""What each substitute costs beside the layer that it replaces: time, peak memory and multiply-accumulates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import MixerConfig
from regard.measure.cost import count_macs
from regard.measure.memory import peak_growth
from regard.measure.turns import in_turns, one_thread
from regard.swapping.layer import Port
from regard.swapping.layer_plan import LayerPlan

from .substitutes import Substitutes

OWN = None
"""Stands for the model's own attention, where mechanisms are keys."""


@dataclass(frozen=True)
class Usage:
    """Of a layer or a model, for a batch of images: seconds of a forward pass without gradients on one thread, bytes
    that it adds at its peak (None where the system does not tell), and multiply-accumulates."""

    seconds: float
    memory: int | None
    macs: int


Costs = Mapping[str, Mapping[MixerConfig | None, Usage]]
"""Layer -> mechanism (`OWN` too) -> what it uses."""


class _Call(nn.Module):
    """A layer with its further arguments, so that it can be counted like a model."""

    def __init__(self, layer: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.kwargs = layer, kwargs

    def forward(self, *args: Any) -> Any:
        return self.layer(*args, **self.kwargs)


def layer_costs(
    substitutes: Substitutes, images: Tensor, seconds: float = 0.3, report: Callable[[str], None] | None = None
) -> Costs:
    """Measure every layer and its substitutes on the inputs that the layer has for these prepared images.

    Layers of one class with equal inputs, heads, grids and mechanisms are measured once. seconds: for each mechanism;
    passes take turns, so that a busy machine slows all alike. report: called with the name of each layer before it is
    timed.
    """
    calls = substitutes.calls(images)
    measured: dict[Any, dict[MixerConfig | None, Usage]] = {}
    costs = {}
    for name, (args, kwargs) in calls.items():
        own = substitutes.model.get_submodule(name)
        kind = (
            type(own), _built_for(own, substitutes.layers[name]), _shapes((args, kwargs)),
            _shapes(dict(own.named_parameters())), tuple(substitutes.choices(name)),
        )  # fmt: skip
        if kind not in measured:
            if report is not None:
                report(name)
            measured[kind] = _measure({OWN: own, **substitutes.layers[name]}, args, kwargs, seconds)
        costs[name] = measured[kind]
    return costs


def _built_for(own: nn.Module, layers: Mapping[MixerConfig, Port]) -> Any:
    """What distinguishes layers of one class beside the shapes of their inputs and weights."""
    present = own.mixer.config if isinstance(own, Port) else None
    sites = (layer.mixer.site for layer in (*layers.values(), own) if isinstance(layer, Port))
    return present, frozenset(replace(site, layer=0, name="") for site in sites)


def _measure(
    layers: Mapping[Any, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> dict[MixerConfig | None, Usage]:
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    runs = [torch.no_grad()(partial(layer, *args, **kwargs)) for layer in layers.values()]
    with one_thread():
        summaries = in_turns(runs, seconds, device)
        return {
            mixer: Usage(
                summary.median, peak_growth(run, device), count_macs(_Call(layer, kwargs).train(layer.training), args)
            )
            for (mixer, layer), run, summary in zip(layers.items(), runs, summaries, strict=True)
        }


def _shapes(value: Any) -> Any:
    """The shapes of tensors in nested arguments, as a value that can be a key."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, _shapes(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shapes, value))
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def measure_usage(
    substitutes: Substitutes, plans: Mapping[str, LayerPlan], images: Tensor, seconds: float = 1.0
) -> dict[str, Usage]:
    """Time, peak memory and multiply-accumulates of the whole model with each plan (by a label), in turns."""
    model = substitutes.model

    def run(plan: LayerPlan) -> None:
        with substitutes.install(plan), torch.no_grad():
            model(images)

    runs = {label: partial(run, plan) for label, plan in plans.items()}
    usage = {}
    with one_thread():
        summaries = in_turns(list(runs.values()), seconds, images.device)
        for (label, once), summary in zip(runs.items(), summaries, strict=True):
            with substitutes.install(plans[label]):
                macs = count_macs(model, images[:1]) * len(images)
            usage[label] = Usage(summary.median, peak_growth(once, images.device), macs)
    return usage
