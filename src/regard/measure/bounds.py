"""The least time that a pass can take on this machine: its products at the speed of matrix products, or its traffic."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .turns import one_thread, time_pass


@dataclass(frozen=True)
class Speed:
    """Of one thread of a CPU, or of a GPU, measured. flops: of a product of two square matrices, a second.

    bytes: read and written a second in a copy of 64 MB.
    """

    flops: float
    bytes: float

    def bound(self, macs: int, traffic: int) -> float:
        """Seconds: of the products or of the traffic in bytes, whichever takes longer."""
        return max(2 * macs / self.flops, traffic / self.bytes)


@functools.cache
def speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """The best of three measurements, after a first one; takes under a second on most machines."""
    side = 4096 if device.type == "cuda" else 1024
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(2**26, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    with one_thread(), torch.no_grad():
        product = _best(lambda: torch.mm(a, b), device)
        copy = _best(lambda: target.copy_(source), device)
    return Speed(2 * side**3 / product, 2 * source.numel() / copy)


def _best(run: Callable[[], object], device: torch.device) -> float:
    run()
    return max(min(time_pass(run, device).seconds for _ in range(3)), 1e-9)
