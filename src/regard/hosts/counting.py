"""Multiply-accumulates of a whole model, counted by PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_macs(model: nn.Module, images: Tensor) -> int:
    """Multiply-accumulates of one forward pass (matrix products and convolutions, plain attention), in evaluation mode.

    Parameters and images may lie on the meta device.
    """
    counter = FlopCounterMode(display=False)
    model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:  # the counter's hooks trip over views of parameters that want a gradient
            parameter.requires_grad_(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            model(images)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return counter.get_total_flops() // 2
