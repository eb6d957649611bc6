"""Attention that computes something else than the class that a port knows: subclasses, and a replaced `forward`.

A port repeats the forward pass of the class that it replaces, so a swap would change what such a layer computes. It is
left as it is, unless the user names a port for it.
"""

import inspect
from fnmatch import fnmatchcase

from torch import nn

from .layer import Port
from .ports import PORTS


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module runs the `forward` that its class defines, and not one that was put in its place."""
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    forward = inspect.unwrap(vars(owner)["forward"])  # libraries decorate their own
    named = (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", ""))
    return "forward" not in vars(module) and named == (owner.__module__, f"{owner.__qualname__}.forward")


def changed_attention(model: nn.Module, layers: dict[str, type[Port]], where: str = "*") -> dict[str, str]:
    """The attention that a glob names and no port does, with the reason. layers: those that a port knows."""
    found, inside = {}, tuple(f"{name}." for name in layers)
    for name, module in model.named_modules():
        if not name or name in layers or name.startswith(inside) or not fnmatchcase(name, where):
            continue
        kind = type(module).__qualname__
        if any(port.matches(module) and port.belongs(model, name) for port in PORTS):
            if not has_own_forward(module):
                found[name] = f"the forward of {kind} was replaced"
        elif base := next((base for base in type(module).__mro__[1:] if _is_known(module, base)), None):
            found[name] = f"{kind} is a subclass of {base.__qualname__}"
    return found


def left_out_text(changed: dict[str, str]) -> str:
    """One sentence about the layers of `changed_attention`."""
    named = "; ".join(
        f"{', '.join(name for name, its in changed.items() if its == reason)} ({reason})"
        for reason in dict.fromkeys(changed.values())
    )
    return f"{named} is left as it is, since it may compute something else; a port for it goes into ports=[...]"


def _is_known(module: nn.Module, base: type) -> bool:
    """Whether a port would know the module if it were of a base class."""
    if not issubclass(base, nn.Module) or base is nn.Module or inspect.isabstract(base):
        return False
    twin = object.__new__(base)
    twin.__dict__ = vars(module)
    return any(port.matches(twin) for port in PORTS)
