"""The forward pass of a run's precision, outside of training."""

import torch
from torch import Tensor, nn

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What autocast computes in, by the name of the precision."""


def mixed(device: str, precision: str) -> torch.autocast:
    """Autocast of a precision on a kind of device; off where nothing is mixed."""
    return torch.autocast(device, MIXED.get(precision), enabled=precision in MIXED)


class Precise(nn.Module):
    """A network that is evaluated as its run trained it: inputs in the dtype of its weights, autocast where mixed."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(next(self.model.parameters()).dtype)
        with mixed(images.device.type, self.precision):
            return self.model(images)
