"""Hooks of a replaced module: they move to the module in its place."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from .host_names import MIXER_CHILD
from .layer import Port

KINDS = {
    "_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook", "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook", "_state_dict_hooks": "state_dict hook",
    "_state_dict_pre_hooks": "state_dict pre-hook", "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}  # fmt: skip
"""The attributes of a module that hold its hooks, and what they are called."""
COLLECTING = "transformers.utils.output_capturing"
"""The module of hooks with which transformers collects attention weights, for which a swapped layer raises an error."""
OPTIONS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def lost_hooks(old: nn.Module, new: nn.Module, moved: Collection[str] = ()) -> list[str]:
    """The hooks below `old` that `move_hooks` leaves behind, such as "forward hook record of qkv".

    moved: paths of adapters that will be parts of `new`, with all that they have.
    """
    lost = []
    for path, module, target in _counterparts(old, new):
        if target is module or any(f"{path}.".startswith(f"{each}.") for each in moved):
            continue
        for attribute, kind in KINDS.items():
            for hook in vars(module)[attribute].values():
                left = target is None or _is_bound_below(hook, old)
                if left and not _is_own(hook, module) and getattr(hook, "__module__", "") != COLLECTING:
                    name = getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]
                    lost.append(f"{kind} {name}" + (f" of {path}" if path else ""))
    return lost


def lost_marks(old: nn.Module, kept: Iterable[nn.Parameter]) -> list[str]:
    """Gradient hooks and attributes (`lr_scale`) of the parameters of `old` that are not among those that are kept."""
    stay, lost = {id(parameter) for parameter in kept}, []
    for name, parameter in old.named_parameters():
        if id(parameter) not in stay:
            hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
            own = [f"attribute {key}" for key in vars(parameter) if not key.startswith("_")]
            lost += [f"{what} of {name}" for what in [*(["gradient hook"] if hooks else []), *own]]
    return lost


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks of a module, and of its parts, to the module in its place, and put that into the same mode.

    The new modules get the same dictionaries of hooks, so that a handle that adding a hook returned still removes it.
    """
    for _, module, target in list(_counterparts(old, new)):
        if target is None or target is module:
            continue
        target.training = module.training
        for attribute in (*KINDS, *OPTIONS):
            hooks = vars(module)[attribute]
            if type(target) is not type(module):
                hooks.update(vars(target)[attribute])
            vars(target)[attribute] = hooks
            for key, hook in list(hooks.items()) if attribute in KINDS else ():
                if _is_bound_below(hook, old):
                    del hooks[key]
                elif getattr(hook, "with_module", False):
                    hooks[key] = type(hook)(hook.hook, target)
        target._is_full_backward_hook = module._is_full_backward_hook


def _counterparts(old: nn.Module, new: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Each module of `old` with its path and the module of `new` that means the same, None where there is none."""
    modules = dict(new.named_modules(remove_duplicate=False))
    renamed = {}
    if isinstance(old, Port) and not isinstance(new, Port):
        renamed = {f"{MIXER_CHILD}.{old.mixer_name(path)}": path for path in modules}
    for path, module in old.named_modules():
        if not path:
            yield path, module, new
            continue
        there = path
        if isinstance(new, Port) and not isinstance(old, Port):
            there = f"{MIXER_CHILD}.{new.mixer_name(path)}"
        target = modules.get(renamed.get(there, there))
        same = type(target) is type(module) and getattr(target, "out_features", 0) == getattr(module, "out_features", 0)
        yield path, module, target if same else None


def _function(hook: Any) -> Any:
    """A hook without torch's wrapper, which those have that take the module, and those of copied modules."""
    return getattr(hook, "hook", hook)


def _is_bound_below(hook: Any, module: nn.Module) -> bool:
    """Whether a hook is a method of a module itself or of one of its parts."""
    owner = getattr(_function(hook), "__self__", None)
    return isinstance(owner, nn.Module) and any(owner is part for part in module.modules())


def _is_own(hook: Any, module: nn.Module) -> bool:
    """Whether a module of Regard has given itself a hook; the new one has given itself its own."""
    name = getattr(_function(hook), "__module__", None) or ""
    return name.startswith("regard.") and name in {kind.__module__ for kind in type(module).__mro__}


def empty_hooks(module: nn.Module) -> dict[int, Any]:
    """The memo with which `copy.deepcopy` copies a module without its hooks."""
    attributes = (*KINDS, *OPTIONS)
    return {id(vars(part)[name]): type(vars(part)[name])() for part in module.modules() for name in attributes}


def hooked_modules(model: nn.Module) -> list[str]:
    """The modules of a model with forward hooks that neither Regard nor a library of the model put there."""
    own = {"regard", "torch", "transformers", type(model).__module__.partition(".")[0]}
    return [
        name or "the model"
        for name, module in model.named_modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if any(_home(hook).partition(".")[0] not in own for hook in hooks.values())
    ]


def _home(hook: Any) -> str:
    """The module of Python that a hook is of."""
    return str(getattr(getattr(hook, "func", hook), "__module__", type(hook).__module__))
