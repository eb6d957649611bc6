"""A run that is killed at any moment ends with the same bits as one that was left alone."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Watch
from stopped_runs import same
from streams import write_stream
from tiny_task import Tiny

RECIPE = Recipe(epochs=16, batch=32, augment="shift", mixup=0.4, cutmix=0.5, ema=0.9)


def work(root: str, run: Run, workers: int) -> None:
    torch.set_num_threads(1)
    execute(run, Results(root), device="cpu", watch=Watch(workers=workers, save_steps=1))


def start(root: Path, run: Run, workers: int) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work, args=(str(root), run, workers))
    process.start()
    return process  # type: ignore[return-value]


def stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def kill_and_compare(tmp_path: Path, kills: int, task: Tiny) -> None:
    run = Run(task=task, recipe=RECIPE, seed=3)
    alone, killed = Results(tmp_path / "alone"), Results(tmp_path / "killed")
    work(str(alone.root), run, workers=0)
    dice = random.Random(kills)
    last = killed.folder(run.key) / checkpoint.LAST
    for _ in range(kills):
        process = start(killed.root, run, workers=2)
        for _ in range(dice.randrange(3)):
            before, limit = stamp(last), time.monotonic() + 60
            while stamp(last) == before and process.is_alive() and time.monotonic() < limit:
                time.sleep(0.001)
        time.sleep(dice.random() * 0.05)
        assert process.is_alive(), "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
    process = start(killed.root, run, workers=2)
    process.join()
    assert process.exitcode == 0
    expected, state = (checkpoint.load(store.folder(run.key)) for store in (alone, killed))
    assert state["step"] == expected["step"] == 64
    assert all(same(state[part], expected[part]) for part in ("model", "ema"))
    first, second = (store.outcome(run.key) for store in (alone, killed))
    assert (first["bits"], first["metrics"]) == (second["bits"], second["metrics"])
    tables = [Metrics(store.folder(run.key) / "metrics.csv").read() for store in (alone, killed)]
    assert [line | {"seconds": ""} for line in tables[0]] == [line | {"seconds": ""} for line in tables[1]]


def test_two_kills_change_no_bit(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, 2, Tiny())


@pytest.mark.slow
def test_two_kills_change_no_bit_of_a_run_on_a_stream(tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "data", sizes=(28, 50, 30, 20))
    kill_and_compare(tmp_path, 2, Tiny(data=f"stream:{stream}", size=(8, 8), limit=0, colours=3))


@pytest.mark.slow
def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, 20, Tiny())


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_last_save_that_is_killed_between_its_renames_keeps_the_weights(
    tmp_path: Path, renamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is complete, and `renamed` of the two files have their new names."""
    run = Run(task=Tiny(), recipe=Recipe(epochs=2, batch=32, augment="none"))
    alone, killed = Results(tmp_path / "alone"), Results(tmp_path / "killed")
    work(str(alone.root), run, workers=0)
    final = checkpoint.load(alone.folder(run.key))
    files = (checkpoint.LAST, checkpoint.PREVIOUS), (checkpoint.NEXT, checkpoint.LAST)

    def kill(folder: Path) -> None:
        if (checkpoint.load(folder) or {})["step"] == final["step"]:
            for old, new in files[:renamed]:
                os.replace(folder / old, folder / new)
            raise KeyboardInterrupt
        rename(folder)

    rename = checkpoint._rename
    monkeypatch.setattr(checkpoint, "_rename", kill)
    with pytest.raises(KeyboardInterrupt):
        work(str(killed.root), run, workers=0)
    monkeypatch.undo()
    work(str(killed.root), run, workers=0)
    assert killed.status(run.key) == "done"
    kept = checkpoint.load(killed.folder(run.key))
    assert kept["step"] == final["step"]
    assert same(kept["model"], final["model"])
