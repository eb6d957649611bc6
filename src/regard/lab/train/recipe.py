"""Recipe: how a model is trained. Every field changes the result and is part of a run's key."""

import math
from dataclasses import dataclass
from typing import ClassVar

from regard.core import ConfigError
from regard.core.validation import check_fields

SCHEDULES = ("cosine", "linear", "poly", "step", "rsqrt")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters of training; the defaults are those of the desk scale.

    batch: images in one forward pass, at most all; accumulate: forward passes in one step. optimizer: a name of timm.
    betas: of optimizers that have two (their first is the momentum of others). warmup: fraction of the steps in which
    lr rises linearly; it then falls by `schedule` to floor * lr, and stays there for the last fraction `cooldown` of
    the steps. schedule: "cosine"; "linear"; "poly", (1 - fraction of the steps)^power; "step", a tenth after each of
    `milestones`, fractions of the steps; "rsqrt", (step / warm-up steps)^-0.5. weight_decay: on matrices only.
    clip: maximum norm of the gradient, 0 = none. smoothing: of the labels. mixup, cutmix: timm's alphas, 0 = off.
    augment: see `regard.images.augment`. ema: decay of an exponential moving average of the weights, which is
    evaluated instead of them; 0 = none. precision: as in Lightning Fabric. erasing: probability of timm's random
    erasing, before mixup. stop_after: the run ends after so many epochs, 0 = all; warmup, cosine and cooldown are still
    those of the schedule of `epochs`. average: evaluate the mean of the weights at the ends of the last `average`
    epochs, 0 = none.
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
    schedule: str = "cosine"
    power: float = 0.9
    milestones: tuple[float, ...] = ()
    average: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        counts = (self.epochs, self.batch, self.accumulate)
        if min(counts) < 1:
            raise ConfigError(f"epochs, batch and accumulate are at least 1, not {', '.join(map(str, counts))}")
        if not 0 <= self.stop_after <= self.epochs:
            raise ConfigError(f"stop_after is between 1 and epochs={self.epochs}, or 0 for all, not {self.stop_after}")
        if not self.lr > 0:
            raise ConfigError(f"lr is a positive number, not {self.lr}")
        for name in ("warmup", "floor", "smoothing", "ema", "erasing", "cooldown"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is a fraction, at least 0 and below 1, not {getattr(self, name)}")
        if self.warmup + self.cooldown >= 1:
            raise ConfigError(f"warmup + cooldown is below 1, not {self.warmup} + {self.cooldown}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are two fractions, such as 0.9,0.98, not {self.betas}")
        for name in ("weight_decay", "clip", "mixup", "cutmix"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is 0 or more, not {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule is one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if bool(self.milestones) != (self.schedule == "step") or any(not 0 < part < 1 for part in self.milestones):
            raise ConfigError(
                'schedule="step", and no other, has milestones, fractions of the steps such as 0.3,0.6,0.9, not '
                f"{self.milestones} with schedule={self.schedule!r}"
            )
        if not self.power > 0 or (self.power != Recipe.power and self.schedule != "poly"):
            raise ConfigError(f'power is a positive number, of schedule="poly" alone, not {self.power}')
        if not 0 <= self.average <= self.trained_epochs:
            raise ConfigError(f"average is a number of epochs, at most {self.trained_epochs}, not {self.average}")
        if self.average and self.ema:
            raise ConfigError("ema and average are two averages of the weights: set one of them")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")

    @property
    def trained_epochs(self) -> int:
        """Number of epochs that are trained: `stop_after` if it is set, else all of the schedule."""
        return self.stop_after or self.epochs

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate at a step, 0 .. steps-1, of the schedule: linear warmup, its fall, constant cooldown."""
        warmup = round(self.warmup * steps)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        constant = round(self.cooldown * steps)
        if step >= steps - constant:
            return self.lr * self.floor
        fraction = min((step - warmup) / max(steps - warmup - constant, 1), 1.0)
        return self.lr * (self.floor + (1 - self.floor) * self._decay(fraction, step, warmup, steps))

    def _decay(self, fraction: float, step: int, warmup: int, steps: int) -> float:
        """What is left of the learning rate after a fraction of the steps that follow the warmup."""
        if self.schedule == "step":
            return 0.1 ** sum(step >= round(part * steps) for part in self.milestones)
        if self.schedule == "rsqrt":
            return math.sqrt(max(warmup, 1) / max(step + 1, 1))
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * fraction))
        return (1 - fraction) ** (self.power if self.schedule == "poly" else 1.0)
