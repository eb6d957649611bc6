"""Routed attention by any of its executions, and what of the machine decides among them."""

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.core import UnsupportedError
from regard.core.tensors import is_exporting

from .executions import Situation, check_execution, choose
from .native import in_function_transform
from .routed import Parts, dense, gather, grouped

FORMS = ("triton", "varlen", "dense", "gather", "grouped")
FEW = 2**24
"""Logits of all heads and images up to which "auto" computes all of them on CUDA, where the other executions wait for
their many kernels to start (benchmarks/README.md, "GPUs")."""
HAS_TRITON = find_spec("triton") is not None
"""Whether the package triton is there; PyTorch brings it on Linux. Asked here, as `torch.compile` cannot trace it."""


def attend(execution: str, parts: Parts, *, once: bool = False) -> Tensor:
    """Routed attention (B,H,N,e) by the execution of this name. once: keys that experts share count once.

    Raises: UnsupportedError for one that cannot count keys once, or cannot run here.
    """
    if once:
        if execution != "dense":
            raise UnsupportedError(f'execution="{execution}" cannot count shared keys once; use "dense" or "auto"')
        return dense(parts, once=True)
    if execution == "triton":
        return _by_triton(parts)
    if execution == "varlen":
        from .routed_varlen import varlen

        return varlen(parts)
    return {"dense": dense, "gather": gather, "grouped": grouped}[execution](parts)


def few_logits(q: Tensor, keys: int) -> bool:
    """Whether "auto" computes all logits on CUDA; not in an export, whose number of images may be open."""
    return q.is_cuda and not is_exporting() and q.shape[0] * q.shape[1] * q.shape[2] * keys <= FEW


def runs_triton(q: Tensor, bias: Tensor | None = None) -> bool:
    """Whether "auto" may take Triton kernels: on CUDA, not in float64, for a bias that is not trained.

    Function transforms and `torch.export` are left to PyTorch's operators.
    """
    if not q.is_cuda or q.dtype is torch.float64 or (bias is not None and bias.requires_grad):
        return False
    return HAS_TRITON and not in_function_transform() and not is_exporting()


def needs_triton() -> None:
    """Raises: UnsupportedError without the package triton."""
    if not HAS_TRITON:
        raise UnsupportedError('execution="triton" needs the package triton, which is not installed; use "auto"')


def names_triton(mechanism: str, plain: str, execution: str, x: Tensor) -> bool:
    """Whether a mechanism of two executions, `plain` and "triton", runs as a kernel; x (..., N, d): its values.

    Raises: ConfigError for an unknown execution; UnsupportedError without the package triton.
    """
    check_execution(execution, (plain, "triton"))
    if choose(mechanism, execution, Situation(x.device, x.dtype, x.shape[-2], x.shape[-2])) != "triton":
        return False
    needs_triton()
    return True


def _by_triton(parts: Parts) -> Tensor:
    needs_triton()
    from .routed_triton import triton_routed

    return triton_routed(parts)
