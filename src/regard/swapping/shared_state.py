"""State of a whole model that its swapped layers need: shared parameters, grid hooks, names without weight decay."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from regard.core import ConfigError, SwapError
from regard.core.validation import short_repr

from .grid_source import GridSource, watched_module
from .hooks import move_hooks
from .host_names import MIXER_CHILD
from .layer import Port
from .ports.hugging_face import mark_configuration


def check_where(where: object) -> None:
    """Raises: ConfigError unless this is a glob on layer names, a string."""
    if not isinstance(where, str):
        raise ConfigError(f"where is a glob on layer names, such as 'blocks.[0-3].*', not {short_repr(where)}")


def swapped_layers(model: nn.Module, where: str = "*") -> list[str]:
    """Names of the swapped layers that match. Raises: SwapError if there are none; ConfigError as `check_where`."""
    check_where(where)
    all_names = [name for name, module in model.named_modules() if isinstance(module, Port)]
    names = [name for name in all_names if fnmatchcase(name, where)]
    if not names:
        present = f"swapped are {', '.join(all_names)}" if all_names else "nothing is swapped"
        raise SwapError(f"no swapped layer matches {where!r} in {type(model).__name__}; {present}")
    return names


def shared_module(layer: nn.Module) -> nn.Module | None:
    """The module whose parameters a swapped layer shares with others (the codes of FSNE); None if there is none."""
    children = set(layer._modules[MIXER_CHILD].modules())  # type: ignore[union-attr]
    for module in children:
        for shared in module.__dict__.get("_shared") or ():
            if isinstance(shared, nn.Module) and shared not in children:
                return shared
    return None


def is_grid_hook(hook: Any) -> bool:
    """Whether a forward hook records a grid."""
    return isinstance(getattr(hook, "__self__", None), GridSource)


def present_source(module: nn.Module) -> GridSource | None:
    """The grid source that watches a module; None if none does."""
    return next((hook.__self__ for hook in module._forward_hooks.values() if is_grid_hook(hook)), None)  # type: ignore


class NoDecay:
    """`model.no_weight_decay()`: the host's own names and those of the mixers.

    replaced: the attribute of the model whose place it takes, None where only the class has the method.
    """

    replaced: Any = None

    def __init__(self, names: set[str], replaced: Any = None) -> None:
        self.names, self.replaced = frozenset(names), replaced

    def __call__(self) -> set[str]:
        return set(self.names)


def refresh_shared_state(model: nn.Module) -> None:
    """Set shared modules, grid hooks and names without weight decay as the current layers need them, in place.

    Called after every swap, removal and restoration.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Port)}
    _register_shared(model, layers)
    _hook_sources(model, layers)
    mark_configuration(model)
    own = model.__dict__.pop("no_weight_decay", None)
    if own := own.replaced if isinstance(own, NoDecay) else own:
        model.no_weight_decay = own
    if layers:
        model.no_weight_decay = NoDecay(_names_without_decay(model, layers), own)  # type: ignore[assignment]


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others, wherever these are children, with their hooks, in place."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
    for old, new in replacements.items():
        move_hooks(old, new)
        if isinstance(old, Port):
            old.source.users.discard(old)
    refresh_shared_state(model)


def _names_without_decay(model: nn.Module, layers: Mapping[str, Port]) -> set[str]:
    host_method = getattr(model, "no_weight_decay", None)
    names = set(host_method()) if callable(host_method) else set()
    modules: dict[str, nn.Module] = {f"{name}.{MIXER_CHILD}": layer.mixer for name, layer in layers.items()}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "regard_shared":
            modules[name] = module
    for start, top in modules.items():
        for name, module in top.named_modules():
            without_decay = getattr(module, "no_weight_decay", None)
            if callable(without_decay):
                names |= {".".join(filter(None, (start, name, item))) for item in without_decay()}
    return names


def shared_modules(model: nn.Module, layers: Mapping[str, Port]) -> dict[str, nn.Module]:
    """What layers share, once, by its path: on the model, or, where it is a container, on the first layer with it."""
    users: dict[nn.Module, str] = {}
    for name, layer in layers.items():
        if (shared := shared_module(layer)) is not None:
            users.setdefault(shared, name)
    if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return {f"{name}.regard_shared.0": shared for shared, name in users.items()}
    return {f"regard_shared.{index}": shared for index, shared in enumerate(users)}


def _register_shared(model: nn.Module, layers: Mapping[str, Port]) -> None:
    for module in [model, *layers.values()]:
        module._modules.pop("regard_shared", None)
    for path, shared in shared_modules(model, layers).items():
        owner: Any = model.get_submodule(path.rpartition("regard_shared")[0].rstrip("."))
        if "regard_shared" not in owner._modules:
            owner.add_module("regard_shared", nn.ModuleList())
        owner.regard_shared.append(shared)


def _hook_sources(model: nn.Module, layers: Mapping[str, Port]) -> None:
    """One forward hook for each grid source in use, and no other.

    A layer whose watched module is outside of `model`, a part of a larger model, keeps its source.
    """
    for name, layer in layers.items():
        watched = watched_module(model, name, layer.watch) if layer.watch else None
        if watched is not None:
            present = present_source(watched)
            if present is None:
                watched.register_forward_hook(layer.source.record)
            elif present is not layer.source:
                layer.source.users.discard(layer)
                layer.source = present
        layer.source.users.add(layer)
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if is_grid_hook(hook) and not hook.__self__.users:  # type: ignore[attr-defined]
                del module._forward_hooks[key]
