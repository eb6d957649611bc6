"""On a cluster with Slurm, through submitit: an array of jobs, one for each run.

submitit writes the batch script, submits it and queues a job again. It stores the function that a job calls as a
pickle, in a new folder below the results that only its user may enter; the command that submits reads no pickle back: a
job says how it ended in a small JSON file, and the store has the rest. Of jobs that wrote no such file squeue tells the
state, also where Slurm keeps no accounts.
"""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from regard.core import ConfigError, StoreError, require
from regard.files.atomic import store_errors
from regard.files.records import read_record, write_record
from regard.lab.engine.progress import STATES
from regard.lab.results.lock import LOST_SECONDS
from regard.lab.results.results import Results

from .base import Ending, Executor, Handle

SHARED = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "nodes", "tasks_per_node", "stderr_to_stdout")
"""submitit's names of what every scheduler has; all others are Slurm's own."""
NUMBERS = (
    "timeout_min", "time", "cpus_per_gpu", "gpus_per_node", "gpus_per_task", "num_gpus", "ntasks_per_node",
    "signal_delay_s", "array_parallelism",
)  # fmt: skip
"""submitit's parameters that are numbers; digits of others, such as an account 0042, are text."""
FLAGS = {"True": True, "False": False}
"""Values of parameters without a value, such as exclusive=True."""
OWN_OPTIONS = {"cpus_per_task": "--cpus", "mem_gb": "--memory", "nodes": "--nodes", "tasks_per_node": "--devices"}
"""Names that other options of the command line set."""
ARRAY = 1000
"""Largest number of jobs in one array; Slurm's default limit is 1001."""
DEFAULT_MINUTES = 60
"""The time limit of a job. A job that reaches it saves and is queued again."""
REQUEUES = 1000
LOOK_SECONDS = 10.0
"""So often squeue is asked."""
LOST = {"NODE_FAIL": "its node failed", "BOOT_FAIL": "its node failed", "PREEMPTED": "another job took its place"}
"""Slurm's states of jobs that ended for no reason of their own: the run is tried again, from its checkpoint."""
ENDED = (*LOST, "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT")
"""Slurm's states of jobs that do not go on."""
FORGOTTEN = "FORGOTTEN"
"""Our state for a job that squeue does not know any more: it ended minutes ago."""
VISIBLE_SECONDS = 60.0
"""So long after the end of a job its files may be unseen on another machine of a shared file system."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The Slurm of this machine, a login node. cpus, memory: cores of each process and GB of each node; 0 GB = Slurm's
    default. nodes: of each run; on several, one process for each device trains, as torchrun would start them.

    options: (name, value) of sbatch, such as ("partition", "gpu"), or submitit's timeout_min, gpus_per_node, ...; the
    value of a flag is "True".
    scheduler: submitit's name, "local" in tests.
    """

    cpus: int = 1
    memory: float = 0.0
    nodes: int = 1
    options: tuple[tuple[str, str], ...] = ()
    scheduler: str = "slurm"
    here: ClassVar[bool] = False

    def slots(self, devices: int) -> int:
        """Jobs of an array that may run at the same time; when they do is the scheduler's decision."""
        return int(self.parameters(devices)["slurm_array_parallelism"])

    def parameters(self, devices: int) -> dict[str, Any]:
        """The arguments of submitit. Raises: ConfigError for a name given twice, and for cores, memory and numbers that
        do not belong here.
        """
        limits = {"timeout_min": DEFAULT_MINUTES, "slurm_array_parallelism": 256}
        chosen: dict[str, Any] = {"cpus_per_task": self.cpus, **limits}
        chosen |= {"mem_gb": self.memory} if self.memory else {}
        chosen |= {"gpus_per_node": devices} if devices > 1 else {}
        chosen |= {"nodes": self.nodes, "tasks_per_node": devices} if self.nodes > 1 else {}
        names = [name.strip().replace("-", "_") for name, _ in self.options]
        for name, (_, value) in zip(names, self.options, strict=True):
            if name in OWN_OPTIONS:
                raise ConfigError(f"--slurm {name} is set by {OWN_OPTIONS[name]}: give that option instead")
            if names.count(name) > 1:
                raise ConfigError(f"--slurm {name} is given twice: keep one")
            read = int(value) if name in NUMBERS and value.isdecimal() else FLAGS.get(value, value)
            chosen[name if name in SHARED else f"slurm_{name}"] = read
        if not all(isinstance(chosen[name], int) and chosen[name] for name in limits):
            raise ConfigError("--slurm array_parallelism and timeout_min (minutes) are whole numbers from 1 on")
        return chosen

    def open(self, store: Results, devices: int, jobs: int) -> Executor:
        """Raises: MissingExtra; ConfigError without Slurm, or for an option that it does not have."""
        require("submitit", "cluster")
        if self.scheduler == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
            raise ConfigError(
                "this machine has no Slurm (no sbatch): run the command on a login node of the cluster, or take --on "
                "print, which prints one command for each run, for any scheduler"
            )
        return SlurmJobs(self, store, devices)


class SlurmJobs(Executor):
    """Jobs as elements of arrays."""

    queues: ClassVar[bool] = True

    def __init__(self, place: Slurm, store: Results, devices: int) -> None:
        import submitit

        self.store, self.devices, self.place = store, devices, place
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.folder = store.root.resolve() / "slurm" / name
        self.endings = self.folder / "endings"
        """Of jobs that have ended, the files that say how: one look at this folder is one at all jobs."""
        self.used = False
        self.jobs: dict[Handle, _Submitted] = {}
        self.states: Mapping[str, str] = {}
        self.looked = -LOOK_SECONDS
        limit = {f"{place.scheduler}_max_num_timeout": REQUEUES}
        self.executor = submitit.AutoExecutor(self.folder, cluster=place.scheduler, **limit)
        try:
            self.executor.update_parameters(name="regard", **place.parameters(devices))
        except (ValueError, TypeError, NameError, AssertionError) as error:
            raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from error

    def slots(self) -> int:
        """See `Slurm.slots`."""
        return self.place.slots(self.devices)

    def submit(self, jobs: Sequence[Any]) -> list[Handle]:
        """Submit an array. Raises: StoreError if Slurm refuses it."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        from regard.lab.train.child_processes import process_environment

        if not jobs:
            return []
        with store_errors(self.folder):
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            self.folder.chmod(0o700)  # submitit may have made it
            self.endings.mkdir(exist_ok=True)
        calls, root = [], str(self.store.root.resolve())
        for job in jobs[:ARRAY]:
            result = self.endings / f"{secrets.token_hex(8)}.json"
            calls.append(SlurmCall(job, root, self.devices, str(result), self.place.nodes))
        try:
            with process_environment(self.place.cpus), self.executor.batch():  # a job inherits this environment
                handles = [self.executor.submit(call) for call in calls]
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            self._remove_unused()
            raise StoreError(f"Slurm did not take the jobs: {' '.join(str(error).split())}") from error
        self.used = True
        for handle, call in zip(handles, calls, strict=True):
            self.jobs[handle] = _Submitted(handle, Path(call.result))
        return list(handles)

    def _remove_unused(self) -> None:
        """Remove the folder, of which Slurm took no job."""
        if not self.used:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # of other studies
                self.folder.parent.rmdir()

    def poll(self, seconds: float) -> list[tuple[Handle, Ending]]:
        """See `Executor`."""
        until = time.monotonic() + seconds
        while True:
            self._look()
            with store_errors(self.endings, "read"):
                written = set(os.listdir(self.endings)) if self.jobs else set()
            endings = [
                (handle, ending) for handle, job in self.jobs.items()
                if (ending := job.ending(self.states.get(job.number, ""), job.result.name in written)) is not None
            ]  # fmt: skip
            if endings or time.monotonic() >= until:
                break
            time.sleep(min(seconds, 0.2))
        for handle, _ in endings:
            del self.jobs[handle]
        return endings

    def _look(self) -> None:
        """Ask for the states of jobs, but not too often: the scheduler answers all users of the cluster."""
        if time.monotonic() - self.looked < LOOK_SECONDS or not self.jobs:
            return
        if self.place.scheduler == "slurm":
            self.states = queue_states([job.number for job in self.jobs.values()]) or self.states
        else:
            self.states = {job.number: str(job.job.state) for job in self.jobs.values() if job.job.done()}
        self.looked = time.monotonic()

    def cancel(self, handle: Handle) -> None:
        """scancel: a job that runs gets SIGTERM first, and saves."""
        self.jobs.pop(handle).job.cancel(check=False)

    def close(self, stop: bool) -> None:
        """Cancel the jobs that are left."""
        for handle in list(self.jobs):
            self.cancel(handle)


class _Submitted:
    """A job of submitit, and the file in which it says how it ended."""

    def __init__(self, job: Any, result: Path) -> None:
        self.job, self.result = job, result
        self.over: float | None = None

    @property
    def number(self) -> str:
        """Of the job: 12, or 12_3 in an array."""
        return str(self.job.job_id)

    def ending(self, state: str, written: bool) -> Ending | None:
        """How the job ended; None as long as it has not. state: what the scheduler says, "" if it does not know yet.

        written: whether the job has said how it ended.
        """
        if written:
            match read_record(self.result).get("ending"):
                case [str(ended), dict() | None as outcome, str(text)] if ended in STATES:
                    return ended, outcome, text
            raise StoreError(f"{self.result} is damaged: delete it, and repeat the command")
        if state not in (*ENDED, FORGOTTEN, "FINISHED"):
            self.over = None
            return None
        self.over = self.over or time.monotonic()
        if state == "CANCELLED":
            return "stopped", None, f"its job {self.number} was cancelled"
        if state in LOST:
            return "lost", None, LOST[state]
        if state in ("COMPLETED", "FINISHED", FORGOTTEN) and time.monotonic() - self.over < VISIBLE_SECONDS:
            return None
        return "died", None, f"its job {self.number} ended as {state}; log: {self.job.paths.stderr}"


def queue_states(numbers: Collection[str]) -> dict[str, str]:
    """Slurm's state of each job (12, or 12_3 of an array); empty if the scheduler does not answer."""
    arrays = {number.partition("_")[0] for number in numbers}
    jobs = f"--jobs={','.join(sorted(arrays))}"
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T", jobs]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return {}
    known = dict(line.strip().split("|", 1) for line in answer.stdout.splitlines() if "|" in line)
    return {number: known.get(number, FORGOTTEN) for number in numbers}


class SlurmCall:
    """What a job calls: execute one run, and write how it ended.

    SIGUSR2 comes before the time limit and, if the cluster is set up so, at preemption: the run saves a checkpoint, and
    the job is queued again. SIGTERM (scancel, other preemption): the run saves, and the job ends. On several nodes each
    process of the job calls this, and the first one writes.
    """

    def __init__(self, job: Any, root: str, devices: int, result: str, nodes: int = 1) -> None:
        self.job, self.root, self.devices, self.result, self.nodes = job, root, devices, result, nodes

    def __call__(self) -> None:
        """Raises: KeyboardInterrupt after SIGTERM; SystemExit after SIGUSR2."""
        from regard.lab.engine.jobs import execute_job
        from regard.lab.train.signals import handle_signals, interrupt
        from regard.lab.train.torchrun import launch

        if self.nodes > 1:
            act_as_torchrun()
        requeue: Any = signal.getsignal(signal.SIGUSR2)  # submitit's handler: it calls `checkpoint`, queues and exits
        received: list[int] = []

        def save(number: int, frame: object) -> None:
            received.append(number)
            signal.raise_signal(signal.SIGTERM)

        try:
            with handle_signals(interrupt, signal.SIGTERM), handle_signals(save, signal.SIGUSR2):
                ending = execute_job(self.job, self.root, self.devices, LOST_SECONDS)
        except KeyboardInterrupt:
            if received:
                requeue(received[0], None)
            raise
        if launch().first:
            write_record(self.result, {"ending": list(ending)})

    def checkpoint(self) -> Any:
        """What submitit queues: the same call, which continues from the run's checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def act_as_torchrun() -> None:
    """Set what torchrun would set in this process of a job on several nodes; submitit knows it from Slurm."""
    from submitit import JobEnvironment
    from submitit.helpers import TorchDistributedEnvironment

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    job = JobEnvironment()
    os.environ |= {"GROUP_RANK": str(job.node), "TORCHELASTIC_RUN_ID": str(job.job_id)}
