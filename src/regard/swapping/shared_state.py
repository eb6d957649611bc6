"""What a model as a whole has of its swapped layers: shared parameters, grid hooks and names without weight decay."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from regard.core import SwapError
from regard.swapping.ports.hugging_face import mark

from .layer import CHILD, GridSource, Port, find_watched


def swapped(model: nn.Module, where: str = "*") -> list[str]:
    """Names of the swapped layers that match. Raises: SwapError if there are none."""
    all_names = [name for name, module in model.named_modules() if isinstance(module, Port)]
    names = [name for name in all_names if fnmatchcase(name, where)]
    if not names:
        there = f"swapped are {', '.join(all_names)}" if all_names else "nothing is swapped"
        raise SwapError(f"no swapped layer matches {where!r} in {type(model).__name__}; {there}")
    return names


def shared_of(layer: nn.Module) -> nn.Module | None:
    """The module whose parameters a swapped layer has in common with others (codes of FSNE); None if there is none."""
    own = set(layer._modules[CHILD].modules())  # type: ignore[union-attr]
    for module in own:
        for shared in module.__dict__.get("_shared") or ():
            if isinstance(shared, nn.Module) and shared not in own:
                return shared
    return None


def is_source(hook: Any) -> bool:
    """Whether a forward hook writes a grid."""
    return isinstance(getattr(hook, "__self__", None), GridSource)


class NoDecay:
    """`model.no_weight_decay()`: the host's own names and those of the mixers."""

    def __init__(self, names: set[str]) -> None:
        self.names = frozenset(names)

    def __call__(self) -> set[str]:
        return set(self.names)


def tidy(model: nn.Module) -> None:
    """Owners, grid hooks and decay names as the present layers need them; called after every change."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Port)}
    _own_shared(model, layers)
    _hook_sources(model, layers)
    mark(model)
    model.__dict__.pop("no_weight_decay", None)
    if layers:
        own = getattr(model, "no_weight_decay", None)
        names = set(own()) if callable(own) else set()
        owners: dict[str, nn.Module] = {f"{name}.{CHILD}": layer.mixer for name, layer in layers.items()}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "regard_shared":
                owners[name] = module
        for start, owner in owners.items():
            for name, module in owner.named_modules():
                listed = getattr(module, "no_weight_decay", None)
                if callable(listed):
                    names |= {".".join(filter(None, (start, name, item))) for item in listed()}
        model.no_weight_decay = NoDecay(names)  # type: ignore[assignment]


def _own_shared(model: nn.Module, layers: Mapping[str, Port]) -> None:
    """Register shared modules once: on the model, or in a chain on the first layer that uses them."""
    for module in [model, *layers.values()]:
        module._modules.pop("regard_shared", None)
    users: dict[nn.Module, Port] = {}
    for layer in layers.values():
        shared = shared_of(layer)
        if shared is not None:
            users.setdefault(shared, layer)
    if not users:
        return
    if not isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        model.add_module("regard_shared", nn.ModuleList(users))
        return
    for shared, layer in users.items():
        layer.add_module("regard_shared", nn.ModuleList([shared]))


def _hook_sources(model: nn.Module, layers: Mapping[str, Port]) -> None:
    """One forward hook for each source in use, and no other."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if is_source(hook):
                del module._forward_hooks[key]
    hooked: set[nn.Module] = set()
    for name, layer in layers.items():
        if layer.watch:
            place = find_watched(model, name, layer.watch)
            if place not in hooked:
                place.register_forward_hook(layer.source.record)
                hooked.add(place)
            else:
                layer.source = next(h.__self__ for h in place._forward_hooks.values() if is_source(h))  # type: ignore
