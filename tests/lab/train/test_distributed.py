"""Runs on several devices: two processes of this machine in place of two GPUs."""

import signal
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from regard.core import ConfigError, MissingExtra, RegardError, StoreError
from regard.lab.engine.executors.local import gpu_shares
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train import checkpoint
from regard.lab.train.distributed import _listen, check_devices
from regard.lab.train.execute import NeededRunFailed, execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Watch
from stopped_runs import losses, same, stop, weights
from tiny_task import Tiny
from two_processes import AROUND

RECIPE = Recipe(epochs=3, batch=32, augment="shift", accumulate=2)


def test_the_parts_of_a_batch_are_the_batch() -> None:
    task = Classification(host="vit_desk(size=12, patch=2)", data="digits-canvas", size=(12, 12))
    recipe = Recipe(batch=30, augment="shift")
    whole = list(task.batches(recipe, 0, 2, 4))
    parts = [list(task.batches(recipe, 0, 2, 4, part=(number, 3))) for number in range(3)]
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
    with pytest.raises(ConfigError, match="30 cannot be divided into 4"):
        next(task.batches(recipe, 0, 0, 1, part=(0, 4)))
    with pytest.raises(ConfigError, match="even number of images on a device, not 15"):
        next(task.batches(Recipe(batch=30, augment="none", mixup=0.5), 0, 0, 1, part=(0, 2)))


def test_devices_that_cannot_share_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one device, not 0"):
        check_devices(0, 32, "cpu")
    with pytest.raises(ConfigError, match="32 cannot be divided into 5 equal parts; use 4 devices"):
        execute(Run(task=Tiny(), recipe=RECIPE), Results(tmp_path), 5, device="cpu")
    assert not list(tmp_path.glob("*/run.json"))


@pytest.mark.parametrize(
    "error",
    [MissingExtra("scikit-learn", "lab"), StoreError("no disk"), NeededRunFailed("0123", "ValueError: no")],
    ids=lambda error: type(error).__name__,
)
def test_the_error_of_a_process_is_raised_in_the_parent(error: RegardError) -> None:
    """Also one whose class wants other arguments than a text."""
    messages = SimpleQueue()
    with _listen(messages, Watch()) as errors:
        messages.put((type(error), str(error)))
    (received,) = errors
    assert (type(received), str(received)) == (type(error), str(error))


def test_workers_get_gpus_of_their_own() -> None:
    assert gpu_shares([], 3, 1) == ["", "", ""]
    assert gpu_shares(["0"], 2, 1) == ["", ""]
    assert gpu_shares(["2", "5"], 3, 1) == ["2", "5", "2"]
    assert gpu_shares(list("01234567"), 2, 4) == ["0,1,2,3", "4,5,6,7"]
    assert gpu_shares([], 2, 2) == ["", ""]
    with pytest.raises(ConfigError, match="8 devices are requested, this machine has 2"):
        gpu_shares(["0", "1"], 1, 8)


def test_two_devices_learn_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AROUND.items():
        monkeypatch.setenv(name, value)
    run = Run(task=Tiny(dropout=0.0), recipe=RECIPE)
    one, two = (Results(tmp_path / name) for name in ("one", "two"))
    execute(run, one, device="cpu")
    outcome = execute(run, two, 2, device="cpu")
    assert outcome["status"] == "done"
    assert outcome["environment"]["devices"] == 2
    assert losses(two, run) == pytest.approx(losses(one, run), rel=1e-5)
    for name, value in weights(one, run).items():
        torch.testing.assert_close(weights(two, run)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_stopped_run_of_two_devices_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run = Run(task=Tiny(dropout=0.0), recipe=RECIPE)
    two, cut = (Results(tmp_path / name) for name in ("two", "cut"))
    execute(run, two, 2, device="cpu")
    stop(run, cut, 2, signal.SIGTERM, devices=2)  # after an epoch
    execute(run, cut, 2, device="cpu")
    assert same(weights(cut, run), weights(two, run))
    assert losses(cut, run) == losses(two, run)


@pytest.mark.slow
def test_an_error_of_a_device_reaches_the_caller(tmp_path: Path) -> None:
    store, run = Results(tmp_path), Run(task=Tiny(), recipe=RECIPE)
    checkpoint.save(store.folder(run.key), {"step": 1, "seconds": 0.0, "losses": [], "model": {"other": torch.ones(1)}})
    with pytest.raises(StoreError, match="does not fit this run"):
        execute(run, store, 2, device="cpu")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_an_outcome_of_all_devices(tmp_path: Path) -> None:
    run = Run(task=Tiny(), recipe=Recipe(epochs=3, batch=32, lr=1e18, clip=0.0, warmup=0.0))
    outcome = execute(run, Results(tmp_path), 2, device="cpu")
    assert outcome["status"] == "failed"
    assert "the loss is nan" in outcome["error"] or "the loss is inf" in outcome["error"]
