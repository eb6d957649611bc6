"""The pool: work is done once, deaths stay small, and Ctrl-C leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from regard.lab.engine.executors import local
from regard.lab.engine.executors.local import Local
from regard.lab.engine.jobs import Job, execute_job
from regard.lab.engine.progress import Event, Progress
from regard.lab.engine.run_jobs import run_all
from regard.lab.results.results import Results
from regard.lab.train.signals import without_interrupts
from small_runs import ENVIRONMENT_ERRORS, RUN_ERRORS, Small
from waiting import wait_until

HERE = Path(__file__).parents[2]

DRIVE = """
import sys
sys.path.insert(0, sys.argv[2])
from small_runs import Small
from lab.engine.test_workers import jobs_of
from regard.lab.engine.progress import Progress
from regard.lab.results.results import Results
from regard.lab.engine.executors.local import Local
from regard.lab.engine.run_jobs import run_all
if __name__ == "__main__":
    action, number = sys.argv[3], int(sys.argv[4])
    print(run_all(jobs_of([action] * number), Results(sys.argv[1]), Local(workers=2), Progress(lambda event: None)))
"""


def jobs_of(actions: Sequence[str]) -> list[Job]:
    return [Job(Small(i, action), "s", "smoke", f"row {i}", 0) for i, action in enumerate(actions)]


def drive(tmp_path: Path, action: str, number: int) -> subprocess.Popen[str]:
    script = tmp_path / "drive.py"
    script.write_text(DRIVE)
    arguments = [sys.executable, str(script), str(tmp_path / "store"), str(HERE), action, str(number)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_runs(store: Path, number: int) -> list[int]:
    """Process ids of the runs that have begun."""

    def begun() -> list[int]:
        texts = [text for path in store.glob("*/run.json") if (text := path.read_text())]
        return [int(text.split()[0]) for text in texts] if len(texts) == number else []

    return wait_until(begun)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_runs_are_told_to_compile(tmp_path: Path, workers: int) -> None:
    job = Job(Small(1, compile=True), "s", "smoke", "row", 0, compile=True)
    assert run_all([job], Results(tmp_path), Local(workers=workers), Progress(lambda event: None))["done"] == 1


@pytest.mark.parametrize(
    ("gpus", "devices", "number"), [((), 1, 6), ((), 4, 1), ("0123", 1, 4), ("01234567", 8, 1), ("01", 4, 1)]
)
def test_one_run_a_gpu_or_a_core(monkeypatch, gpus: Sequence[str], devices: int, number: int) -> None:  # type: ignore
    monkeypatch.setattr(local, "usable_gpus", lambda: list(gpus))
    monkeypatch.setattr(local, "usable_cores", lambda: 6)
    assert local.usual_workers(devices) == number


@pytest.mark.parametrize(
    ("asked", "workers", "threads"),
    [("", 1, 6), ("", 4, 1), ("", 0, 6), ("1", 1, 1), ("4,2", 1, 4), ("8", 2, 3), ("0", 1, 6), ("many", 1, 6)],
)
def test_a_run_has_its_share_of_the_cores_or_what_the_user_asks_for(  # type: ignore
    monkeypatch, asked: str, workers: int, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(local, "usable_cores", lambda: 6)
    assert local.threads_of_a_run(workers) == threads


@pytest.mark.parametrize(
    ("named", "there", "usable"),
    [("", 2, ["0", "1"]), ("3, 5", 2, ["3", "5"]), ("0", 0, []), ("-1", 0, []), ("1,-1,0", 1, ["1"])],
)
def test_gpus_that_are_named_and_not_there_do_not_count(monkeypatch, named: str, there: int, usable: list[str]) -> None:  # type: ignore
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: there)
    assert local.usable_gpus() == usable


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_states_and_events(tmp_path: Path, workers: int) -> None:
    events: list[Event] = []
    store = Results(tmp_path)
    counts = run_all(jobs_of(["work", "data", "work"]), store, Local(workers=workers), Progress(events.append))
    assert counts == {"done": 2, "failed": 1, "stopped": 0, "died": 0, "busy": 0}
    assert store.outcome(Small(1).key)["error"] == "DataError: images are missing"  # type: ignore[index]
    assert store.outcome(Small(0).key)["row"] == "row 0"  # type: ignore[index]
    assert [event.kind for event in events if event.kind != "tick"].count("start") == 3
    assert events[-1].counts["waiting"] == 0


@pytest.mark.parametrize("action", [*ENVIRONMENT_ERRORS, *RUN_ERRORS])
def test_an_error_of_the_environment_is_no_result_and_one_of_the_run_is_one(tmp_path: Path, action: str) -> None:
    """The same command carries a run out when the environment is in order; a configuration that the model refuses is
    recorded once, and not tried again at every start."""
    store, events = Results(tmp_path), list[Event]()
    kind, state = ("stopped", "new") if action in ENVIRONMENT_ERRORS else ("failed", "failed")
    counts = run_all(jobs_of([action, "work"]), store, Local(workers=0), Progress(events.append))
    assert counts == {"done": 1, "failed": 0, "stopped": 0, "died": 0, "busy": 0} | {kind: 1}
    error = (ENVIRONMENT_ERRORS | RUN_ERRORS)[action]
    text = f"{type(error).__name__}: {error}"
    assert [event.text for event in events if event.kind == kind] == [text]
    assert store.status(Small(0).key) == state
    again = run_all(jobs_of(["work"]), store, Local(workers=0), Progress(events.append))
    assert again["done"] == (kind == "stopped")
    assert (store.outcome(Small(0).key) or {}).get("error") == (text if kind == "failed" else None)


def test_an_error_of_the_probes_stops_its_own_run_alone(tmp_path: Path) -> None:
    """`Small` is no run that has maps."""
    state, _, text = execute_job(Job(Small(0), "s", "smoke", "row", 0, probes=True), str(tmp_path))
    assert (state, text.partition(":")[0]) == ("stopped", "AttributeError")
    assert Results(tmp_path).status(Small(0).key) == "done"
    outcome = Results(tmp_path).outcome(Small(0).key) or {}
    assert (outcome["status"], outcome["study"], outcome["row"]) == ("done", "s", "row")


@pytest.mark.slow
def test_a_killed_worker_is_tried_again_and_the_others_go_on(tmp_path: Path) -> None:
    store = Results(tmp_path)
    counts = run_all(
        jobs_of(["die", "work", "die once", "work"]), store, Local(workers=2), Progress(lambda event: None)
    )
    assert counts == {"done": 3, "failed": 0, "stopped": 0, "died": 1, "busy": 0}
    assert store.status(Small(0).key) == "begun"  # resumable: no outcome, no living lock
    assert len((store.folder(Small(2).key) / "run.json").read_text().splitlines()) == 2


@pytest.mark.slow
def test_workers_share_the_cores(tmp_path: Path) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    run_all(jobs_of(["work"] * 2), Results(tmp_path), Local(workers=2), Progress(lambda event: None))
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    texts = [path.read_text().split() for path in tmp_path.glob("*/run.json")]
    assert [text[1] for text in texts] == [str(threads)] * 2
    assert os.environ.get("OMP_NUM_THREADS") == before


@pytest.mark.slow
def test_a_run_held_elsewhere_is_busy(tmp_path: Path) -> None:
    store = Results(tmp_path)
    with store.lock(Small(0).key):
        counts = run_all(jobs_of(["work", "work"]), store, Local(workers=0), Progress(lambda event: None))
    assert counts == {"done": 1, "failed": 0, "stopped": 0, "died": 0, "busy": 1}


@pytest.mark.slow
def test_a_run_held_by_another_worker_is_asked_for_again(tmp_path: Path) -> None:
    """As when a row is the start of another row, whose worker carries it out first."""
    events: list[Event] = []
    counts = run_all(jobs_of(["hold", "late", "work"]), Results(tmp_path), Local(workers=2), Progress(events.append))
    assert counts == {"done": 3, "failed": 0, "stopped": 0, "died": 0, "busy": 0}
    assert [event.row for event in events if event.kind == "start"].count("row 1") > 1
    assert events[-1].counts["waiting"] == events[-1].counts["running"] == 0


@pytest.mark.slow
def test_what_another_process_holds_to_the_end_is_busy(tmp_path: Path) -> None:
    events: list[Event] = []
    store = Results(tmp_path)
    with store.lock(Small(0).key), store.lock(Small(2).key):
        counts = run_all(jobs_of(["work"] * 4), store, Local(workers=2), Progress(events.append))
    assert counts == {"done": 2, "failed": 0, "stopped": 0, "died": 0, "busy": 2}
    assert events[-1].counts["waiting"] == events[-1].counts["running"] == 0


@pytest.mark.slow
def test_two_studies_at_once_do_every_run_once(tmp_path: Path) -> None:
    both = [drive(tmp_path, "work", 12) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    texts = [path.read_text().splitlines() for path in (tmp_path / "store").glob("*/run.json")]
    assert [len(text) for text in texts] == [1] * 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "status"), [(signal.SIGINT, "new"), (signal.SIGKILL, "begun")], ids=["ctrl-c", "kill -9"]
)
def test_no_worker_outlives_its_study(tmp_path: Path, sign: signal.Signals, status: str) -> None:
    """Of runs that were stopped before they trained nothing is left; what is killed cannot clear up."""
    process = drive(tmp_path, "wait", 2)
    pids = wait_for_runs(tmp_path / "store", 2)
    process.send_signal(sign)
    process.communicate(timeout=240)
    assert process.returncode != 0
    wait_until(lambda: not any(map(alive, pids)), seconds=20)
    assert [Results(tmp_path / "store").status(Small(i).key) for i in range(2)] == [status, status]


@pytest.mark.slow
def test_runs_that_are_stopped_save_at_the_same_time(tmp_path: Path) -> None:
    """One after the other, the last would begin to save when a scheduler has no patience left."""
    workers = local.Workers(Results(tmp_path), 3, 1)
    workers.submit(jobs_of(["save"] * 3))
    wait_for_runs(tmp_path, 3)
    workers.close(stop=True)
    assert sorted(path.name for path in tmp_path.glob("saved *")) == ["saved 0", "saved 1", "saved 2"]


def test_a_worker_that_starts_does_not_get_ctrl_c() -> None:
    """Its imports would end in a traceback."""
    shown = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with without_interrupts():
        child = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_a_worker_without_a_run_ends_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    worker = local.Worker(1)
    worker.interrupt()
    worker.stop()
    assert capfd.readouterr().err == ""
