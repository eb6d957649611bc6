"""Runs of tasks with batches of their own that are killed: they end with the same bits as one that was left alone."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.lab.results.results import Results
from regard.lab.tasks import Sequences, Translation
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Watch
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax

PLAIN: dict[str, Any] = {"augment": "none", "batch": 16}
ADAM: dict[str, Any] = {"optimizer": "adam", "weight_decay": 0.0, "schedule": "rsqrt", "warmup": 0.2, "lr": 5e-3}
RUNS = {
    "sequences": Run(
        task=Sequences(host="sequence_encoder(dim=16, depth=1, ffn=16, hidden=16)", data="digits", limit=64),
        mixer=MiTA(m=4, k=4),
        recipe=Recipe(epochs=30, lr=3e-3, **PLAIN),
        seed=3,
    ),
    "translation": Run(
        task=Translation(
            host="translator(dim=32, depth=1, heads=4, hidden=32, drop=0.1)", data="numbers", vocabulary=400, beam=2,
            limit=120,
        ),
        mixer=Softmax(),
        recipe=Recipe(epochs=6, average=2, **PLAIN, **ADAM),
        seed=1,
    ),
}  # fmt: skip


def work(root: Path, run: Run) -> None:
    torch.set_num_threads(1)
    execute(run, Results(root), device="cpu", watch=Watch(save_steps=1))


def written(file: Path) -> int:
    """When a file was written, 0 where there is none: a run renames its checkpoint before it writes the next."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    alone, killed = Results(tmp_path / "alone"), Results(tmp_path / "killed")
    work(alone.root, run)
    last = killed.folder(run.key) / checkpoint.LAST
    for _ in range(2):
        before = written(last)
        process = multiprocessing.get_context("fork").Process(target=work, args=(killed.root, run))
        process.start()
        limit = time.monotonic() + 60
        while written(last) in (0, before) and time.monotonic() < limit:
            time.sleep(0.001)
        assert process.is_alive(), "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
    work(killed.root, run)
    one, two = (checkpoint.trained_weights(store.folder(run.key)) for store in (alone, killed))
    assert all(torch.equal(one[key], two[key]) for key in one)
    first, second = ((store.outcome(run.key) or {}) for store in (alone, killed))
    assert [first.get(part) for part in ("bits", "metrics", "details")] == [
        second.get(part) for part in ("bits", "metrics", "details")
    ]
