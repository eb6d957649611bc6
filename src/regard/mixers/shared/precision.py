"""The precision of scores that select or normalise: float32 at least, whatever the inputs and autocast are."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def exact_products(device: torch.device) -> torch.autocast:
    """A context without autocast: scores that select must not be rounded to half precision."""
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    return torch.autocast(kind, enabled=False)
