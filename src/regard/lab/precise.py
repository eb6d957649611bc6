"""The forward pass of a run's precision, outside of training."""

import torch
from torch import Tensor, nn

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What autocast computes in, by the name of the precision."""


class Precise(nn.Module):
    """A network that is evaluated as its run trained it: inputs in the dtype of its weights, autocast where mixed."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self.mixed = model, MIXED.get(precision)

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(next(self.model.parameters()).dtype)
        with torch.autocast(images.device.type, self.mixed, enabled=self.mixed is not None):
            return self.model(images)
