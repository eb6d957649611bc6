"""Evaluation mode without gradients, and without torch's fused attention, for the length of a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has its own mode again."""
    with kept_modes(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has its own mode again, of training or of evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Without the fused path of nn.MultiheadAttention and nn.TransformerEncoder: it is one operation that counters do
    not know, and passes padded tokens as nested tensors."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
