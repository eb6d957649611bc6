"""Parameters that stay the same objects when a layer is replaced, and models whose parameters must not change."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.core import SwapError


def owner_of(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module below `module` that has a parameter or buffer, and its name there."""
    path, _, name = key.rpartition(".")
    return module.get_submodule(path), name


def tensor_at(module: nn.Module, key: str) -> Tensor:
    """A parameter or buffer by its path."""
    owner, name = owner_of(module, key)
    value = owner._parameters.get(name)
    return owner._buffers[name] if value is None else value  # type: ignore[return-value]


def set_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put parameters, by their paths, in the place of those that a module has."""
    for key, value in parameters.items():
        owner, name = owner_of(module, key)
        owner._parameters[name] = value


def empty_parameters(module: nn.Module) -> dict[int, nn.Parameter]:
    """The memo with which `copy.deepcopy` copies a module with parameters of any values."""
    return {id(value): nn.Parameter(torch.empty_like(value), value.requires_grad) for value in module.parameters()}


def empty_caches(module: nn.Module) -> dict[int, dict[str, Tensor]]:
    """The memo with which `copy.deepcopy` copies a module without biases that timm keeps from an earlier pass.

    They may have a graph, which cannot be copied, and would be those of another time when the copy runs.
    """
    caches = (vars(part).get("attention_bias_cache") for part in module.modules())
    return {id(cache): {} for cache in caches if isinstance(cache, dict)}


def take_state(new: nn.Module, old: nn.Module) -> None:
    """Give a module the parameters of another, as the same objects, and its buffers.

    Raises: RuntimeError if names or shapes differ.
    """
    trained = {key: value.requires_grad for key, value in old.named_parameters(remove_duplicate=False)}
    for key, value in new.named_parameters(remove_duplicate=False):  # load_state_dict takes the target's flags
        value.requires_grad_(trained.get(key, True))
    new.load_state_dict(old.state_dict(keep_vars=True), assign=True)


def like(value: Any, example: Tensor) -> Any:
    """A tensor on the device of an example and, if its numbers are floating-point, in that dtype; other values as they
    are."""
    if not isinstance(value, Tensor):
        return value
    return value.to(example.device, example.dtype if value.is_floating_point() else None)


def convert_others(module: nn.Module, kept: Iterable[Tensor], example: Tensor) -> None:
    """Move a module to the device and dtype of an example, in place, but not the tensors that are kept."""
    own = {id(value) for value in kept}
    module._apply(lambda value: value if id(value) in own else like(value, example))


def check_wrapper(model: nn.Module, layers: Iterable[str]) -> None:
    """Raises: SwapError for what is around a model or some of its layers and would not work after a change of them.

    These are DDP and FSDP, which know the parameters, an adapter around a whole attention or a layer compiled by
    itself, and inference mode.
    """
    if inside := [name for name in layers if ".base_layer" in f".{name}"]:
        raise SwapError(
            f"{inside[0]} has an adapter around the whole attention; merge it first (merge_and_unload() of PEFT), or "
            "leave the layer out with where="
        )
    if compiled := [name for name in layers if name.endswith("._orig_mod")]:
        raise SwapError(f"{compiled[0]} is compiled by itself, so it would still run; swap or restore it before that")
    if any(value.is_inference() for value in model.parameters()):
        raise SwapError("the model's parameters were made in torch.inference_mode(); build or load it outside of it")
    for module in model.modules():
        kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
        fsdp = next((kind for kind in kinds if kind.startswith("torch.distributed.fsdp.")), "")
        if fsdp or isinstance(module, DistributedDataParallel):
            name = "FSDP" if fsdp else "DistributedDataParallel"
            raise SwapError(f"{name} knows the parameters of this model already; swap or restore it before wrapping it")


def parameter_uses(model: nn.Module) -> Mapping[int, int]:
    """How often each parameter is used in a model, by its `id`."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def check_tied(uses: Mapping[int, int], name: str, before: nn.Module, kept: Iterable[nn.Parameter]) -> None:
    """Raises: SwapError if a parameter of a layer that is not kept in full is also used elsewhere in the model.

    uses: `parameter_uses` of the model.
    """
    own = {id(value) for value in kept}
    for key, value in before.named_parameters():
        if id(value) not in own and uses[id(value)] > 1:
            raise SwapError(
                f"{name}.{key} is tied to another parameter, and the mechanism does not keep all of it: they would be "
                "tied no more; give the layer a parameter of its own first, or leave it out with where="
            )
