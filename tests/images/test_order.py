"""The order of training samples."""

import numpy as np
import pytest

from regard.core import DeviceError
from regard.images.order import batch_rows, batches_in_epoch, check_parts, part_of


@pytest.mark.parametrize(("samples", "batch"), [(6, 2), (7, 2), (5, 5), (3, 8)])
def test_an_epoch_has_each_sample_at_most_once(samples: int, batch: int) -> None:
    epoch = batches_in_epoch(samples, batch)
    for first in (0, epoch, 5 * epoch):
        rows = np.concatenate([batch_rows(samples, batch, 3, number) for number in range(first, first + epoch)])
        assert len(set(rows.tolist())) == len(rows) == min(samples, epoch * batch)
        assert set(rows.tolist()) <= set(range(samples))


def test_orders_depend_on_seed_and_epoch_alone() -> None:
    rows = batch_rows(100, 10, 1, 3)
    batch_rows(100, 10, 1, 33), batch_rows(100, 10, 2, 3)
    assert np.array_equal(rows, batch_rows(100, 10, 1, 3))
    assert not np.array_equal(rows, batch_rows(100, 10, 1, 13))
    assert not np.array_equal(rows, batch_rows(100, 10, 2, 3))


def test_parts_make_up_the_batch() -> None:
    rows = batch_rows(12, 12, 0, 0)
    parts = [rows[part_of(len(rows), (index, 3))] for index in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert np.array_equal(np.concatenate(parts), rows)
    check_parts(12, 24, (0, 3))
    with pytest.raises(DeviceError, match="a batch of 12 cannot be divided into 5 equal parts"):
        check_parts(12, 24, (0, 5))
