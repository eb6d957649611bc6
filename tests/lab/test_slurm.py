"""Studies on Slurm, with submitit's local executor in the place of Slurm: arrays, preemption, jobs that die."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from lab.clusters import EPOCHS, STUDY, results
from lab.test_workers import jobs_of
from regard.core import ConfigError
from regard.lab.executors import find_place
from regard.lab.executors.slurm import Slurm
from regard.lab.progress import Event, Progress
from regard.lab.run_jobs import run_all
from regard.lab.run_study import run_study
from regard.store.results import Results

PLACE = Slurm(scheduler="local")


def processes(root: Path) -> dict[str, int]:
    """The process that holds the lock of each run."""
    import json

    return {path.parent.name: json.loads(path.read_text() or "{}").get("pid", 0) for path in root.glob("*/lock")}


@pytest.mark.slow
def test_a_preempted_run_saves_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """SIGUSR2 to the process of a run, as Slurm sends it to all processes of a job step."""
    events: list[Event] = []
    preempted: list[str] = []

    def watch(event: Event) -> None:
        events.append(event)
        for key, pid in processes(tmp_path / "slurm").items():
            epochs = tmp_path / "slurm" / key / "metrics.csv"
            if not preempted and epochs.exists() and 2 <= len(epochs.read_text().splitlines()) < EPOCHS - 5:
                preempted.append(key)
                os.kill(pid, signal.SIGUSR2)

    store = Results(tmp_path / "slurm")
    counts = run_study(STUDY, "smoke", store, seeds=1, place=PLACE, watch=watch)
    assert counts == {"done": 2, "failed": 0, "stopped": 0, "died": 0, "busy": 0}
    assert len(preempted) == 1
    assert [event.kind for event in events].count("start") == 2, "the scheduler repeats the job, not the study"
    logs = "".join(path.read_text() for path in (tmp_path / "slurm" / "slurm").rglob("*_log.err"))
    assert logs.count("Caught signal SIGUSR2") == 1
    (folder,) = (tmp_path / "slurm" / "slurm").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    run_study(STUDY, "smoke", Results(tmp_path / "local"), seeds=1, workers=0)
    assert results(tmp_path / "slurm") == results(tmp_path / "local")


@pytest.mark.slow
def test_a_job_that_dies_is_tried_again_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    store, events = Results(tmp_path), list[Event]()
    counts = run_all(jobs_of(["die", "work", "die once", "disk"]), store, PLACE, Progress(events.append))
    assert counts == {"done": 2, "failed": 0, "stopped": 1, "died": 1, "busy": 0}
    texts = {event.kind: event.text for event in events}
    assert texts["stopped"] == "StoreError: cannot write"
    assert texts["died"].startswith("its job ")
    assert ".err" in texts["died"]


@pytest.mark.slow
def test_sigterm_to_a_plain_job_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """One line of --on print, as the command of a batch script."""
    import subprocess
    import sys

    start = [sys.executable, "-m", "regard", "study", "run", "quickstart", "--scale", "desk", "--rows", "w/o"]
    start += ["--seeds", "1", "--results", str(tmp_path)]
    lines = subprocess.run([*start, "--on", "print"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 1
    process = subprocess.Popen(lines[0], shell=True, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (begun := list(tmp_path.glob("*/metrics.csv"))) or len(begun[0].read_text().splitlines()) < 3:
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    folder = begun[0].parent
    assert Results(tmp_path).status(folder.name) == "begun"
    kept = begun[0].read_text().splitlines()
    assert (folder / "last.ckpt").exists()
    subprocess.run(lines[0], shell=True, check=True, capture_output=True)
    assert Results(tmp_path).status(folder.name) == "done"
    assert begun[0].read_text().splitlines()[: len(kept) - 1] == kept[:-1]
    assert subprocess.run([*start, "--on", "print"], capture_output=True, check=True).stdout == b""


def test_options_reach_the_scheduler() -> None:
    options = [("partition", "gpu"), ("gpus-per-node", "2"), ("timeout_min", "600"), ("array_parallelism", "8")]
    place = find_place("slurm", cpus=4, memory=16.0, options=options)
    assert isinstance(place, Slurm)
    assert place.parameters(1) == {
        "timeout_min": 600, "cpus_per_task": 4, "mem_gb": 16.0, "gpus_per_node": 2, "slurm_partition": "gpu",
        "slurm_array_parallelism": 8,
    }  # fmt: skip
    assert place.slots(1) == 8
    assert Slurm().parameters(8)["gpus_per_node"] == 8


def test_a_machine_without_slurm_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no Slurm .* --on print"):
        Slurm().open(Results(tmp_path), 1, 1)
    assert not list(tmp_path.iterdir())


def test_an_option_that_slurm_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for option in (("partitoin", "gpu"), ("gpus_per_node", "two")):
        with pytest.raises(ConfigError, match=f"--slurm: .*{option[0]}"):
            Slurm(options=(option,)).open(Results(tmp_path / "results"), 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("array-parallelism", "2"), ("array_parallelism", "3")], "--slurm array_parallelism is given twice"),
        ([("cpus_per_task", "2")], "by --cpus or --memory"),
        ([("array_parallelism", "0")], "whole numbers from 1 on"),
        ([("timeout_min", "-5")], "whole numbers from 1 on"),
    ],
)
def test_options_that_slurm_would_take_in_another_sense_are_refused(
    options: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Slurm(options=tuple(options)).parameters(1)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("slrum", {}, "did you mean slurm"),
        ("slurm", {"workers": 2}, "--on slurm takes --cpus and --memory and --slurm: leave out --workers"),
        ("ray", {"options": [("partition", "gpu")]}, "leave out --slurm"),
        ("local", {"cpus": 2}, "--on local takes --workers: leave out --cpus"),
        ("slurm://head", {}, "there is no place 'slurm://head'"),
    ],
)
def test_places_and_options_that_do_not_fit_are_refused(word: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place(word, **options)  # type: ignore[arg-type]
