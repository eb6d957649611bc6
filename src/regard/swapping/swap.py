"""Swapping: a mechanism in the place of a model's attention, with the model's weights and parameter names kept."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import ConfigError, Grid, MixerConfig, SwapError, UnsupportedError, nearest
from regard.mixers.spelling import parse_mixer, parts, spell
from regard.mixers.static_keys.keys import FROM_TEACHER, StaticConfig

from .host_parameters import alteration, package_name
from .inspect import attention_layers, example_input, input_shapes, layer_grids, matching_layers, original_attention
from .layer import MIXER_CHILD, Port, first_tensor
from .removed import Removed
from .shared_state import refresh_shared_state, shared_module, swapped_layers


@dataclass
class PlannedSite:
    """One layer of a plan: its name, the port that will replace it, and what becomes of the host's parameters.

    before: the module that is replaced. kept, new, dropped: names of parameters, as `Port.parameter_changes` has them.
    """

    name: str
    layer: Port
    before: nn.Module
    kept: list[str]
    new: list[str]
    dropped: list[str]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lists = (("kept", self.kept), ("new", self.new), ("dropped", self.dropped), ("note", self.notes))
        changes = "; ".join(f"{label} {', '.join(items)}" for label, items in lists if items)
        return f"{self.name} ({type(self.layer).__name__}, {self.layer.mixer.site.grid}): {changes}"


@dataclass
class SwapPlan:
    """What a swap would do. The model is not changed before `apply`."""

    model: nn.Module
    mixer: MixerConfig
    sites: list[PlannedSite]
    example: Tensor

    def __str__(self) -> str:
        head = f"{spell(self.mixer)} into {len(self.sites)} layers of {type(self.model).__name__}"
        return "\n".join([head, *(f"  {site}" for site in self.sites)])

    def warn(self) -> None:
        """Warn about what the host does in training and the mechanism does not: dropout of attention weights."""
        for rate in sorted({_dropout(site.before) for site in self.sites if self.mixer.uses} - {0.0}):
            warnings.warn(f"{spell(self.mixer)}: dropout {rate} of attention weights is left out", stacklevel=3)

    def apply(self, faithful: bool = True) -> nn.Module:
        """Install the layers, with the weights that the host has now; returns the model.

        faithful: a new convolution (`dwc=`) is initialised with zeros, so that it changes nothing at first; False
        initialises it as PyTorch does, for training from scratch. A forward pass of the example checks that every layer
        runs; if it fails, the model is left unchanged.
        Raises: SwapError if a layer does not run, or was changed since the plan was made.
        """
        for site in self.sites:
            if self.model.get_submodule(site.name) is not site.before:
                raise SwapError(f"{site.name} changed since the plan was made; make a new plan")
        for site in self.sites:
            _transfer(site, faithful)
            self.model.set_submodule(site.name, site.layer)
        refresh_shared_state(self.model)
        try:
            shapes = input_shapes(self.model, {site.name: site.layer for site in self.sites}, self.example)
            unused = [site.name for site in self.sites if site.name not in shapes]
            if unused:
                raise SwapError(f"the forward pass did not enter {', '.join(unused)}")
        except Exception:
            for site in self.sites:
                self.model.set_submodule(site.name, site.before)
            refresh_shared_state(self.model)
            raise
        for site in self.sites:
            before, host = site.before, site.layer.host
            site.layer.drop_host_weights(before.host_state() if isinstance(before, Port) else host.state_dict())
        return self.model


def plan_swap(
    model: nn.Module,
    mixer: MixerConfig | str,
    where: str = "*",
    example: Tensor | None = None,
    ports: Sequence[type[Port]] = (),
) -> SwapPlan:
    """What `swap` would do to a model; runs one forward pass and does not change the model.

    mixer: a configuration or its spelling, "MiTA(m=25)". where: a glob on layer names, such as "blocks.[0-3].*"; "*" is
    every self-attention. example: an input (1, C, H, W), needed where the model does not name its image size. ports:
    for attention classes of your own (see `Port`); not needed where the class names its port.
    Raises: SwapError if nothing matches, a layer cannot be read or its weights are wrapped by an adapter (LoRA), which
    a swap would lose; UnsupportedError if the host passes masks that the mechanism cannot apply; ConfigError if mixer
    is no configuration.
    """
    config = parse_mixer(mixer) if isinstance(mixer, str) else mixer
    if not isinstance(model, nn.Module):
        raise ConfigError(f"swap takes a model, a torch module, not {model!r}; create_model(name, mixer) makes one")
    if not isinstance(config, MixerConfig):
        raise ConfigError(f"mixer is a configuration such as Softmax() or MiTA(m=25), not {mixer!r}")
    return plan_layers(model, config, matching_layers(model, where, ports), example, ports=ports)


def plan_layers(
    model: nn.Module,
    mixer: MixerConfig,
    names: list[str],
    example: Tensor | None = None,
    grids: Mapping[str, Grid] | None = None,
    ports: Sequence[type[Port]] = (),
) -> SwapPlan:
    """`plan_swap` for layers by their exact names.

    grids: layer -> the grid to build the mechanism for, instead of the one in the forward pass. Raises: as `plan_swap`.
    """
    example = example_input(model) if example is None else example
    layers = attention_layers(model, ports)
    if unknown := [name for name in names if name not in layers]:
        raise SwapError(f"{type(model).__name__} has no attention that a port knows at {', '.join(unknown)}")
    order = {name: index for index, name in enumerate(layers)}
    for name in names:
        _check_supported(layers[name], model.get_submodule(name), name, mixer)
    forward_grids = layer_grids(model, {name: layers[name] for name in names}, example)
    shared = mixer.shared()
    if shared is not None:
        parameter = next(model.parameters())
        shared = shared.to(parameter.device, parameter.dtype)
    planned = []
    for name in names:
        module, port = model.get_submodule(name), layers[name]
        host = original_attention(module)
        grid, source = forward_grids[name]
        site = port.site(host, (grids or {}).get(name, grid), name, order[name])
        # the plan works on a copy
        host = module.restored_attention() if isinstance(module, Port) else copy.deepcopy(module)
        layer = port(host, mixer, site, shared)
        layer.source = source
        kept, new, dropped = layer.parameter_changes()
        planned.append(PlannedSite(name, layer, module, kept, new, dropped, _notes(host, mixer, site.qkv_bias)))
    return SwapPlan(model, mixer, planned, example)


def swap(
    model: nn.Module,
    mixer: MixerConfig | str,
    where: str = "*",
    example: Tensor | None = None,
    ports: Sequence[type[Port]] = (),
) -> nn.Module:
    """Put a mechanism in the place of a model's attention, in place; returns the model. See `plan_swap`."""
    plan = plan_swap(model, mixer, where, example, ports)
    plan.warn()
    return plan.apply()


def remove(model: nn.Module, where: str = "*", example: Tensor | None = None) -> nn.Module:
    """Replace each matching attention by zeros, in place: only the residual branch remains. `restore` undoes it."""
    return swap(model, Removed(), where, example)


def restore(model: nn.Module, where: str = "*") -> nn.Module:
    """Put the host's own attention back, in place, with the current weights where they fit; returns the model.

    Raises: SwapError if no swapped layer matches, or an adapter (LoRA) is around the weights of one.
    """
    names = swapped_layers(model, where)
    for name in names:
        _check_plain(model.get_submodule(name), name)
    for name in names:
        model.set_submodule(name, model.get_submodule(name).restored_attention())  # type: ignore[operator]
    refresh_shared_state(model)
    return model


def retune(model: nn.Module, where: str = "*", **changes: Any) -> nn.Module:
    """Change fields of the mechanisms of a trained model, in place, such as retune(model, m=49, k=49).

    Every parameter stays the same object. Raises: SwapError if no swapped layer matches or an adapter (LoRA) is around
    the weights of one, ConfigError for an unknown field or for one that would change the parameters.
    """
    mixers = []
    for name in swapped_layers(model, where):
        layer: Any = model.get_submodule(name)
        _check_plain(layer, name)
        old, config = layer.mixer, layer.mixer.config
        names = [item.name for item in fields(config)]
        for key in changes:
            if key not in names:
                raise ConfigError(f"{type(config).__name__} has no {key!r}; {nearest(key, names)}")
        new = layer.new_mixer(replace(config, **changes), old.site, shared_module(layer))
        trained = {key: value.requires_grad for key, value in old.named_parameters()}
        for key, value in new.named_parameters():  # load_state_dict keeps the target's flags
            value.requires_grad_(trained.get(key, True))
        try:
            new.load_state_dict(old.state_dict(keep_vars=True), assign=True)
        except RuntimeError as error:
            arguments = ", ".join(f"{key}={value}" for key, value in changes.items())
            raise ConfigError(
                f"retune({arguments}) would change the parameters of {name}; use swap for that"
            ) from error
        mixers.append((layer, new.train(old.training)))
    for layer, new in mixers:
        layer.register_module(MIXER_CHILD, new)
    return model


# checks


def _check_supported(port: type[Port], module: nn.Module, name: str, mixer: MixerConfig) -> None:
    """Raises: SwapError for altered weights, UnsupportedError if the port or the mechanism cannot be used here."""
    _check_plain(module, name)
    missing = sorted(port.mask_kinds - mixer.masks) if mixer.uses else []
    if reason := port.refusal(original_attention(module)):
        raise UnsupportedError(f"{port.__name__} cannot replace {name}: {reason}")
    if missing:
        raise UnsupportedError(f"{name} passes a {', '.join(missing)} mask, which {spell(mixer)} cannot apply")


def _check_plain(layer: nn.Module, name: str) -> None:
    """Raises: SwapError if a tool has wrapped or replaced the weights of a layer (LoRA, pruning, quantisation)."""
    if isinstance(layer, Port):
        reason = alteration(layer.mixer, {package_name(part) for part in parts(layer.mixer.config)}, skip="operator")
    else:
        reason = alteration(layer)
    if reason:
        raise SwapError(
            f"{name}: {reason}, whose weights would be lost; merge or remove it first (merge_and_unload() of PEFT, "
            "prune.remove() or remove_parametrizations() of torch), or leave the layer out with where="
        )


def _notes(host: Any, mixer: MixerConfig, bias: bool) -> list[str]:
    notes = []
    if (rate := _dropout(host)) > 0:
        notes.append(f"dropout {rate} of attention weights is left out")
    if bias and "q" in mixer.uses:
        notes.append("q, k, v keep the host's bias (a hidden content term)")
    if isinstance(mixer, StaticConfig) and mixer.init in FROM_TEACHER:
        notes.append("static keys start at random until regard.calibrate(model, teacher, batches) sets them")
    return notes


def _dropout(host: nn.Module) -> float:
    """The rate of dropout of attention weights in a library's module."""
    values = [getattr(host, name, 0.0) for name in ("attn_drop", "attention_dropout", "dropout")]
    rates = (value.p if isinstance(value, nn.Dropout) else value for value in values)
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


# weights


def _transfer(site: PlannedSite, faithful: bool) -> None:
    """Copy weights into the new layer: the host's, and those of the previous mixer that mean the same."""
    layer, before = site.layer, site.before
    state = before.host_state() if isinstance(before, Port) else dict(before.state_dict())
    example = first_tensor(before)
    layer.to(example.device, example.dtype)
    filled = layer.load_host_state(state)
    if isinstance(before, Port):
        filled |= _copy_same_parameters(before, layer)
    dwc = getattr(layer.mixer, "dwc", None)
    if faithful and isinstance(dwc, nn.Conv2d) and "dwc.weight" not in filled:
        for value in dwc.parameters():
            nn.init.zeros_(value)
    frozen = {name for name, value in before.named_parameters() if not value.requires_grad}
    if isinstance(before, Port):  # a new parameter may have the name of an old one that meant something else
        copied = {f"{MIXER_CHILD}.{name}" for name in filled}
        further = {name for name in frozen if name in copied or not name.startswith(f"{MIXER_CHILD}.")}
        layer.freeze(before.frozen_parameters(), further)
    else:
        layer.freeze(frozen, set())


@torch.no_grad()
def _copy_same_parameters(before: Port, layer: Port) -> set[str]:
    """Copy the parameters of the old mixer that mean the same in the new one; returns their names."""
    old, new = before.mixer, layer.mixer
    a, b = old.config, new.config
    same_roles = getattr(a, "roles", a.uses) == getattr(b, "roles", b.uses)
    same = {
        "qkv": same_roles and getattr(a, "projection", None) == getattr(b, "projection", None),
        "operator": type(a) is type(b),
    }
    source, target = old.state_dict(), new.state_dict()
    keys = {
        key
        for key, value in target.items()
        if key in source and source[key].shape == value.shape and same.get(key.split(".")[0], True)
    }
    for key in keys:
        target[key].copy_(source[key])
    old_shared, new_shared = shared_module(before), shared_module(layer)
    if same["qkv"] and old_shared is not None and new_shared is not None:
        new_shared.load_state_dict(old_shared.state_dict())
        for value, old_value in zip(new_shared.parameters(), old_shared.parameters(), strict=True):
            value.requires_grad_(old_value.requires_grad)
    return keys
