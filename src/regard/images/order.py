"""The order of training samples: a pure function of the seed and the batch's number."""

from functools import lru_cache

import numpy as np

from regard.core import DeviceError

from .streams import generator

Part = tuple[int, int]
"""(index, count) of equal parts of a batch: which part a device gets."""


def batches_in_epoch(samples: int, batch: int) -> int:
    """Number of batches in an epoch; a last, smaller batch is left out."""
    return max(samples // batch, 1)


def batch_rows(samples: int, batch: int, seed: int, number: int) -> np.ndarray:
    """Indices of the samples of a batch, (batch,) int64: a section of the permutation of its epoch."""
    epoch, index = divmod(number, batches_in_epoch(samples, batch))
    return _permutation(samples, seed, epoch)[index * batch : (index + 1) * batch]


def part_of(rows: int, part: Part) -> slice:
    """The section of a batch of so many rows that belongs to a part."""
    index, count = part
    return slice(index * rows // count, (index + 1) * rows // count)


def check_parts(samples: int, batch: int, part: Part) -> None:
    """Raises: DeviceError if the parts of a batch, which has at most all samples, would not be equal."""
    size = min(samples, batch)
    if size % part[1]:
        raise DeviceError(f"a batch of {size} cannot be divided into {part[1]} equal parts; use fewer devices")


@lru_cache(maxsize=2)
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    order = generator("order", seed, epoch).permutation(samples)
    order.flags.writeable = False
    return order
