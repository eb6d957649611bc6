"""Weights that a tool has wrapped: adapters of PEFT, such as LoRA, which a swap moves, and others, which it refuses."""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from regard.core import Projection

LIBRARIES = frozenset({"torch", "timm", "torchvision", "transformers", "regard"})
BASE = "base_layer"
"""The child of an adapter that is the layer around which it is."""

Value = TypeVar("Value")


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter of PEFT around one linear layer."""
    return package_name(module) == "peft" and isinstance(getattr(module, BASE, None), nn.Linear)


def adapters(module: nn.Module) -> dict[str, nn.Module]:
    """The adapters below a module, by their paths, which are those of the layers that they are around."""
    return {path: part for path, part in module.named_modules() if path and is_adapter(part)}


def remove_adapters(module: nn.Module) -> None:
    """Put the plain layers in the place of the adapters around them, in place; nothing is merged."""
    for path, adapter in adapters(module).items():
        module.set_submodule(path, adapter.get_submodule(BASE))


def adapter_path(paths: Iterable[str], name: str) -> str:
    """The path of the adapter that a parameter belongs to; "" if it belongs to none."""
    return next((path for path in paths if name.startswith(f"{path}.")), "")


def adapted_name(paths: Iterable[str], name: str) -> str:
    """The name of a parameter with the adapters at these paths, by its name without them."""
    path = adapter_path(paths, name)
    return f"{path}.{BASE}{name[len(path) :]}" if path else name


def without_adapters(module: nn.Module, values: Mapping[str, Value]) -> dict[str, Value]:
    """Tensors of a module under the names that they have without its adapters; those of adapters are left out."""
    paths, plain = adapters(module), {}
    for name, value in values.items():
        path = adapter_path(paths, name)
        if not path:
            plain[name] = value
        elif name.startswith(f"{path}.{BASE}."):
            plain[path + name.removeprefix(f"{path}.{BASE}")] = value
    return plain


def alteration(layer: nn.Module, further: Collection[str] = (), skip: str = "", *, replaced: bool = False) -> str:
    """How a tool has wrapped or replaced a linear layer, so that its weights are not in `weight` and `bias`; "" if not.

    It detects pruning, parametrisations such as weight norm, quantisation, and wrappers other than PEFT's adapters.
    further: other packages whose modules are accepted. skip: the name of a child that is not checked.
    replaced: whether the layer itself may have another forward, as where a port of the user's own is for it.
    """
    accepted = LIBRARIES | {package_name(layer), *further}
    for name, part in layer.named_modules():
        if (skip and name.partition(".")[0] == skip) or is_adapter(part):
            continue
        kind, subject = type(part), f"its {name}" if name else "it"
        plain = isinstance(part, nn.Linear) and kind.forward is nn.Linear.forward
        has_linear = any(isinstance(inner, nn.Linear | Projection) for inner in part.modules())
        if is_parametrized(part):
            return f"{subject} is parametrised"
        if "forward" in vars(part) and (name or not replaced):
            return f"{subject} has a forward of its own"
        if (has_linear and not plain and package_name(part) not in accepted) or kind.__module__.startswith("torch.ao."):
            return f"{subject} is of {kind.__module__}.{kind.__qualname__}"
        if hasattr(getattr(part, "weight", None), "__tensor_flatten__"):  # torchao replaces the weight, not the layer
            return f"{subject} has weights of {type(part.weight).__module__}"
        if any(type(hook).__module__.startswith("torch.nn.utils.") for hook in part._forward_pre_hooks.values()):
            return f"{subject} is pruned or normalised by torch.nn.utils"
    return ""


def package_name(value: object) -> str:
    """The package that the type of a value is from, such as "timm"."""
    return type(value).__module__.partition(".")[0]


def class_path(module: nn.Module) -> str:
    """The path of a module's class; of transformers without "transformers.models."."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("transformers.models.")
