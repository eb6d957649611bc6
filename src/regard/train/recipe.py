"""Recipe: how a network is trained. Everything here changes the result and is part of a run's key."""

import math
from dataclasses import dataclass
from typing import ClassVar

from regard.core import ConfigError

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Defaults are those of the desk protocols.

    batch: images of one forward pass; accumulate: forward passes of a step. optimizer: a name that timm knows.
    betas: the optimiser's two, where it has two. warmup: share of the steps in which lr rises; then it falls along
    a cosine to floor * lr, where it stays for the last share `cooldown` of the steps. weight_decay: on matrices only.
    clip: largest norm of the gradient, 0 = none. smoothing: of the labels. mixup, cutmix: timm's alphas, 0 = off.
    augment: see `regard.tasks.data.augment`. ema: decay of an average of the weights, which is evaluated in their
    place; 0 = none. precision: as Lightning Fabric calls it. erasing: share of the images in which a rectangle becomes
    noise (timm's random erasing, before mixup). stop_after: epochs after which a run ends before its schedule does,
    0 = never; warmup, cosine and cooldown are those of all `epochs`.
    Raises: ConfigError.
    """

    revision: ClassVar[int] = 1

    epochs: int = 20
    batch: int = 64
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    warmup: float = 0.1
    floor: float = 0.0
    clip: float = 1.0
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    augment: str = "crop"
    ema: float = 0.0
    precision: str = "32-true"
    erasing: float = 0.0
    cooldown: float = 0.0
    stop_after: int = 0

    def __post_init__(self) -> None:
        whole = (self.epochs, self.batch, self.accumulate)
        if any(not isinstance(number, int) or number < 1 for number in whole):
            raise ConfigError(
                f"epochs, batch and accumulate are whole numbers from 1, not {', '.join(map(str, whole))}"
            )
        if not isinstance(self.stop_after, int) or not 0 <= self.stop_after <= self.epochs:
            raise ConfigError(f"stop_after is one of the {self.epochs} epochs, or 0 for all, not {self.stop_after}")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ConfigError(f"lr is a positive number, not {self.lr}")
        for name in ("warmup", "floor", "smoothing", "ema", "erasing", "cooldown"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is a share, at least 0 and below 1, not {getattr(self, name)}")
        if self.warmup + self.cooldown >= 1:
            raise ConfigError(f"warmup and cooldown are less than all steps, not {self.warmup} and {self.cooldown}")
        if len(self.betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are two shares, such as 0.9,0.98, not {self.betas}")
        for name in ("weight_decay", "clip", "mixup", "cutmix"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is 0 or more, not {getattr(self, name)}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")

    @property
    def trained_epochs(self) -> int:
        """Epochs that a run has: all of the schedule, unless it stops before."""
        return self.stop_after or self.epochs

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of step 0 .. steps-1 of the whole schedule: a linear rise, a cosine, and a constant end; a
        pure function, nothing to save."""
        rise = round(self.warmup * steps)
        if step < rise:
            return self.lr * (step + 1) / rise
        share = min((step - rise) / max(steps - rise - round(self.cooldown * steps), 1), 1.0)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share)))
