"""Compiled kernels as operators of `torch.library`, and as direct calls where nothing looks at operators.

`torch.compile`, `torch.export`, function transforms, counters of FLOPs and the like see an operator. In eager mode its
way through the dispatcher takes 60 to 100 us a pass, as much as the kernel's work on few tokens: there the same code
runs as a `torch.autograd.Function`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.core import UnsupportedError

from .native import in_trace

Differentiate = Callable[..., Any]
"""Of the context and the gradients of outputs: the gradients of all inputs, None for what is not a tensor."""


def native_operator(
    name: str, run: Callable[..., Any], *, fake: Callable[..., Any], differentiate: Differentiate,
    save: Callable[..., None] | None = None, rule: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Register `run`, which has annotations, as the operator "regard::<name>" on the CPU; returns what calls it.

    fake: empty outputs. save(ctx, inputs, output): what `differentiate` needs. rule: makes the rule under `vmap` from
    the operator; None = `batch_rule`.
    """
    operator: Any = torch.library.custom_op(f"regard::{name}", run, mutates_args=(), device_types="cpu")
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=save)
    operator.register_vmap((rule or batch_rule)(operator))

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            ctx.set_materialize_grads(False)
            if save is not None:
                save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            return differentiate(ctx, *grads)

    Direct.__name__ = f"regard::{name}"  # what profilers print, as for the operator

    def call(*inputs: Any) -> Any:
        return Direct.apply(*inputs) if _is_plain_call(inputs) else operator(*inputs)

    return call


def _is_plain_call(inputs: tuple[Any, ...]) -> bool:
    """Whether all tensors are plain ones, and neither a compiler, a transform nor a dispatch mode is at work."""
    if in_trace() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in inputs if isinstance(x, Tensor))


def refuse_derivative(message: str) -> Differentiate:
    """The derivative of a gradient that has none. Raises: UnsupportedError, when it is asked for."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(message)

    return refuse


def batch_rule(operator: Any) -> Any:
    """The rule of an operator under `vmap`: the mapped axis becomes part of each tensor's batch."""

    def rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
        size = info.batch_size

        def fold(x, axis):  # type: ignore[no-untyped-def]
            if not isinstance(x, Tensor):
                return x
            x = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
            return x.flatten(0, 1)

        results = operator(*map(fold, args, in_dims))
        if isinstance(results, Tensor):
            return results.unflatten(0, (size, -1)), 0
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)

    return rule
