"""The sort of integers is a stable sort."""

import pytest
import torch

from regard.mixers.shared.stable_sort import stable_sort


@pytest.mark.parametrize("shape", [(1,), (200,), (2, 3, 50)])
def test_equal_numbers_keep_their_order(shape: tuple[int, ...]) -> None:
    numbers = torch.randint(-3, 4, shape)
    ranked, order = stable_sort(numbers)
    expected = numbers.sort(dim=-1, stable=True)
    assert torch.equal(ranked, expected.values)
    assert torch.equal(order, expected.indices)
