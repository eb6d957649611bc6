"""Weights in a swap: what the new layer takes from the module in its place, as the same objects or as copies."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .adapters import BASE, adapted_name, adapters, without_adapters
from .host_names import MIXER_CHILD
from .kept_parameters import convert_others, set_parameters, take_state, tensor_at
from .layer import Port, first_tensor
from .shared_state import shared_module


def transfer(before: nn.Module, layer: Port, faithful: bool) -> None:
    """Give the new layer its weights: the host's, and those of the previous mixer that mean the same.

    What it has in full is the same parameter, with the adapter around it; the rest is copied. The model is not changed.
    faithful: as in `SwapPlan.apply`.
    """
    same, example, host_state = same_parameters(before, layer), first_tensor(before), host_tensors(before, layer)
    convert_others(layer, same.values(), example)
    filled = layer.load_host_state(host_state, same)
    filled |= {name.removeprefix(f"{MIXER_CHILD}.") for name in same}
    if isinstance(before, Port):
        filled |= _copy_same_buffers(before, layer)
    dwc = getattr(layer.mixer, "dwc", None)
    if faithful and isinstance(dwc, nn.Conv2d | nn.Conv3d) and "dwc.weight" not in filled:
        for value in dwc.parameters():
            nn.init.zeros_(value)
    set_parameters(layer, same)
    own = without_adapters(before, dict(before.named_parameters(remove_duplicate=False)))
    frozen = {name for name, value in own.items() if not value.requires_grad}
    if isinstance(before, Port):  # a new parameter may have the name of an old one that meant something else
        further = {name for name in frozen if name in same or not name.startswith(f"{MIXER_CHILD}.")}
        layer.freeze(before.frozen_parameters(), further)
    else:
        layer.freeze(frozen, set())
    layer.drop_host_weights(host_state)
    for path, adapter in movable_adapters(before, layer)[0].items():
        layer.mixer.set_submodule(layer.mixer_name(path), adapter)


def host_tensors(before: nn.Module, layer: Port) -> dict[str, Tensor]:
    """The host's present tensors, by its names without adapters."""
    if isinstance(before, Port):
        return before.host_state()
    paths = adapters(before)
    return {key: tensor_at(before, adapted_name(paths, key)).detach() for key in layer.host_shapes}


def host_adapters(layer: Port) -> dict[str, nn.Module]:
    """The adapters around linear layers that the host has in full, by the host's paths of these layers."""
    return {path: layer.mixer.get_submodule(there) for path, there in layer.host_adapters().items()}


def movable_adapters(before: nn.Module, layer: Port) -> tuple[dict[str, nn.Module], list[str]]:
    """The adapters that the new layer takes, by the host's paths of the layers they are around; names of all others."""
    own = host_adapters(before) if isinstance(before, Port) else adapters(before)
    kept, parts, moved = layer.fully_kept(), dict(layer.mixer.named_modules()), {}
    for path, adapter in own.items():
        base, new = adapter.get_submodule(BASE), parts.get(layer.mixer_name(path))
        if type(new) is type(base) and {f"{path}.{key}" for key in base.state_dict()} <= kept:
            moved[path] = adapter
    there = {id(adapter) for adapter in moved.values()}
    return moved, [path for path, adapter in adapters(before).items() if id(adapter) not in there]


def same_parameters(before: nn.Module, layer: Port) -> dict[str, nn.Parameter]:
    """By the new layer's own names: the parameters of the module in its place that it takes over as they are."""
    if not isinstance(before, Port):
        own = without_adapters(before, dict(before.named_parameters(remove_duplicate=False)))
        return {layer.layer_name(key): own[key] for key in layer.fully_kept() if key in own}
    own = before.host_parameters()
    same = {layer.layer_name(key): own[key] for key in layer.fully_kept() if key in own}
    old = without_adapters(before.mixer, dict(before.mixer.named_parameters(remove_duplicate=False)))
    return same | {f"{MIXER_CHILD}.{key}": old[key] for key in _same_meaning(before, layer) if key in old}


def _same_meaning(before: Port, layer: Port) -> set[str]:
    """The keys of the old mixer's state that mean the same in the new one."""
    old, new = before.mixer, layer.mixer
    a, b = old.config, new.config
    same = {"qkv": _same_projection(before, layer), "operator": type(a) is type(b)}
    source, target = before.mixer_state(), layer.mixer_state()
    other = {key for key, value in target.items() if key not in source or source[key].shape != value.shape}
    other |= {key for key in target if re.sub(r"\bbias$", "weight", key) in other}  # a bias belongs to its weight
    return {key for key in target if key not in other and same.get(key.split(".")[0], True)}


def _same_projection(before: Port, layer: Port) -> bool:
    """Whether both mixers project the same roles in the same way."""
    a, b = before.mixer.config, layer.mixer.config
    same_roles = getattr(a, "roles", a.uses) == getattr(b, "roles", b.uses)
    return same_roles and getattr(a, "projection", None) == getattr(b, "projection", None)


@torch.no_grad()
def _copy_same_buffers(before: Port, layer: Port) -> set[str]:
    """Copy the buffers of the old mixer that mean the same in the new one; returns the names of all that do."""
    keys = _same_meaning(before, layer)
    old, new = dict(before.mixer.named_buffers()), dict(layer.mixer.named_buffers())
    for key in keys & old.keys() & new.keys():
        new[key].copy_(old[key])
    return keys


def shared_sources(model: nn.Module, replaced: Mapping[nn.Module, Port]) -> tuple[dict[nn.Module, nn.Module], bool]:
    """What the new layers share by what the old ones do; whether it takes the same parameters, as no other layer does.

    replaced: the old modules -> the layers in their place.
    """
    others = [module for module in model.modules() if isinstance(module, Port) and module not in replaced]
    sources: dict[nn.Module, nn.Module] = {}
    for before, layer in replaced.items():
        new, old = shared_module(layer), shared_module(before) if isinstance(before, Port) else None
        if new is not None and old is not None and _same_projection(before, layer):  # type: ignore[arg-type]
            sources[old] = new
    still_used = {shared_module(layer) for layer in others}
    return sources, len(sources) == 1 and not sources.keys() & still_used


@torch.no_grad()
def transfer_shared(model: nn.Module, replaced: Mapping[nn.Module, Port]) -> None:
    """Give the module that the new layers share what the old ones share, as `shared_sources` says."""
    sources, same = shared_sources(model, replaced)
    for old, new in sources.items():
        if same:
            take_state(new, old)
            continue
        new.load_state_dict(old.state_dict())
        for value, old_value in zip(new.parameters(), old.parameters(), strict=True):
            value.requires_grad_(old_value.requires_grad)
