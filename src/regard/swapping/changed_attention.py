"""Attention that computes something else than the class that a port knows: subclasses, and a replaced `forward`.

A port repeats the forward pass of the class that it replaces, so a swap would change what such a layer computes. It is
left as it is, unless the user names a port for it.
"""

import inspect
import math
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .layer import Port
from .ports import PORTS

DROPOUT = (nn.Dropout, nn.Identity)
WIDTHS = ("head_dim", "key_dim", "dim_head", "dim_head_qk")
"""Attributes that hold the width of a head in timm's, torchvision's and transformers' attention."""


def change_of(module: nn.Module) -> str:
    """What of an attention its class did not put there: its forward pass, its scale, its dropout of weights; or ""."""
    kind = type(module).__qualname__
    if not has_own_forward(module):
        return f"the forward of {kind} was replaced"
    if change := _change_of_scale(module):
        return f"the scale of {kind} is {change}"
    for name in ("attn_drop", "proj_drop"):
        if isinstance(drop := getattr(module, name, None), nn.Module) and not isinstance(drop, DROPOUT):
            return f"the {name} of {kind} is a {type(drop).__qualname__}"
    return ""


def _change_of_scale(module: nn.Module) -> str:
    scale = getattr(module, "scale", getattr(module, "scaling", None))
    if isinstance(scale, Tensor):
        return "a tensor"
    width = next((width for name in WIDTHS if (width := getattr(module, name, None))), None)
    qkv, heads = getattr(module, "qkv", None), getattr(module, "num_heads", None)
    if width is None and isinstance(qkv, nn.Linear) and isinstance(heads, int):
        width = qkv.out_features // 3 // heads
    if isinstance(scale, float) and isinstance(width, int) and not math.isclose(scale, width**-0.5):
        return f"{scale:.4g}, not that of heads of width {width}"
    return ""


def named_port(module: nn.Module) -> type[Port] | None:
    """The port that the layer's class itself names."""
    port = type(module).__dict__.get("port")
    return port if isinstance(port, type) and issubclass(port, Port) else None


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward pass is that of the class, or one of its package if the class names its port."""
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    forward = inspect.unwrap(vars(owner)["forward"])  # libraries decorate their own
    named = (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", ""))
    plain = "forward" not in vars(module) and type(module).__call__ is nn.Module.__call__
    package = owner.__module__.partition(".")[0]
    shared = named_port(module) is not None and named[0].partition(".")[0] == package  # `forward = a_function`
    return plain and (shared or named == (owner.__module__, f"{owner.__qualname__}.forward"))


def changed_attention(model: nn.Module, layers: dict[str, type[Port]], where: str = "*") -> dict[str, str]:
    """The attention that a glob names and no port does, with the reason. layers: those that a port knows."""
    found, inside = {}, tuple(f"{name}." for name in layers)
    for name, module in model.named_modules():
        if not name or name in layers or name.startswith(inside) or not fnmatchcase(name, where):
            continue
        kind = type(module).__qualname__
        if named_port(module) or any(port.matches(module) and port.belongs(model, name) for port in PORTS):
            if change := change_of(module):
                found[name] = change
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
