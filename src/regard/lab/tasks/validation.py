"""The validation part: training samples that choose weights and learning rates, and are not trained on."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from regard.core import ConfigError
from regard.images.streams import generator

from .base import Task

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, kw_only=True)
class ValidationPart(Task):
    """What tasks with a validation part have in common.

    val: share of the training samples that are validated on, drawn by val_seed; 0 = none. Data that reserve samples for
    it, which are neither trained on nor tested, have these in the place of the share. part_name: the `split` that is
    this part. Raises: ConfigError for an impossible share or seed.
    """

    part_name: ClassVar[str] = "held"

    split: str
    val: float = 0.0
    val_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_seed and not self.val:
            raise ConfigError("val_seed draws the share val of the training samples: val is 0")
        if not 0 <= self.val < 1 or self.val_seed < 0:
            raise ConfigError(
                f"val is a share, at least 0 and below 1, and val_seed 0 or more; not {self.val} and {self.val_seed}"
            )

    def validation(self) -> "Self | None":
        """The same task, scored on the validation part; None without one."""
        if not self.val or self.split == self.part_name:
            return None
        return replace(self, split=self.part_name)

    def divide(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows that are trained on, rows that are validated on), both rising. Raises: ConfigError if one is empty."""
        number = round(self.val * samples)
        if not 0 < number < samples:
            raise ConfigError(f"val={self.val:g} of {samples} training samples leaves none to train or to validate on")
        order = generator("validation", self.val_seed).permutation(samples)
        return np.sort(order[number:]), np.sort(order[:number])
