"""How many samples a trained model answers in a second, beside the speed of its training."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.eval_mode import eval_mode
from regard.measure.turns import now

from .autocast import ModelAtPrecision

BATCH = 16


@torch.inference_mode()
def inference_speed(model: nn.Module, example: Sequence[Any], precision: str) -> float:
    """Samples a second of forward passes on the model's device, the median of 5 after a first one.

    example: the inputs of one sample. A pass has `BATCH` samples where that is one tensor (1, ...); else one sample, as
    papers time detectors.
    """
    device, number = next(model.parameters()).device, BATCH if len(example) == 1 else 1
    batch = [x.repeat(number, *[1] * (x.ndim - 1)).to(device) if isinstance(x, Tensor) else x for x in example]
    at_precision = ModelAtPrecision(model, precision)
    with eval_mode(model):
        seconds = [_seconds(at_precision, batch, device) for _ in range(6)][1:]
    return round(number / statistics.median(seconds), 1)


def _seconds(model: nn.Module, batch: Sequence[Any], device: torch.device) -> float:
    begun = now(device)
    model(*batch)
    return now(device) - begun
