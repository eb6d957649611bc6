"""Evaluation of a model in the precision of its run."""

import torch
from torch import Tensor, nn

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast, by the name of the precision."""


def mixed(device: str, precision: str) -> torch.autocast:
    """Autocast for a precision on a type of device; disabled unless the precision is a mixed one."""
    return torch.autocast(device, MIXED.get(precision), enabled=precision in MIXED)


class ModelAtPrecision(nn.Module):
    """A model evaluated in the precision of its run: inputs in the dtype of the weights, autocast if it is mixed."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(next(self.model.parameters()).dtype)
        with mixed(images.device.type, self.precision):
            return self.model(images)
