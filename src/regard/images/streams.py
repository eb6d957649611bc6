"""Random numbers as a pure function of names and numbers, so that no generator's state has to be saved.

Order, augmentation, mixing, dropout and the initial value of every parameter have their own streams. Two runs with the
same seed share the streams that both have, so that different random numbers add no noise to their difference.
"""

import hashlib
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

BY_NAME = "by_name-"
"""Before the digest of the user's own data that `held_out` divides."""


def number(*parts: str | int) -> int:
    """63 bits that depend on the parts only (BLAKE2b; Python's `hash` differs between processes)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: str | int) -> np.random.Generator:
    """NumPy's generator of one stream."""
    return np.random.default_rng(number(*parts))


def held_out(folder: Path, files: Sequence[object]) -> set[int]:
    """The places of the fifth of some files, at least one, that is kept for the test.

    Those with the smallest SHA-256 of their names in the folder: one file more or less moves one other at most.
    """
    names = [os.path.relpath(str(file), folder) for file in files]
    order = sorted(range(len(names)), key=lambda row: hashlib.sha256(Path(names[row]).as_posix().encode()).digest())
    return set(order[: max(1, len(names) // 5)])


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
