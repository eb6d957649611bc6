"""Random numbers as a pure function of names and numbers, so that no generator's state has to be saved.

Order, augmentation, mixing, dropout and the initial value of every parameter have their own streams. Two runs with the
same seed share the streams that both have, so that different random numbers add no noise to their difference.
"""

import hashlib
import random
from functools import cache

import numpy as np


def number(*parts: str | int) -> int:
    """63 bits that depend on the parts only (BLAKE2b; Python's `hash` differs between processes)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: str | int) -> np.random.Generator:
    """NumPy's generator of one stream."""
    return np.random.default_rng(number(*parts))


def seed_all(*parts: str | int) -> None:
    """Seed the global generators of torch, numpy and Python, which transforms of timm and torchvision use."""
    import torch

    seed = number(*parts)
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # the same numbers; `manual_seed` needs 0.1 ms for absent devices
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (timm's Mixup uses the global generator)
    random.seed(seed)


@cache
def _has_accelerator() -> bool:
    """Whether there is a device with its own generator; the query takes longer than seeding."""
    import torch

    return torch.accelerator.is_available()
