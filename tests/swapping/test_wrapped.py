"""Models that are compiled or in DataParallel take a swap, and run the new layers."""

import pytest
import torch
from torch import nn

from regard.mixers.softmax import Softmax
from regard.swapping.swap import remove, restore, swap
from small_hosts import draw_large_weights, vit


@pytest.mark.untyped
def test_a_compiled_model_runs_what_was_swapped_in() -> None:
    """Its code is compiled anew, since its layers are other modules."""
    model, x = vit()
    draw_large_weights(model.eval())
    fast = torch.compile(model, backend="eager")
    plain = fast(x)
    remove(fast)
    assert (fast(x) - plain).abs().max() > 1e-3 * plain.abs().max()
    torch.testing.assert_close(fast(x), model(x))
    restore(fast)
    torch.testing.assert_close(fast(x), plain)


def test_a_model_in_data_parallel_takes_a_swap() -> None:
    model, x = vit()
    draw_large_weights(model.eval())
    wrapped = nn.DataParallel(model)
    expected = wrapped(x)
    torch.testing.assert_close(swap(wrapped, Softmax())(x), expected)
    assert list(restore(wrapped).state_dict()) == [f"module.{key}" for key in model.state_dict()]
