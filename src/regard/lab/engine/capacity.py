"""What a setting needs on a named GPU, from the cost model: GPU-hours, memory and storage, before anything is trained.

A training step counts three times the multiply-accumulates of a forward pass, at an assumed share of the GPU's peak in
the recipe's precision: the hours are no better than that share. Memory is that of weights, their average, gradients and
optimizer, and of what the forward pass of the dry run kept for the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.core import ConfigError, DataError, nearest

from .estimate import work

if TYPE_CHECKING:
    from regard.lab.train.recipe import Recipe

    from .dry_run import DryRow
    from .study import Setting, Study

UTILISATION = 0.3
"""Assumed share of the peak that training reaches."""
STATE_BYTES = 16
"""Of a parameter in training: weight, gradient and two moments of AdamW in float32."""
CHECKPOINTS = 3
"""Of a run in training, each with weights and moments: the last two and the one that is written."""


@dataclass(frozen=True)
class GPU:
    """A GPU by its maker's data sheet. half, single: peak per second, dense, in 16 and 32 bits; gigabytes: of memory.

    The peak in 32 bits is that without TF32, which PyTorch takes for convolutions only; it stands for 64 bits, too.
    """

    half: float
    single: float
    gigabytes: int

    def flops(self, bits: int) -> float:
        """The peak in 16 or 32 bits."""
        return self.half if bits == 16 else self.single


GPUS = {
    "V100": GPU(125e12, 15.7e12, 32), "A100": GPU(312e12, 19.5e12, 80), "H100": GPU(989e12, 67e12, 80),
    "H200": GPU(989e12, 67e12, 141), "L40S": GPU(362e12, 91.6e12, 48), "RTX4090": GPU(165e12, 82.6e12, 24),
}  # fmt: skip


@dataclass(frozen=True)
class Capacity:
    """The needs of the runs of one row. bits: of the operations, 16 or 32. hours: of GPUs, all runs together, None if
    the number of samples is not known here. memory: bytes of one GPU. training, finished: bytes of storage of one run
    while it trains, of all at the end.
    """

    row: str
    runs: int
    bits: int
    hours: float | None
    memory: int | None
    training: int | None
    finished: int | None


def find_gpu(name: str) -> GPU:
    """The GPU of a name. Raises: ConfigError."""
    known = {label.lower(): gpu for label, gpu in GPUS.items()}
    if name.lower() not in known:
        raise ConfigError(f"the data of no GPU {name!r} are known; {nearest(name, GPUS)}")
    return known[name.lower()]


def capacities(
    study: "Study", scale: str, rows: "Sequence[DryRow]", gpu: GPU, devices: int = 1, utilisation: float = UTILISATION
) -> list[Capacity]:
    """The needs of the rows of a dry run; none for a setting that trains nothing.

    devices: GPUs that divide each batch. Teachers and the runs that rows need are not counted.
    Raises: ConfigError.
    """
    if not 0 < utilisation <= 1:
        raise ConfigError(f"the utilisation is a share of the peak, above 0 and at most 1, not {utilisation}")
    setting = study.setting(scale)
    if setting.recipe is None:
        return []
    return [_capacity(study, scale, setting, row, gpu, devices, utilisation) for row in rows]


def summary(found: Sequence[Capacity], name: str, gpu: GPU, utilisation: float) -> str:
    """The needs of all rows in one line, with what was assumed."""
    hours = [row.hours for row in found if row.hours is not None]
    total = f"{sum(hours):,.1f} GPU-hours" if len(hours) == len(found) else "GPU-hours unknown without the data"
    memory = max((row.memory or 0 for row in found), default=0) / 1e9
    finished = sum(row.finished or 0 for row in found) / 1e9
    training = max((row.training or 0 for row in found), default=0) / 1e9
    peaks = [f"{gpu.flops(bits) / 1e12:g} TFLOP/s in {bits} bits" for bits in sorted({row.bits for row in found})]
    return (
        f"on {name} ({', '.join(peaks)}, {gpu.gigabytes} GB), assumed utilisation {100 * utilisation:g} %: "
        f"{total} for {sum(row.runs for row in found)} runs; up to {memory:.1f} GB of GPU memory a run, storage "
        f"{finished:.2f} GB and {training:.2f} GB more for each run in training"
    )


def _capacity(
    study: "Study", scale: str, setting: "Setting", row: "DryRow", gpu: GPU, devices: int, utilisation: float
) -> Capacity:
    (described,) = (entry for entry in setting.rows if entry.label == row.label)
    run = study.run(scale, described, setting.numbers[0])
    number, recipe = len(setting.numbers), run.recipe
    bits = 16 if "16" in recipe.precision else 32
    if row.params is None or row.macs is None:
        return Capacity(row.label, number, bits, None, None, None, None)
    try:
        train, test = run.task.sample_counts()
        hours = number * _flops(recipe, row.macs, train, test) / (gpu.flops(bits) * utilisation) / 3600
    except DataError:
        hours = None
    average = 4 * row.params if recipe.ema or recipe.average else 0
    memory = STATE_BYTES * row.params + average + int(bits / 32 * (row.saved_bytes or 0) * recipe.batch / devices)
    weights = 4 * row.params + average
    return Capacity(row.label, number, bits, hours, memory, CHECKPOINTS * (weights + 8 * row.params), number * weights)


def _flops(recipe: "Recipe", macs: int, train: int, test: int) -> float:
    """Operations of one run, with its evaluations."""
    steps, evaluated = work(recipe, train, test)
    trained = steps * recipe.accumulate * min(recipe.batch, train)
    return 2.0 * macs * (3 * trained + evaluated)
