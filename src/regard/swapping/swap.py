"""Swapping: a mechanism in the place of a model's attention, with the model's weights and parameter names kept."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from regard.core import ConfigError, Grid, MixerConfig, SwapError, nearest
from regard.core.validation import short_repr
from regard.mixers.spelling import parse_mixer, spell
from regard.mixers.static_keys.keys import FROM_TEACHER

from . import checks, inspect, kept_parameters
from .adapters import adapters, remove_adapters
from .changed_attention import changed_attention, left_out_text
from .hooks import empty_hooks, lost_hooks, lost_marks, move_hooks
from .host_names import MIXER_CHILD
from .inspect import Example, LayerCall
from .layer import Port, Ports
from .layer_plan import LayerPlan, PlanSource, is_layer_plan, mixers_by_layer, read_layer_plan
from .removed import Removed
from .shared_state import replace_modules, shared_module, shared_modules, swapped_layers
from .transaction import unchanged_on_error
from .transfer import host_adapters, movable_adapters, same_parameters, shared_sources, transfer, transfer_shared


@dataclass
class PlannedSite:
    """One layer of a plan: what will replace it, and what becomes of its parameters, hooks and adapters.

    - layer: the port that will be in its place; before: the module that is there now.
    - call: how the model called it in the plan's forward pass.
    - kept, new, dropped: names of parameters, as `Port.parameter_changes` has them; what the layers of the swap share
      is new in the first, by its name in the model.
    - new_objects: names, in `model.named_parameters()` after the swap, of parameters that an optimizer from before the
      swap does not have. These are new ones, and kept rows of a fused matrix; all others are the same objects.
    - lost_hooks: hooks and attributes of parts that the new layer does not have; all others move to it.
    - adapters: projections whose adapters of PEFT go on working.
    - lost_adapters: projections that the new layer does not have in full. An adapter around them would be lost, so
      `SwapPlan.apply` refuses them.
    """

    name: str
    layer: Port
    before: nn.Module
    call: LayerCall
    kept: list[str]
    new: list[str]
    dropped: list[str]
    notes: list[str] = field(default_factory=list)
    new_objects: list[str] = field(default_factory=list)
    lost_hooks: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    lost_adapters: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lists = (("kept", self.kept), ("new", self.new), ("dropped", self.dropped))
        further = (
            ("adapters kept", self.adapters), ("adapters lost", self.lost_adapters), ("note", self.notes),
            ("hooks left behind", self.lost_hooks),
        )  # fmt: skip
        changes = "; ".join(f"{label} {', '.join(items)}" for label, items in (*lists, *further) if items)
        return f"{self.name} ({type(self.layer).__name__}, {self.layer.mixer.site.grid}): {changes}"


@dataclass
class SwapPlan:
    """What a swap would do. The model is not changed before `apply`. left_out: see `changed_attention`."""

    model: nn.Module
    mixer: MixerConfig
    sites: list[PlannedSite]
    example: Example
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{spell(self.mixer)} into {len(self.sites)} layers of {type(self.model).__name__}"
        others = [f"  {left_out_text(self.left_out)}"] if self.left_out else []
        return "\n".join([head, *(f"  {site}" for site in self.sites), *others])

    def warn(self) -> None:
        """Warn about what a swap may lose unnoticed.

        That is dropout of attention weights, which the mechanism leaves out, trained parts of the host's own mechanism,
        such as a reduction of keys, hooks that do not move, parameters of the user's own attention that the new layer
        does not have, parameters that the file of a loaded model did not have, and attention that was left out since
        it was changed.
        """
        if self.left_out:
            warnings.warn(left_out_text(self.left_out), stacklevel=3)
        sites = self.sites if self.mixer.uses else []
        if number := sum(site.layer.mixer.drops_bias for site in sites):
            warnings.warn(
                f"{spell(self.mixer)}: position biases of {number} layers are left out, so that the output changes "
                "until the model is trained", stacklevel=3,
            )  # fmt: skip
        rates = {site.layer.weights_dropout(inspect.original_attention(site.before)) for site in sites}
        for rate in sorted(rates - {0.0}):
            warnings.warn(f"{spell(self.mixer)}: dropout {rate} of attention weights is left out", stacklevel=3)
        if self.mixer.uses and (text := checks.left_out([(site.layer, site.dropped) for site in self.sites])):
            warnings.warn(f"{spell(self.mixer)}: {text}", stacklevel=3)
        for text in (checks.describe_unmapped(site.name, site.layer, site.new, site.dropped) for site in self.sites):
            if text:  # the layers of a model are alike, so the first is enough
                warnings.warn(text, stacklevel=3)
                break
        checks.warn_of_lost_hooks({site.name: site.lost_hooks for site in self.sites})
        checks.warn_of_unsaved({site.name: checks.unsaved(site.before, site.dropped) for site in self.sites})

    def layers(self) -> dict[str, Port]:
        """The new layers by name with copies of their weights, outside of the model, which is not changed."""
        for site in self.sites:
            transfer(site.before, site.layer, faithful=True)
        return copy.deepcopy({site.name: site.layer for site in self.sites})  # at once: what they share stays shared

    def apply(self, faithful: bool = True) -> nn.Module:
        """Install the layers, with the weights that the host has now; returns the model.

        Parameters that are kept in full stay the same objects; hooks move to the new layers.
        faithful: a new convolution (`dwc=`) is initialised with zeros, so that it changes nothing at first; False
        initialises it as PyTorch does, for training from scratch. Every new layer runs once, on the input that the old
        one had in the plan's forward pass. After any exception, Ctrl-C too, the model is as it was; no other thread may
        use it meanwhile.
        Raises: SwapError if a layer does not run, was changed since the plan was made, or would lose an adapter.
        """
        return unchanged_on_error(self.model, lambda: self._apply(faithful))

    def _apply(self, faithful: bool) -> nn.Module:
        for site in self.sites:
            if self.model.get_submodule(site.name) is not site.before:
                raise SwapError(f"{site.name} changed since the plan was made; make a new plan")
            if site.lost_adapters:
                raise checks.lost_adapters_error(site.name, site.lost_adapters)
        for site in self.sites:
            transfer(site.before, site.layer, faithful)
        replaced = {site.before: site.layer for site in self.sites}
        transfer_shared(self.model, replaced)
        replace_modules(self.model, replaced)
        for site in self.sites:
            site.call.check(site.layer, site.name)
        return self.model


def plan_swap(
    model: nn.Module, mixer: MixerConfig | str, where: str = "*", example: Example | None = None,
    ports: Ports = (), *, reinitialise: bool = False,
) -> SwapPlan:  # fmt: skip
    """What `swap` would do to a model; runs one forward pass and does not change the model.

    mixer: a configuration or its spelling, "MiTA(m=25)". where: a glob on layer names, such as "blocks.[0-3].*"; "*" is
    every self-attention. example: an input (1, C, H, W), needed where the model does not name its image size, or all
    arguments by name, {"pixel_values": ..., "input_ids": ...}, where images are not enough. ports: for attention
    classes of your own (see `Port`); not needed where the class names its port.
    Raises: SwapError if nothing matches, a layer cannot be read, a tool has wrapped its weights (pruning, weight norm,
    quantisation), or the model is wrapped for distributed training; UnsupportedError if the host passes masks that the
    mechanism cannot apply; ConfigError if mixer is no configuration.
    """
    config = parse_mixer(mixer) if isinstance(mixer, str) else mixer
    if not isinstance(model, nn.Module):
        raise ConfigError(f"swap takes a torch module, not {short_repr(model)}; create_model(name, mixer) makes one")
    if not isinstance(config, MixerConfig):
        removing = "; regard.remove(model) takes attention out" if mixer is None else ""
        raise ConfigError(f"mixer is a configuration such as Softmax() or MiTA(m=25), not {mixer!r}{removing}")
    names = inspect.matching_layers(model, where, ports, reinitialise=reinitialise)
    plan = plan_layers(model, config, names, example, ports=ports)
    for site in plan.sites:
        site.call.check(site.layer, site.name)
    plan.left_out = changed_attention(model, inspect.attention_layers(model, ports, reinitialise=True), where)
    return plan


def plan_layers(
    model: nn.Module, mixer: MixerConfig, names: list[str], example: Example | None = None,
    grids: Mapping[str, Grid] | None = None, ports: Ports = (), shared: nn.Module | None = None,
) -> SwapPlan:  # fmt: skip
    """`plan_swap` for layers by their exact names.

    grids: layer -> the grid to build the mechanism for, instead of the one in the forward pass. shared: what the layers
    share with others of the model; None makes it anew. Raises: as `plan_swap`.
    """
    return unchanged_on_error(model, lambda: _plan(model, mixer, names, example, grids or {}, ports, shared))


def _plan(
    model: nn.Module, mixer: MixerConfig, names: list[str], example: Example | None, grids: Mapping[str, Grid],
    ports: Ports, shared: nn.Module | None,
) -> SwapPlan:  # fmt: skip
    checks.check_memory(model)
    example = inspect.example_input(model) if example is None else example
    layers = inspect.attention_layers(model, ports, reinitialise=True)
    if unknown := [name for name in names if name not in layers]:
        raise SwapError(f"{type(model).__name__} has no attention that a port knows at {', '.join(unknown)}")
    order = {name: index for index, name in enumerate(layers)}
    kept_parameters.check_wrapper(model, names)
    if mixer.uses:
        checks.check_patch_dropout(model)
    hosts = {name: _host_copy(model.get_submodule(name), name) for name in names}
    for name, host in hosts.items():
        checks.check_supported(layers[name], host, name, mixer)
    forward_grids = inspect.layer_grids(model, {name: layers[name] for name in names}, example)
    shared = mixer.shared() if shared is None else shared
    if shared is not None:
        parameter = next(model.parameters())
        shared = shared.to(parameter.device, parameter.dtype)
    planned, uses = [], kept_parameters.parameter_uses(model)
    for name in names:
        module, port = model.get_submodule(name), layers[name]
        grid, source, call = forward_grids[name]
        host = hosts[name]
        planned_grid = grids.get(name, grid)
        try:
            site = port.site(host, planned_grid, name, order[name])
            layer = port(host, mixer, site, shared)
        except AttributeError as error:  # a part that a port reads was exchanged for one of another kind
            raise SwapError(
                f"{name} has not the parts that {port.__name__} reads ({error}): leave it out with where=, or pass a "
                "port for it as ports=[...]"
            ) from error
        checks.check_linears(layer, host, name)
        layer.source, layer.planned_grid, layer.calls = source, planned_grid, call.times
        notes = checks.plan_notes(port, host, mixer, site.qkv_bias)
        planned.append(_planned_site(uses, name, module, layer, call, notes))
    _name_shared(model, planned)
    return SwapPlan(model, mixer, planned, example)


def _host_copy(module: nn.Module, name: str) -> nn.Module:
    """A copy of the host's attention without hooks, adapters and values of parameters, on which a plan works.

    Raises: SwapError if a tool has changed its weights, or it cannot be copied.
    """
    checks.check_plain(module, name)
    if isinstance(module, Port):
        return module.restored_attention()
    try:
        empty = kept_parameters.empty_caches(module) | kept_parameters.empty_parameters(module)
        host = copy.deepcopy(module, empty_hooks(module) | empty)
    except Exception as error:  # copying calls whatever the module holds
        raise SwapError(f"{name} cannot be copied, nor restored: {error}; leave it out with where=") from error
    remove_adapters(host)
    return host


def _planned_site(
    uses: Mapping[int, int], name: str, before: nn.Module, layer: Port, call: LayerCall, notes: list[str]
) -> PlannedSite:
    """What becomes of the parameters and hooks of one layer. Raises: SwapError for parameters tied to others."""
    kept, new, dropped = layer.parameter_changes()
    if unsaved := checks.unsaved(before, dropped):
        notes = [*notes, f"as in a new model, since they were not saved: {', '.join(unsaved)}"]
    layer.unsaved = sorted(set(getattr(before, "unsaved", ())) - set(unsaved))
    same = same_parameters(before, layer)
    kept, new = [*kept, *(each for each in new if each in same)], [each for each in new if each not in same]
    moved, lost = movable_adapters(before, layer)
    kept_parameters.check_tied(
        uses, name, before, [*same.values(), *(each for adapter in moved.values() for each in adapter.parameters())]
    )
    own = [own for own, _ in layer.named_parameters(remove_duplicate=False)]
    new_objects = [f"{name}.{each}" for each in own if each not in same]
    hooks = lost_hooks(before, layer, moved) + lost_marks(before, same.values())
    return PlannedSite(name, layer, before, call, kept, new, dropped, notes, new_objects, hooks, list(moved), lost)


def _name_shared(model: nn.Module, sites: list[PlannedSite]) -> None:
    """Add what the new layers share, such as the codes of FSNE, to the new parameters of the first."""
    new = {site.name: site.layer for site in sites}
    modules = {name: new.get(name, module) for name, module in model.named_modules()}
    layers = {name: module for name, module in modules.items() if isinstance(module, Port)}
    for path, module in shared_modules(model, layers).items():
        if sites and module is shared_module(sites[0].layer):
            names = [f"{path}.{key}" for key, _ in module.named_parameters()]
            sites[0].new += names
            if not shared_sources(model, {site.before: site.layer for site in sites})[1]:
                sites[0].new_objects += names


def swap(
    model: nn.Module, mixer: MixerConfig | PlanSource, where: str = "*", example: Example | None = None,
    ports: Ports = (), *, reinitialise: bool = False,
) -> nn.Module:  # fmt: skip
    """Put a mechanism in the place of a model's attention, in place; returns the model. See `plan_swap`.

    mixer: also a plan of layers, such as {"blocks.0.attn": "SKA()", "blocks.[1-3].attn": MiTA(m=25, k=25)}, its text
    "blocks.0.attn=SKA(); ...", or the path of a file that `regard advise` wrote; None removes a layer's attention. A
    full name also replaces attention that no mechanism computes, with a warning; reinitialise lets globs do so too.
    After any exception, Ctrl-C too, the model is as it was. No other thread may use the model meanwhile.
    """
    if is_layer_plan(mixer):
        layer_plan = read_layer_plan(cast(PlanSource, mixer))
        return _swap_by_layer(model, layer_plan, where, example, ports, reinitialise)
    plan = plan_swap(model, cast(MixerConfig | str, mixer), where, example, ports, reinitialise=reinitialise)
    plan.warn()
    return plan.apply()


def _swap_by_layer(
    model: nn.Module, plan: LayerPlan, where: str, example: Example | None, ports: Ports, reinitialise: bool,
) -> nn.Module:  # fmt: skip
    """Swap by a plan of layers, all or nothing. Raises: also ConfigError for `where`, since the plan names layers."""
    if where != "*":
        raise ConfigError(f"a plan names its layers: leave where={where!r} out")
    layers = inspect.plannable_layers(_check_model(model), plan, ports, reinitialise=reinitialise)
    mixers = mixers_by_layer(plan, list(layers))
    here = [name for name in mixers if not isinstance(model.get_submodule(name), Port)]
    lost = {name: layers[name].loses for name in here if layers[name].loses}
    if lost and not reinitialise:
        reasons = " and ".join(dict.fromkeys(lost.values()))
        warnings.warn(f"{', '.join(lost)}: {reasons} is lost, so the plan's layers have to be trained", stacklevel=3)
    changed = changed_attention(model, layers)
    if named := {name: changed[name] for name in changed if any(fnmatchcase(name, pattern) for pattern in plan)}:
        warnings.warn(left_out_text(named), stacklevel=3)
    groups: dict[MixerConfig, list[str]] = {}
    for name, mixer in mixers.items():
        groups.setdefault(mixer, []).append(name)
    plans = [plan_layers(model, mixer, names, example, ports=ports) for mixer, names in groups.items()]
    for part in plans:
        part.warn()

    def apply() -> nn.Module:
        for part in plans:
            part.apply()
        return model

    return unchanged_on_error(model, apply)


def remove(model: nn.Module, where: str = "*", example: Example | None = None, *, ports: Ports = ()) -> nn.Module:
    """Replace each matching attention by zeros, in place: only the residual branch remains. `restore` undoes it.

    ports: as for `swap`.
    """
    return swap(model, Removed(), where, example, ports=ports)


def restore(model: nn.Module, where: str = "*") -> nn.Module:
    """Put the host's own attention back, in place, with the current weights where they fit; returns the model.

    Parameters that the swapped layer has in full stay the same objects, with the adapters around them, and hooks move
    back; a warning names those that cannot, and parameters that the file of a loaded model did not have. After any
    exception, Ctrl-C too, the model is as it was.
    Raises: SwapError if no swapped layer matches, a tool has wrapped the weights of one, an adapter is around weights
    that the host does not have, or the model is wrapped for distributed training.
    """
    return unchanged_on_error(_check_model(model), lambda: _restore(model, where))


def _restore(model: nn.Module, where: str) -> nn.Module:
    names = swapped_layers(model, where)
    kept_parameters.check_wrapper(model, names)
    replacements: dict[nn.Module, nn.Module] = {}
    lost = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        checks.check_plain(layer, name)
        host, own = layer.restored_attention(), host_adapters(layer)
        if others := [path for path, adapter in adapters(layer.mixer).items() if adapter not in own.values()]:
            raise checks.lost_adapters_error(name, others)
        kept_parameters.set_parameters(host, layer.host_parameters())
        for path, adapter in own.items():
            host.set_submodule(path, adapter)
        lost[name] = lost_hooks(layer, host) + lost_marks(layer, host.parameters())
        replacements[layer] = host
    checks.warn_of_lost_hooks(lost)
    checks.warn_of_unsaved({name: checks.unsaved(model.get_submodule(name)) for name in names})
    replace_modules(model, replacements)
    return model


def retune(model: nn.Module, where: str = "*", **changes: Any) -> nn.Module:
    """Change fields of the mechanisms of a trained model, in place, such as retune(model, m=49, k=49).

    Every parameter stays the same object, and hooks move to the new modules. After any exception, Ctrl-C too, the model
    is as it was. Raises: SwapError if no swapped layer matches or a tool has wrapped the weights of one, ConfigError
    for an unknown field or for one that would change the parameters.
    """
    return unchanged_on_error(_check_model(model), lambda: _retune(model, where, changes))


def _retune(model: nn.Module, where: str, changes: Mapping[str, Any]) -> nn.Module:
    mixers = []
    for name in swapped_layers(model, where):
        layer: Any = model.get_submodule(name)
        checks.check_plain(layer, name)
        old, config = layer.mixer, layer.mixer.config
        names = [item.name for item in fields(config)]
        for key in changes:
            if key not in names:
                raise ConfigError(f"{type(config).__name__} has no {key!r}; {nearest(key, names)}")
        if "host_bias" in changes:
            raise ConfigError("retune cannot bring biases of the host back, or leave them out; use swap for that")
        if "init" in changes and changes["init"] not in FROM_TEACHER:  # which `calibrate` reads
            raise ConfigError("retune keeps every parameter, so init= would change nothing; use swap for a new start")
        new = layer.new_mixer(replace(config, **changes), old.site, shared_module(layer))
        for path, adapter in adapters(old).items():
            new.set_submodule(path, adapter)
        try:
            kept_parameters.take_state(new, old)
        except RuntimeError as error:
            arguments = ", ".join(f"{key}={value}" for key, value in changes.items())
            raise ConfigError(f"retune({arguments}) would change parameters of {name}; use swap for that") from error
        new.drops_bias = old.drops_bias
        _keep_execution(old, new)
        mixers.append((layer, new.train(old.training)))
    for layer, new in mixers:
        move_hooks(layer.mixer, new)
        layer.register_module(MIXER_CHILD, new)
    return model


def _keep_execution(old: Any, new: Any) -> None:
    """Give a new operator the execution that the user set on the old one."""
    execution = getattr(getattr(old, "operator", None), "execution", None)
    if execution is not None:
        new.operator.execution = execution


def _check_model(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model is a torch module, not {short_repr(model)}; create_model(name, mixer) makes one")
    return model
