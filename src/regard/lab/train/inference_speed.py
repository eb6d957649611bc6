"""How many samples a trained model answers in a second, beside the speed of its training."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.eval_mode import eval_mode

from .autocast import ModelAtPrecision

BATCH = 16


@torch.inference_mode()
def inference_speed(model: nn.Module, example: Sequence[Any], precision: str) -> float | None:
    """Samples a second of forward passes of `BATCH` samples on the model's device, the median of 5 after a first one.

    example: the inputs of one sample; None is returned where that is not one tensor (1, ...).
    """
    sample = example[0]
    if len(example) > 1 or not isinstance(sample, Tensor):
        return None
    batch = sample.repeat(BATCH, *[1] * (sample.ndim - 1)).to(next(model.parameters()).device)
    at_precision = ModelAtPrecision(model, precision)
    with eval_mode(model):
        seconds = [_seconds(at_precision, batch) for _ in range(6)][1:]
    return round(BATCH / statistics.median(seconds), 1)


def _seconds(model: nn.Module, batch: Tensor) -> float:
    begun = time.perf_counter()
    model(batch)
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)
    return time.perf_counter() - begun
