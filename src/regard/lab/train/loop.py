"""The training loop. A run that is stopped at any step continues from its last checkpoint, bit for bit.

Order, augmentation, mixing and dropout are pure functions of (seed, step): a checkpoint holds the weights, the
optimizer and the step, but no state of a random generator.
"""

import copy
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from regard.core import ConfigError, DeviceError, RegardError, StoreError
from regard.core.eval_mode import eval_mode
from regard.files.tensor_files import check_weights
from regard.images.streams import seed_all
from regard.lab.results.lock import check_held
from regard.lab.results.metrics import Metrics
from regard.lab.tasks.base import Score, Task
from regard.measure.memory import PeakMemory

from . import checkpoint
from .autocast import ModelAtPrecision
from .machine_use import MachineUse
from .optimizer import make_optimizer
from .own_losses import collect_own_losses
from .recipe import Recipe
from .sharding import load_optimizer, load_weights, whole
from .signals import handle_signals
from .watch import Interrupted, Progress, Watch

EVALUATIONS = 10
"""Largest number of evaluations during training, at equal intervals, on the validation part or else the test split;
another on the test split follows at the end."""
FLUSH_STEPS = 50
"""Number of steps between reads of the losses, for the loggers; a GPU does not wait for each of them."""
AGREE_STEPS = 10
"""With several devices: the largest number of steps between decisions, for all, to save, stop or report."""
AGREE_SECONDS = 2.0
"""With slow steps there are fewer between two decisions, so that about so many seconds pass."""


class Diverged(RegardError):
    """The loss, or a final score, is NaN or infinite; `step` counts from 0."""

    def __init__(self, step: int, value: float, quantity: str = "the loss") -> None:
        super().__init__(f"{quantity} is {value} at step {step}; try a smaller lr, more warmup or clip=1.0")
        self.step = step


class Loop:
    """One run in a folder: `resume` reads the folder's checkpoint, `train` continues from there.

    With several devices each process has a loop; all read the folder, only the first evaluates and writes.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        seed: int,
        model: nn.Module,
        fabric: Any,
        folder: Path,
        watch: Watch,
        peak: PeakMemory,
        teacher: nn.Module | None = None,
    ):
        task.check(recipe)
        self.peak = peak
        self.task, self.recipe, self.seed, self.fabric = task, recipe, seed, fabric
        self.folder, self.watch, self.device = folder, watch, fabric.device
        self.part, self.first = (fabric.global_rank, fabric.world_size), fabric.is_global_zero
        batches = task.batches_per_epoch(recipe)
        if recipe.accumulate > batches:
            raise ConfigError(f"accumulate={recipe.accumulate}: an epoch has {batches} batches, give at most these")
        self.per_epoch = batches // recipe.accumulate
        self.steps = self.per_epoch * recipe.trained_epochs
        self.schedule = self.per_epoch * recipe.epochs
        self.step, self.seconds, self.losses = 0, 0.0, list[float]()
        self.use = MachineUse(None if self.part[1] > 1 else 0.0)  # other processes of the run are no others
        self.data: str = task.record()["checksum"]
        self.score: Score | None = None
        self.evaluated = 0
        self.model = sync_batchnorm(model, self.part[1], self.device)
        self.model.to(self.device, torch.float64 if recipe.precision == "64-true" else None)
        self.teacher = None if teacher is None else teacher.to(self.device).eval().requires_grad_(False)
        self.ema: Any = ModelEmaV3(self.model, decay=recipe.ema) if recipe.ema else None
        self.averaged = _mean_weights(self.model) if recipe.average else None
        # with divided weights, the first process evaluates a copy
        self.undivided = copy.deepcopy(self.model) if watch.shard and self.first else None
        self._set_up()
        self.metrics = Metrics(folder / "metrics.csv", (task.metric, *task.further))
        self.validation = task.validation()
        self.best: tuple[int, float] | None = None
        self._pending: list[Tensor] = []
        self._stop = False
        self._agree_at = 0
        self._logged = (0, 0.0)  # step and time of the last point of the loggers

    def _set_up(self) -> None:
        self.own_losses = collect_own_losses(self.model)
        if self.watch.shard:
            self.wrapped = self.fabric.setup_module(self.model)
            self.optimizer: Any = make_optimizer(self.model, self.recipe)
            self.wrapped_optimizer = self.fabric.setup_optimizers(self.optimizer)
            return
        self.optimizer = make_optimizer(self.model, self.recipe)
        module = _compile(self.model) if self.watch.compile else self.model
        self.wrapped, self.wrapped_optimizer = self.fabric.setup(module, self.optimizer)

    @property
    def trained(self) -> nn.Module:
        """The model that is evaluated and saved: the average of the weights if the recipe has one."""
        if self.undivided is not None:
            return self.undivided
        average = self._average
        return self.model if average is None else average.module

    @property
    def _average(self) -> Any:
        """The moving average, or the mean of the last epochs once there is one; None without."""
        return self.averaged if self.averaged is not None and int(self.averaged.n_averaged) else self.ema

    def resume(self) -> None:
        """Load the newest readable checkpoint, and remove the metrics of later steps.

        Raises: StoreError if no checkpoint can be read, it does not fit, or was trained on other data, or if the best
        checkpoint or metrics.csv is damaged; both stay as they are.
        """
        state = checkpoint.load(self.folder)
        if state is not None:
            if state.get("data", self.data) != self.data:
                before, now = str(state["data"])[:12], self.data[:12]
                raise StoreError(
                    f"the run in {self.folder} was trained for {state['step']} steps on data with the checksum "
                    f"{before}..., but the checksum is now {now}...: restore those data, or delete the folder to start "
                    "again"
                )
            with checkpoint.load_errors(self.folder):
                self.step, self.seconds = int(state["step"]), float(state["seconds"])
                self.losses = list(state["losses"])
                if not (0 <= self.step <= self.steps and math.isfinite(self.seconds)):
                    raise ValueError(f"it is of step {self.step} after {self.seconds} s, of {self.steps} steps")
                if self.use.others is not None:
                    self.use.others = None if state.get("others") is None else float(state["others"])
                check_weights(self.model, state["model"], finite=False)  # the loss tells, as without a restart
                load_weights(self.model, state["model"])
                self._load_average(state.get("ema"), state.get("averaged", 0))
                if state["optimizer"] is not None:
                    load_optimizer(self.optimizer, state["optimizer"])
                if state.get("scaler"):
                    self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self._check_same_step()
        if self.first:
            self.metrics.cut(self.step, self.step // self.per_epoch)
        best = checkpoint.load_best(self.folder) if self.validation is not None else None
        # best.ckpt may be of a later step than the checkpoint: training reaches the same weights and value again
        self.best = (int(best["step"]), float(best["value"])) if best is not None else None

    def _check_same_step(self) -> None:
        """Raises: StoreError if another process has read another checkpoint: its node does not share the folder."""
        if self.part[1] == 1:
            return
        first = self.fabric.broadcast(self.step)
        if self.step != first:
            raise StoreError(
                f"process {self.part[0]} reads step {self.step} in {self.folder}, the first one step {first}: the "
                "folder of --results must be on a disk that all nodes share"
            )

    def _load_average(self, weights: dict[str, Tensor] | None, number: int) -> None:
        """Set the average of the weights from a checkpoint. number: of averaged epochs."""
        average = self.ema if self.averaged is None else self.averaged
        if weights is None and (self.ema is not None or number):
            raise ValueError("it has no average of the weights, which the recipe has")
        if average is not None and weights is not None:
            average.module.load_state_dict(weights)
        if self.averaged is not None:
            self.averaged.n_averaged.fill_(number)

    def save(self, final: bool = False) -> None:
        """Write a checkpoint; the final one has no optimizer state. Raises: StoreError, Diverged."""
        self._flush()
        weights = whole(self.model.state_dict())
        optimizer = None if final else whole(self.optimizer.state_dict())
        if not self.first:
            return
        check_held(self.folder)
        self.use.update()
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "others": self.use.others,
            "losses": self.losses,
            "data": self.data,
            "model": weights,
            "ema": None if self._average is None else self._average.module.state_dict(),
            "averaged": 0 if self.averaged is None else int(self.averaged.n_averaged),
            "optimizer": optimizer,
            "scaler": self.fabric.strategy.precision.state_dict(),  # of the loss in 16-mixed, else {}
        }
        checkpoint.save(self.folder, state)

    def train(self) -> Score | None:
        """Train to the end and evaluate; None on all devices but the first.

        Raises: Diverged, Interrupted, StoreError, DataError; DeviceError if torch.compile fails.
        """
        with self._stop_on_signals(), _compile_errors(self.watch.compile):
            if self.step < self.steps:
                self._train()
                self.save(final=True)
            self._gather()
            self.score = self.evaluate() if self.first else None
        return self.score

    def _gather(self) -> None:
        """Give the copy that is evaluated the weights that are divided among the processes."""
        if self.watch.shard:
            weights = whole(self.model.state_dict())
            if self.undivided is not None:
                self.undivided.load_state_dict(weights)

    def _train(self) -> None:
        accumulate = self.recipe.accumulate
        first, last = self.step * accumulate, self.steps * accumulate
        batches = self._batches(first, last)
        self.use.start()
        started = saved = reported = time.monotonic()
        seconds_before, first_step = self.seconds, self.step
        self._logged = (self.step, started)
        self.wrapped.train()
        due = False  # until the next decision of all devices
        while self.step < self.steps:
            self._train_step(batches)
            self.step += 1
            now = time.monotonic()
            self.seconds = seconds_before + now - started
            if self.step % self.per_epoch == 0:
                self._end_epoch()
            elif self.step % FLUSH_STEPS == 0:
                self._log_steps()
            every = self.watch.save_steps
            due = due or now - saved >= self.watch.save_seconds or bool(every and self.step % every == 0)
            report = now - reported >= 1.0 or self.step % self.per_epoch == 0
            per_step = (now - started) / (self.step - first_step)
            stop, save, report = self._agree(self._stop, due and self.step < self.steps, report, per_step)
            if stop or save:
                self.save()
                saved, due = time.monotonic(), False
            if stop:
                raise Interrupted(f"stopped at step {self.step} of {self.steps}")
            if report:
                reported = now
                self._report(per_step)

    def _agree(self, stop: bool, save: bool, report: bool, per_step: float) -> list[bool]:
        """Whether to stop, save and report: one answer for all devices, as clocks and signals differ between processes.

        Any process can ask to stop; the first one decides about the others. Between two agreements, which are about
        AGREE_SECONDS apart at `per_step` seconds a step, the answer is no.
        """
        if self.part[1] == 1:
            return [stop, save, report]
        if self.step < self._agree_at and self.step % self.per_epoch:
            return [False] * 3
        steps = max(1, min(AGREE_STEPS, int(AGREE_SECONDS / max(per_step, 1e-9))))
        own = [stop, *([save, report, steps] if self.first else [0, 0, 0])]
        total = self.fabric.all_reduce(torch.tensor(own, device=self.device, dtype=torch.float32), reduce_op="sum")
        self._agree_at = self.step + int(total[3])
        return [bool(value) for value in total[:3]]

    def _batches(self, first: int, last: int) -> Iterator[Any]:
        """Batches first .. last-1; with accumulation, the incomplete step at the end of an epoch is left out."""
        workers = self.task.usual_workers(self.recipe) if self.watch.workers is None else self.watch.workers
        per_epoch = self.per_epoch * self.recipe.accumulate
        available = self.task.batches_per_epoch(self.recipe)
        if available <= per_epoch:
            yield from self.task.batches(self.recipe, self.seed, first, last, workers, self.part)
            return
        for epoch in range(first // per_epoch, last // per_epoch):
            start = first % per_epoch if epoch == first // per_epoch else 0
            span = (epoch * available + start, epoch * available + per_epoch)
            yield from self.task.batches(self.recipe, self.seed, *span, workers, self.part)

    def _train_step(self, batches: Iterator[Any]) -> None:
        lr = self.recipe.lr_at(self.step, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        total = torch.zeros((), device=self.device)
        for part in range(self.recipe.accumulate):
            batch = next(batches)
            seed_all("step", self.seed, self.step, part, *([] if self.first else [self.part[0]]))
            with self.fabric.no_backward_sync(self.wrapped, enabled=part < self.recipe.accumulate - 1):
                self.own_losses.clear()
                loss = self.task.loss(self.wrapped, batch, self.recipe, self.device, self.teacher)
                loss = sum(self.own_losses, start=loss) / self.recipe.accumulate
                self.fabric.backward(loss)
            total += loss.detach()
        if self.recipe.clip:
            self.fabric.clip_gradients(
                self.wrapped, self.wrapped_optimizer, max_norm=self.recipe.clip, error_if_nonfinite=False
            )
        self.wrapped_optimizer.step()
        self.wrapped_optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.model, self.step)
        self._pending.append(total)

    def _log_steps(self) -> None:
        """Give the loggers the mean loss and time of the steps since the last call, and the peak memory."""
        self._flush()
        (step, started), now = self._logged, time.monotonic()
        self._logged = (self.step, now)
        if not self.first or step == self.step:
            return
        peak = self.peak.bytes()
        values = {
            "train/loss": math.fsum(self.losses[step - self.step :]) / (self.step - step),
            "lr": self.recipe.lr_at(self.step - 1, self.schedule),
            "time/step_ms": 1000 * (now - started) / (self.step - step),
        }
        self.fabric.log_dict(values | ({} if peak is None else {"mem/peak_mb": peak / 1e6}), step=self.step)

    def _flush(self) -> None:
        if not self._pending:
            return
        values = self.fabric.all_reduce(torch.stack(self._pending), reduce_op="mean").tolist()
        first = len(self.losses)
        self._pending = []
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise Diverged(((self.step - 1) // self.per_epoch) * self.per_epoch + first + index, value)
        self.losses.extend(values)

    def _end_epoch(self) -> None:
        self._log_steps()
        epoch, epochs = self.step // self.per_epoch, self.recipe.trained_epochs
        if self.averaged is not None and epoch > epochs - self.recipe.average:
            self.averaged.update_parameters(self.model)
        evaluated = epoch * EVALUATIONS // epochs > (epoch - 1) * EVALUATIONS // epochs
        if evaluated:
            self._gather()
        if not self.first:
            self.losses = []
            return
        row = {
            "epoch": epoch,
            "step": self.step,
            "train_loss": repr(math.fsum(self.losses) / len(self.losses)),
            "lr": repr(self.recipe.lr_at(self.step - 1, self.schedule)),
            "seconds": round(self.seconds, 3),
        }
        if evaluated:
            self.score, self.evaluated = self.evaluate(self.validation), epoch
            row |= {name: repr(value) for name, value in self.score.metrics.items()}
            if self.validation is not None:
                self._keep_best(self.score.metrics[self.task.metric])
            self.fabric.log_dict({f"val/{name}": value for name, value in self.score.metrics.items()}, step=self.step)
        self.metrics.append(row)
        self.losses = []
        self._logged = (self.step, time.monotonic())  # the evaluation is no step

    def _keep_best(self, value: float) -> None:
        """Save the evaluated weights if the main metric of the validation part is higher than ever before."""
        if self.best is None or value > self.best[1]:
            self.best = (self.step, value)
            checkpoint.save_best(self.folder, self.trained.state_dict(), self.step, value)

    def evaluate(self, task: Task | None = None) -> Score:
        """Evaluate the trained model in the run's precision: on the test split, or on that of a task."""
        with eval_mode(self.trained):
            return (task or self.task).score(ModelAtPrecision(self.trained, self.recipe.precision), self.device)

    def _report(self, per_step: float) -> None:
        self._flush()
        if self.watch.report is None:
            return
        self.watch.report(
            Progress(
                step=self.step,
                steps=self.steps,
                epoch=(self.step - 1) // self.per_epoch + 1,
                epochs=self.recipe.trained_epochs,
                loss=self.losses[-1] if self.losses else float(self.metrics.read()[-1]["train_loss"]),
                lr=self.recipe.lr_at(self.step - 1, self.schedule),
                seconds=self.seconds,
                seconds_left=per_step * (self.steps - self.step),
                metrics=dict(self.score.metrics) if self.score else {},
                split="test" if self.validation is None else "validation",
                evaluated=self.evaluated,
            )
        )

    def _stop_on_signals(self) -> AbstractContextManager[None]:
        """SIGINT and SIGTERM stop the run after the current step; a second signal stops it at once."""

        def request_stop(number: int, frame: Any) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True

        return handle_signals(request_stop, signal.SIGINT, signal.SIGTERM)


def sync_batchnorm(model: nn.Module, processes: int, device: torch.device) -> nn.Module:
    """The model whose BatchNorm counts the whole batch, as on one device; there is no such layer for the CPU."""
    return convert_sync_batchnorm(model) if processes > 1 and device.type == "cuda" else model


def _compile(model: nn.Module) -> Any:
    """The model compiled by `torch.compile`, with the random numbers of eager mode.

    Dynamo compiles a function at most eight times in a process and then falls back to eager mode, so the compiled code
    of earlier runs is discarded.
    """
    torch.compiler.reset()
    return torch.compile(model, options={"fallback_random": True})


@contextmanager
def _compile_errors(compiled: bool) -> Iterator[None]:
    """Raise an error of the compiler as a DeviceError: the run itself may be right."""
    if not compiled:
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        text = str(error).strip().splitlines()[0]
        message = f"torch.compile failed ({text}); without --compile the run is trained in eager mode"
        raise DeviceError(message) from error


def _mean_weights(model: nn.Module) -> Any:
    # tensor by tensor: torch's other way cannot average integer buffers on a GPU, such as BatchNorm's number of batches
    return AveragedModel(model, avg_fn=get_swa_avg_fn(), use_buffers=True)
