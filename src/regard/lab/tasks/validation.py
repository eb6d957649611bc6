"""The validation part: training samples that choose weights and learning rates, and are not trained on."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regard.core import ConfigError
from regard.images.streams import generator

if TYPE_CHECKING:
    from typing import Self


class ValidationPart:
    """What tasks with the fields split, val and val_seed have in common.

    val: share of the training samples that are validated on, drawn by val_seed; 0 = none. Data that reserve samples for
    it, which are neither trained on nor tested, have these in the place of the share. part_name: the `split` that is
    this part.
    """

    part_name: ClassVar[str] = "held"

    split: Any
    val: float
    val_seed: int

    def check_validation(self) -> None:
        """Raises: ConfigError for an impossible share or seed."""
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
        changed: Self = dataclasses.replace(self, split=self.part_name)  # type: ignore[type-var]
        return changed

    def divide(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows that are trained on, rows that are validated on), both rising. Raises: ConfigError if one is empty."""
        number = round(self.val * samples)
        if not 0 < number < samples:
            raise ConfigError(f"val={self.val:g} of {samples} training samples leaves none to train or to validate on")
        order = generator("validation", self.val_seed).permutation(samples)
        return np.sort(order[number:]), np.sort(order[:number])
