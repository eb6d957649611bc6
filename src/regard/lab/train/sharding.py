"""Weights, gradients and optimizer state divided among the processes of a run (FSDP2).

Checkpoints hold whole tensors: a run continues with any number of processes, divided or not.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from regard.core import ConfigError

from .recipe import Recipe


def check_shared(recipe: Recipe, processes: int, compiled: bool) -> None:
    """Raises: ConfigError for what needs whole weights in each process, or without processes to divide them among."""
    if processes == 1:
        raise ConfigError(
            "--shard divides the weights among processes: start the run with torchrun --nproc-per-node N -m regard ..."
        )
    for name, value in (("--set recipe.ema", recipe.ema), ("--set recipe.average", recipe.average)):
        if value:
            raise ConfigError(f"--shard cannot average weights: leave it out, or pass {name}=0")
    if compiled:
        raise ConfigError("--shard and --compile exclude each other: leave one of them out")


def sharding_strategy(processes: int) -> Any:
    """Fabric's strategy that divides a model among all processes."""
    from lightning_fabric.strategies import ModelParallelStrategy

    return ModelParallelStrategy(_divide, data_parallel_size=processes, tensor_parallel_size=1)


def _divide(model: nn.Module, mesh: Any) -> nn.Module:
    """Divide each block, then the rest: only one block's weights are whole at a time."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])  # type: ignore[return-value]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The children with parameters of the outermost lists: a ViT's blocks, the stages of a network with stages."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def whole(state: Any) -> Any:
    """A state with whole tensors in the place of divided ones; all processes call it, in the same order."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(whole, state))
    return state.full_tensor() if isinstance(state, DTensor) else state


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load whole tensors into a model, divided or not. Raises: RuntimeError, as `load_state_dict` does."""
    own = model.state_dict()
    model.load_state_dict({name: _like(value, own.get(name)) for name, value in weights.items()})


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load an optimizer's state with whole tensors for parameters that are divided or not."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    divided = {
        number: {name: _like(value, parameters[int(number)]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": divided})


def _like(value: Any, target: Tensor | None) -> Any:
    """A whole tensor divided like the target, if that is divided and has its shape."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
