"""What a caller chooses for the execution of a run, and what it is told meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and has written a checkpoint, from which the same command continues."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run. seconds_left: estimated from the steps so far; metrics: of the last evaluation, after the
    epoch `evaluated`, on the images that `split` names: "test" or "validation"."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    lr: float
    seconds: float
    seconds_left: float
    metrics: dict[str, float]
    split: str = "test"
    evaluated: int = 0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """How a run is executed and reported; no field changes the result, except `compile` and `shard` by rounding.

    report: called about once a second and at the end of each epoch. say: called with a line about what is trained,
    before the first step. workers: data loader processes, 0 = none, None = `Task.usual_workers`.
    save_seconds, save_steps: time and steps between checkpoints (0 steps: by time alone). loggers: of Lightning.
    compile: train with `torch.compile`, which saves time if a run takes many minutes; evaluation is not compiled.
    shard: divide weights and optimizer state among the processes of torchrun (FSDP2).
    """

    report: Callable[[Progress], None] | None = None
    say: Callable[[str], None] | None = None
    workers: int | None = None
    save_seconds: float = 20.0
    save_steps: int = 0
    loggers: tuple[Any, ...] = ()
    compile: bool = False
    shard: bool = False
