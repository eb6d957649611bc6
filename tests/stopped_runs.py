"""Runs that are interrupted on the way, and what training has left of a run."""

import os
import signal
from typing import Any

import pytest
import torch

from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.run import Run
from regard.lab.train.watch import Interrupted, Watch


def stop(
    run: Run, store: Results, step: int, sign: int = signal.SIGINT, devices: int = 1, device: str = "cpu", **watch: Any
) -> None:
    """Execute a run and interrupt it by a signal after a step, the last of an epoch; it stops after the next one."""

    def report(progress: Any) -> None:
        if progress.step == step:
            os.kill(os.getpid(), sign)

    with pytest.raises(Interrupted):
        execute(run, store, devices, device=device, watch=Watch(report=report, **watch))
    assert store.status(run.key) == "begun"


def weights(store: Results, run: Run) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint."""
    state = checkpoint.load(store.folder(run.key))
    return state["model"]


def losses(store: Results, run: Run) -> list[float]:
    """The training losses of the epochs."""
    return [float(line["train_loss"]) for line in Metrics(store.folder(run.key) / "metrics.csv").read()]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether weights are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
