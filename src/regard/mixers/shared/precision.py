"""At least float32 for scores that select or normalise, whatever the dtype of the inputs and autocast are."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """x in float32 where it is in half precision; float32 and float64 are not changed."""
    return x.to(upcast_dtype(x))


def upcast_dtype(x: Tensor) -> torch.dtype:
    """That of `upcast(x)`, without a copy."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def finest(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which autocast is off: scores that select must not be rounded to half precision."""
    kind = "cpu" if device.type == "meta" else device.type
    return torch.autocast(kind, enabled=False)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b where autocast is off; of float16 in float32, as the product may exceed 65,504."""
    return a.float() @ b.float() if a.dtype == torch.float16 else a @ b
