"""Terms of operators in the loss of a training step: a learned indexer's, which the task's loss does not move."""

from typing import Any

from torch import Tensor, nn

from regard.core import Inputs, Operator


def collect_own_losses(model: nn.Module) -> list[Tensor]:
    """A list that gets the `own_loss` of every operator at each forward pass in training mode; clear it before a step.

    Operators without such a term stay as they are.
    """
    terms: list[Tensor] = []

    def append(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        term = operator.own_loss(Inputs(*args, **kwargs)) if operator.training else None
        if term is not None:
            terms.append(term)

    for module in model.modules():
        if isinstance(module, Operator) and type(module).own_loss is not Operator.own_loss:
            module.register_forward_pre_hook(append, with_kwargs=True)
    return terms
