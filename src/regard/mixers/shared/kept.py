"""Tables that follow from sizes and a device alone, kept from one pass to the next.

Each is a dozen small operators, which a GPU would start anew in every layer and pass.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch

from .native import in_trace

P = ParamSpec("P")
T = TypeVar("T")


def kept(build: Callable[P, T]) -> Callable[P, T]:
    """The function with its last 64 results kept. Arguments are hashable; nobody changes the tensors that it returns.

    Built anew where tensors belong to a graph or have no numbers: compiled, traced, transformed and fake code, and what
    a CUDA graph captures.
    """
    remember = cast("Callable[P, T]", lru_cache(maxsize=64)(torch.inference_mode(False)(build)))

    @wraps(build)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return remember(*args, **kwargs) if may_keep() else build(*args, **kwargs)

    return call


def may_keep() -> bool:
    """Whether tensors made now can be used in later passes."""
    if in_trace() or torch._C._len_torch_dispatch_stack():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
