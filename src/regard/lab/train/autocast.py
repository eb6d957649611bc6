"""Evaluation of a model in the precision of its run."""

from typing import Any

import torch
from torch import Tensor, nn

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast, by the name of the precision."""


def autocast(device: str, precision: str) -> torch.autocast:
    """Autocast for a precision on a type of device; disabled unless the precision is a mixed one."""
    return torch.autocast(device, MIXED.get(precision), enabled=precision in MIXED)


class ModelAtPrecision(nn.Module):
    """A model evaluated in the precision of its run: inputs in the dtype of the weights, autocast if it is mixed."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, *inputs: Any) -> Any:
        """Floating-point tensors, also in lists, take the dtype of the weights; other arguments are passed on."""
        weight = next(self.model.parameters())
        with autocast(weight.device.type, self.precision):
            return self.model(*(_as(item, weight.dtype) for item in inputs))


def _as(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, list):
        return [_as(part, dtype) for part in item]
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item
