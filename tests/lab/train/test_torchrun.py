"""One run in the processes of torchrun: the same batches, one store, and an end of all when one dies."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from regard.cli.app import run as command
from regard.core import ConfigError, DeviceError
from regard.files.records import read_record
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.loop import sync_batchnorm
from regard.lab.train.recipe import Recipe
from regard.lab.train.sharding import check_shared
from regard.lab.train.torchrun import Group, Launch, check_launch, heartbeats, join_group, launch
from streams import write_stream
from two_processes import AROUND, free_port
from waiting import wait_until

TRAIN = [
    "train", "SKA()", "--host", "vit_desk(depth=2, dim=32, heads=2)", "--device", "cpu",
    "--set", "recipe.batch=16", "--set", "recipe.accumulate=2",
]  # fmt: skip
EPOCHS = 6
SECONDS = 240
"""The longest that a test waits for a process of its own."""


def torchrun(
    results: Path,
    *options: str,
    processes: int = 2,
    nodes: int = 1,
    port: int = 0,
    epochs: int = EPOCHS,
    data: str = "digits",
) -> subprocess.Popen[str]:
    """`regard train` under torchrun, its output in one pipe."""
    launcher = [
        "--nnodes", str(nodes), "--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "regard", *TRAIN, "--data", data,
         "--results", str(results), "--set", f"recipe.epochs={epochs}", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finished(results: Path, *options: str, processes: int = 2, data: str = "digits") -> Path:
    """The folder of the run after torchrun has ended it."""
    process = torchrun(results, *options, processes=processes, data=data)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert output.count("top1") >= 1
    assert output.count("\nrun ") == 1, "one process alone shows the outcome"
    return folder_of(results)


def alone(results: Path, *options: str, data: str = "digits") -> Path:
    """The folder of the run after one process has ended it."""
    own = ["--data", data, "--set", f"recipe.epochs={EPOCHS}", "--results", str(results)]
    assert command([*TRAIN, *own, *options]) == 0
    return folder_of(results)


def folder_of(results: Path) -> Path:
    (folder,) = {path.parent for path in results.glob("*/run.json")}
    return folder


def losses(folder: Path) -> list[float]:
    return [float(line.split(",")[2]) for line in (folder / "metrics.csv").read_text().splitlines()[1:]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return (checkpoint.load(folder) or {})["model"]


def wait_for_epochs(results: Path, number: int, process: subprocess.Popen[str]) -> None:
    files = results.glob
    wait_until(lambda: any(len(losses(path.parent)) >= number for path in files("*/metrics.csv")), process)


def children(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of torchrun's processes by their rank."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {int(number): Path(f"/proc/{number}/environ").read_bytes().split(b"\0") for number in found}
    return {
        int(entry.removeprefix(b"RANK=")): number
        for number, entries in environments.items()
        for entry in entries
        if entry.startswith(b"RANK=")
    }


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Kill what still lives at the end of the block."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_of_torchrun_learn_what_one_does(tmp_path: Path, processes: int) -> None:
    one, several = alone(tmp_path / "one"), finished(tmp_path / "several", processes=processes)
    assert one.name == several.name, "the key does not depend on the number of processes"
    assert losses(several) == pytest.approx(losses(one), rel=1e-4)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(several)[name], value, rtol=1e-2, atol=2e-3)
    assert read_record(several / "outcome.json")["environment"]["devices"] == processes


@pytest.mark.slow
def test_processes_of_torchrun_divide_the_lanes_of_a_stream(tmp_path: Path) -> None:
    data = f"stream:{write_stream(tmp_path / 'data', sizes=(70, 40, 90, 56))}"
    one = alone(tmp_path / "one", "--size", "16", data=data)
    two = finished(tmp_path / "two", "--size", "16", "--workers", "2", data=data)
    assert one.name == two.name
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "tolerance"), [(["--shard"], 1e-4), (["--precision", "bf16-mixed"], 2e-2)])
def test_divided_weights_and_bf16_learn_the_same(tmp_path: Path, options: list[str], tolerance: float) -> None:
    one = alone(tmp_path / "one", *[option for option in options if option != "--shard"])
    two = finished(tmp_path / "two", *options)
    assert losses(two) == pytest.approx(losses(one), rel=tolerance)
    assert {name: value.shape for name, value in weights(two).items()} == {
        name: value.shape for name, value in weights(one).items()
    }


@pytest.mark.slow
def test_a_stopped_and_killed_job_continues_with_two_processes_or_one(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    job = torchrun(tmp_path / "cut")
    with ended(job):
        wait_for_epochs(tmp_path / "cut", 1, job)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    store = Results(tmp_path / "cut")
    key = folder_of(store.root).name
    assert store.status(key) == "begun"
    state = checkpoint.load(store.folder(key))
    assert 28 <= state["step"] < 168
    shutil.copytree(store.root, tmp_path / "one")

    job = torchrun(store.root)
    with ended(job):
        wait_for_epochs(store.root, state["step"] // 28 + 1, job)
        started = time.monotonic()
        os.kill(children(job)[1], signal.SIGKILL)
        output, _ = job.communicate(timeout=60)
        assert time.monotonic() - started < 60
    assert job.returncode != 0
    assert "rank: 1" in output.replace("rank      :", "rank:")
    assert store.status(key) == "begun"

    two = finished(store.root)
    assert losses(two) == losses(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(two).items())
    one = alone(tmp_path / "one")
    assert losses(one) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.slow
def test_a_lost_node_ends_the_other_within_a_minute(tmp_path: Path) -> None:
    port = free_port()
    nodes = [torchrun(tmp_path, processes=1, nodes=2, port=port, epochs=500) for _ in range(2)]
    with ended(*nodes):
        wait_for_epochs(tmp_path, 1, nodes[0])
        ranks = [next(iter(children(node))) for node in nodes]
        lost, left = (nodes[ranks.index(1)], nodes[ranks.index(0)])
        started = time.monotonic()
        for number in (lost.pid, *children(lost).values()):
            os.kill(number, signal.SIGKILL)
        output, _ = left.communicate(timeout=90)
        assert time.monotonic() - started < 60
    assert left.returncode != 0
    assert "another process of this run has ended" in output or "process 1 of 2 has been silent" in output


def test_devices_and_nodes_are_those_of_torchrun() -> None:
    check_launch(Launch(), 4, 1)
    check_launch(Launch(1, 4, 2), 1, 1)
    check_launch(Launch(1, 4, 2), 2, 2)
    with pytest.raises(ConfigError, match="2 nodes needs a launcher.*torchrun --nnodes 2 --nproc-per-node 4"):
        check_launch(Launch(), 4, 2)
    with pytest.raises(ConfigError, match="2 processes on each of 2 nodes, not --devices 4"):
        check_launch(Launch(0, 4, 2), 4, 1)
    with pytest.raises(ConfigError, match="not --nodes 3"):
        check_launch(Launch(0, 4, 2), 2, 3)


@pytest.mark.parametrize(
    "change",
    [{"RANK": None}, {"RANK": "2"}, {"WORLD_SIZE": "a"}, {"LOCAL_RANK": None}, {"LOCAL_WORLD_SIZE": "0"},
     {"LOCAL_WORLD_SIZE": "3"}, {"MASTER_ADDR": None}, {"MASTER_PORT": "x"}],
    ids=str,
)  # fmt: skip
def test_variables_of_torchrun_that_disagree_are_named(change: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launch() == Launch(1, 2, 2)
    for name, value in change.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=rf"variables of torchrun do not agree \(.*{name}={value or ''}"):
            launch()


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    with (
        pytest.raises(DeviceError, match="16 cannot be divided among 3 processes"),
        join_group(Launch(0, 3, 3), "cpu", 16),
    ):
        pass


def test_a_process_by_itself_decides_alone() -> None:
    with join_group(Launch(), "cpu", 16) as group:
        assert group.agree(lambda: 3) == 3
        group.check_key("a")
        group.one_after_another(lambda: pytest.fail("there is no other process"))
    assert Group(Launch()).launched.first


def test_weights_are_divided_only_among_processes_and_without_averages() -> None:
    recipe = Recipe(epochs=3, batch=32)
    check_shared(recipe, 2, False)
    with pytest.raises(ConfigError, match="start the run with torchrun"):
        check_shared(recipe, 1, False)
    with pytest.raises(ConfigError, match="recipe.ema=0"):
        check_shared(Recipe(epochs=3, batch=32, ema=0.9), 2, False)
    with pytest.raises(ConfigError, match="--shard and --compile"):
        check_shared(recipe, 2, True)


def ends(beating: list[int]) -> list[str]:
    """What process 0 of 3 says when only these others beat."""
    store: Any = distributed.HashStore()
    said, over, stop = list[str](), threading.Event(), threading.Event()

    def end(reason: str) -> None:
        said.append(reason)
        over.set()

    def beat() -> None:
        while not stop.wait(0.01):
            for rank in beating:
                store.add(str(rank), 1)

    thread = threading.Thread(target=beat)
    thread.start()
    with heartbeats(store, Launch(0, 3, 3), beat=0.05, silent=0.5, end=end):
        over.wait(SECONDS if len(beating) < 2 else 1.5)
    stop.set()
    thread.join()
    return said


def test_a_silent_process_ends_the_others() -> None:
    assert ends([1]) == ["process 2 of 3 has been silent for 0 seconds"]
    assert ends([1, 2]) == []


def test_a_process_that_has_ended_well_is_not_missed() -> None:
    store: Any = distributed.HashStore()
    said = list[str]()
    with heartbeats(store, Launch(1, 2, 2), beat=0.02, silent=0.1, end=said.append):
        pass
    assert store.add("1 has ended", 0) == 1
    with heartbeats(store, Launch(1, 2, 2), beat=0.02, silent=0.1, end=said.append):  # another group of this launch
        time.sleep(0.1)
        assert store.add("1 has ended", 0) == 0
    over = threading.Event()
    with heartbeats(store, Launch(0, 2, 2), beat=0.02, silent=0.1, end=said.append):
        over.wait(0.5)
    assert said == []


def test_batch_norm_counts_the_whole_batch_on_gpus() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert isinstance(sync_batchnorm(model, 1, torch.device("cuda"))[1], nn.BatchNorm2d)
    assert isinstance(sync_batchnorm(model, 2, torch.device("cpu"))[1], nn.BatchNorm2d)
    converted = sync_batchnorm(model, 2, torch.device("cuda"))
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert list(converted.state_dict()) == [
        "0.weight",
        "0.bias",
        *[f"1.{name}" for name in nn.BatchNorm2d(4).state_dict()],
    ]


@pytest.mark.parametrize(
    "further", [["--log", "csv"], pytest.param(["--devices", "2"], marks=pytest.mark.slow)], ids=str
)
def test_a_run_by_itself_takes_no_notice_of_a_scheduler_or_of_broken_variables(
    tmp_path: Path, further: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AROUND.items():
        monkeypatch.setenv(name, value)
    assert command([*TRAIN, "--set", "recipe.epochs=1", "--results", str(tmp_path), *further]) == 0
    assert [outcome["status"] for outcome in Results(tmp_path).outcomes()] == ["done"]
