"""Studies on Slurm, with submitit's local executor in the place of Slurm: arrays, preemption, jobs that die."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("submitit")

from lab.engine.clusters import EPOCHS, STUDY, results
from lab.engine.test_workers import jobs_of
from regard.core import ConfigError, StoreError
from regard.files.atomic import read_json
from regard.files.records import read_record, write_record
from regard.lab.engine.decide import decide
from regard.lab.engine.executors import find_place
from regard.lab.engine.executors.slurm import Slurm, SlurmCall, _Submitted, queue_states
from regard.lab.engine.progress import Event, Progress
from regard.lab.engine.run_jobs import run_all
from regard.lab.engine.run_study import planned_jobs, run_study
from regard.lab.engine.snapshot import write_snapshot
from regard.lab.results.results import Results
from two_processes import free_port
from waiting import wait_until

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
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
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
    start = [sys.executable, "-m", "regard", "study", "run", "quickstart", "--scale", "desk", "--rows", "w/o"]
    start += ["--seeds", "1", "--results", str(tmp_path)]
    lines = subprocess.run([*start, "--on", "print"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 1
    process = subprocess.Popen(lines[0], shell=True, start_new_session=True, stderr=subprocess.PIPE, text=True)
    begun = wait_until(lambda: [path for path in tmp_path.glob("*/metrics.csv") if path.read_text().count("\n") >= 3])
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=300)
    folder = begun[0].parent
    assert Results(tmp_path).status(folder.name) == "begun"
    kept = begun[0].read_text().splitlines()
    assert (folder / "last.ckpt").exists()
    subprocess.run(lines[0], shell=True, check=True, capture_output=True)
    assert Results(tmp_path).status(folder.name) == "done"
    assert begun[0].read_text().splitlines()[: len(kept) - 1] == kept[:-1]
    assert subprocess.run([*start, "--on", "print"], capture_output=True, check=True).stdout == b""


def call_on_a_node(root: str) -> None:
    """What each process of a job on several nodes does, for the first run of the study."""
    (job, *_) = planned_jobs(STUDY, "smoke", STUDY.runs("smoke", "*", 1))
    SlurmCall(job, root, 1, str(Path(root) / "ending.json"), nodes=2)()


@pytest.mark.slow
def test_a_run_on_two_nodes_learns_what_one_process_does(tmp_path: Path) -> None:
    """With the variables that Slurm sets in the processes of two nodes."""
    root = tmp_path / "slurm"
    code = f"from lab.engine.test_slurm import call_on_a_node; call_on_a_node({str(root)!r})"
    common = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2",
              "SLURM_JOB_NODELIST": "localhost", "SLURM_LOCALID": "0", "MASTER_PORT": str(free_port()),
              "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | common | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)},
        ) for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert read_record(root / "ending.json")["ending"][0] == "done"
    (run,) = root.glob("*/run.json")
    assert read_json(run)["devices"] == 2
    (job, *_) = planned_jobs(STUDY, "smoke", STUDY.runs("smoke", "*", 1))
    run_study(STUDY, "smoke", Results(tmp_path / "local"), seeds=1, workers=0, only=job.run.key)
    here, there = (Results(store).outcome(job.run.key) for store in (tmp_path / "local", root))
    assert here
    assert there
    assert there["study"] == here["study"]
    assert there["metrics"]["loss"] == pytest.approx(here["metrics"]["loss"], rel=1e-4)


def test_states_of_jobs_are_those_of_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--array*--jobs=12,13*) printf "12_0|RUNNING\\n 12_1|NODE_FAIL\\n";; esac'
    )
    program.chmod(0o755)
    assert queue_states(["12_0", "12_1", "13"]) == {"12_0": "RUNNING", "12_1": "NODE_FAIL", "13": "FORGOTTEN"}
    program.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert queue_states(["13"]) == {"13": "FORGOTTEN"}
    program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1")
    assert queue_states(["13"]) == {}, "no answer says nothing about the job"


@pytest.mark.parametrize(
    ("state", "kind"),
    [("RUNNING", None), ("COMPLETING", None), ("PREEMPTED", "lost"), ("NODE_FAIL", "lost"), ("CANCELLED", "stopped"),
     ("OUT_OF_MEMORY", "died"), ("COMPLETED", None)],
)  # fmt: skip
def test_how_a_job_without_a_result_ended(state: str, kind: str | None, tmp_path: Path) -> None:
    """A job that completed may have a file that this machine does not see yet."""
    job = SimpleNamespace(job_id="12", paths=SimpleNamespace(stderr="log"))
    ending = _Submitted(job, tmp_path / "none.json").ending(state, False)
    assert (ending and ending[0]) == kind


@pytest.mark.parametrize("content", [["fine", None, ""], ["done", None], 5])
def test_a_damaged_ending_is_named(content: object, tmp_path: Path) -> None:
    write_record(tmp_path / "ending.json", {"ending": content})
    with pytest.raises(StoreError, match="is damaged"):
        _Submitted(SimpleNamespace(job_id="12"), tmp_path / "ending.json").ending("", True)


def test_options_reach_the_scheduler() -> None:
    options = [("partition", "gpu"), ("gpus-per-node", "2"), ("timeout_min", "600"), ("array_parallelism", "8")]
    place = find_place("slurm", cpus=4, memory=16.0, options=options)
    assert place.parameters(1) == {
        "timeout_min": 600, "cpus_per_task": 4, "mem_gb": 16.0, "gpus_per_node": 2, "slurm_partition": "gpu",
        "slurm_array_parallelism": 8,
    }  # fmt: skip
    assert place.slots(1) == 8
    assert Slurm().parameters(8)["gpus_per_node"] == 8
    several = find_place("slurm", nodes=4)
    assert several.parameters(8) | {"nodes": 4, "tasks_per_node": 8, "gpus_per_node": 8} == several.parameters(8)


def programs(folder: Path, sbatch: str = "") -> str:
    """A PATH on which only srun and sbatch are, with this script."""
    folder.mkdir()
    for name, text in (("srun", ""), ("sbatch", sbatch)):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_an_account_keeps_its_zeros_and_flags_have_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = f"cp $1 {tmp_path}/script; echo Submitted batch job 1"
    monkeypatch.setenv("PATH", f"{programs(tmp_path / 'bin', sbatch)}:/bin")
    place = Slurm(options=(("account", "0042"), ("exclusive", "True"), ("use_srun", "False")))
    place.open(Results(tmp_path / "results"), 1, 1).submit(jobs_of(["work"]))
    script = (tmp_path / "script").read_text()
    assert "#SBATCH --account=0042\n" in script
    assert "#SBATCH --exclusive\n" in script
    assert "srun" not in script


@pytest.mark.parametrize(
    ("sbatch", "options", "message"),
    [
        (None, (), "no Slurm .* --on print"),
        ("", (("partitoin", "gpu"),), "--slurm: .*partitoin"),
        ("", (("gpus_per_node", "two"),), "--slurm: .*gpus_per_node"),
        ("echo 'invalid account' >&2; exit 1", (), "Slurm did not take the jobs.*invalid account"),
    ],
    ids=["no Slurm", "unknown option", "no number", "sbatch refuses"],
)
@pytest.mark.parametrize("deciding", [False, True], ids=["fixed seeds", "decide"])
def test_of_a_refused_study_nothing_is_left(
    sbatch: str | None, options: tuple[tuple[str, str], ...], message: str, deciding: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "" if sbatch is None else f"{programs(tmp_path / 'bin', sbatch)}:/bin")
    store, place = Results(tmp_path / "results"), Slurm(options=options)
    desk = replace(STUDY, settings={"desk": STUDY.settings["smoke"]})
    work = partial(decide, desk, "desk", tune=False) if deciding else partial(run_study, STUDY, "smoke")
    with pytest.raises((ConfigError, StoreError), match=message):
        work(store, place=place)
    assert not store.root.exists()


def test_a_refused_study_keeps_the_results_that_it_was_to_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Results(tmp_path)
    (key, *_) = (run.key for _, run in STUDY.runs("smoke"))
    store.finish(key, {"status": "failed", "error": "none", "metrics": {}})
    write_snapshot(STUDY, "smoke", store)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setenv("PATH", "")
    for again in ({"fresh": True}, {"retry": True}):
        with pytest.raises(ConfigError, match="no Slurm"):
            run_study(STUDY, "smoke", store, place=Slurm(), **again)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("array-parallelism", "2"), ("array_parallelism", "3")], "--slurm array_parallelism is given twice"),
        ([("cpus_per_task", "2")], "set by --cpus"),
        ([("nodes", "2")], "set by --nodes"),
        ([("array_parallelism", "0")], "whole numbers from 1 on"),
        ([("timeout_min", "-5")], "whole numbers from 1 on"),
    ],
)
def test_options_that_slurm_would_take_in_another_sense_are_refused(
    options: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Slurm(options=tuple(options)).parameters(1)
