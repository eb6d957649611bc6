"""Randomness as a pure function of names and numbers: nothing of a generator's state ever needs saving.

Order, augmentation, mixing, dropout and every parameter's first value have a stream of their own. Two runs with one
seed share all streams that they have in common, so their difference is not blurred by other draws.
"""

import hashlib
import random
from functools import cache

import numpy as np


def number(*parts: str | int) -> int:
    """63 bits that depend on the parts alone (BLAKE2b; Python's `hash` differs from process to process)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: str | int) -> np.random.Generator:
    """numpy's generator of one stream."""
    return np.random.default_rng(number(*parts))


def seed_all(*parts: str | int) -> None:
    """Seed the global generators of torch, numpy and Python: timm's and torchvision's transforms draw from them."""
    import torch

    seed = number(*parts)
    if _accelerated():
        torch.manual_seed(seed)
    else:  # the same numbers, without `manual_seed`'s 0.1 ms for devices that are not there
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (timm's Mixup draws from the global generator)
    random.seed(seed)


@cache
def _accelerated() -> bool:
    """Whether there are devices with generators of their own; asking takes longer than seeding."""
    import torch

    return torch.accelerator.is_available()
