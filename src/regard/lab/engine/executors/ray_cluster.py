"""On a cluster of Ray: each run is a task with its CPUs, GPUs and memory.

Ray places tasks on nodes, starts and reuses worker processes there, and says when a task's process or node is gone.
Its own retries are off and its state is never needed: the store is the record, so a lost run is submitted again by
`run_jobs`, on another node, where it continues from its checkpoint. That needs a folder of results, and of data, which
all nodes share under the same path.
"""

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from regard.core import ConfigError, DeviceError, StoreError, require
from regard.core.allocator import ALLOCATOR
from regard.files.atomic import store_errors
from regard.lab.results import lock
from regard.lab.results.results import Results
from regard.lab.train.child_processes import THREADS

from .base import ClusterLost, Ending, Executor, Handle

ASK_SECONDS = 5.0
LOST_SECONDS = 20.0
"""After so many seconds without an answer of its head, a cluster counts as lost."""
STOP_SECONDS = 20.0
"""How long runs have to save checkpoints when the study is stopped."""
CHECK_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A cluster of Ray that runs already.

    address: HOST:PORT of its head, either the port of the head (6379), for a machine of the cluster, or that of Ray's
    client server (10001), for any machine that shares the folder of results; "" = the cluster of this machine, or that
    of the environment variable RAY_ADDRESS. cpus, memory: cores and GB of each run; 0 GB = not counted.
    Raises: ConfigError.
    """

    address: str = ""
    cpus: int = 1
    memory: float = 0.0
    here: ClassVar[bool] = False
    nodes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        host, colon, port = self.address.rpartition(":")
        if self.address and not (host and colon and port.isdecimal() and "@" not in host):
            raise ConfigError(
                f"the address of a cluster is ray://HOST:PORT, not '{without_password(f'ray://{self.address}')}'"
            )

    def slots(self, devices: int) -> int:
        """Runs at the same time on the nodes that are there now. Raises: as `open`."""
        connection = _Connection(self)
        try:
            return connection.slots(self, devices)
        finally:
            connection.close()

    def open(self, store: Results, devices: int, jobs: int) -> Executor:
        """Connect, and check that every node sees the folder of results.

        Raises: MissingExtra; ConfigError if there is no cluster; DeviceError if no node is large enough for a run;
        StoreError if a node does not see the folder.
        """
        connection = _Connection(self)
        try:
            if not connection.slots(self, devices):
                needed = f"{self.cpus} CPUs{f' and {devices} GPUs' if connection.gpus(devices) else ''}"
                raise DeviceError(f"no node of the cluster has the {needed} of a run ({connection.sizes()})")
            return RayTasks(self, connection, store, devices)
        except BaseException:
            connection.close()
            raise


class _Connection:
    """The connection of this process to a cluster. One that the caller's own code has made is used, and left open."""

    def __init__(self, place: RayCluster) -> None:
        require("ray", "cluster")
        require("grpc", "cluster")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reads it when it is imported

        import ray

        self.ray: Any = ray
        self.own = not ray.is_initialized()
        self.head = place.address or os.environ.get("RAY_ADDRESS", "auto").removeprefix("ray://").removeprefix("auto")
        if self.own:
            self._connect(self.head)
        self.head = self.head or str(ray.get_runtime_context().gcs_address)
        self.answered = time.monotonic()

    def _connect(self, head: str) -> None:
        kind = _service(head) if head else "head"
        if not kind:
            raise ConfigError(
                f"no Ray cluster answers at {without_password(head)}; `ray start --head` prints the address of its "
                "head, `ray status` on a node says whether it runs"
            )
        address = (f"ray://{head}" if kind == "client" else head) or "auto"
        for name in ("ray", "ray.util.client", "ray.util.client.logsclient"):
            logging.getLogger(name).disabled = True  # what matters is said in Regard's own lines
        try:
            self.ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no connection to the Ray cluster{f' at {head}' if head else ''}: "
                f"{_first_line(error)}; start one with `ray start --head`, or give its address: --on ray://HOST:PORT "
                "(port 6379 on a machine of the cluster, 10001 on another one)"
            ) from error

    def slots(self, place: RayCluster, devices: int) -> int:
        """How many runs fit on the nodes."""
        needed = {"CPU": float(place.cpus), "GPU": float(self.gpus(devices)), "memory": place.memory * 2**30}
        asked = [(name, amount) for name, amount in needed.items() if amount]
        return sum(
            int(min(node["Resources"].get(name, 0.0) // amount for name, amount in asked)) for node in self._nodes()
        )

    def gpus(self, devices: int) -> int:
        """GPUs of one run; none on a cluster without GPUs, as locally."""
        return devices if any(node["Resources"].get("GPU") for node in self._nodes()) else 0

    def sizes(self) -> str:
        """CPUs and GPUs of the nodes, as text."""
        resources = [node["Resources"] for node in self._nodes()]
        return ", ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in resources)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ask(self.ray.nodes) if node["Alive"]]

    def ask(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function of Ray returns. Such calls wait without end when the head is gone, so a thread makes them.

        Raises: ClusterLost; what the function raises.
        """
        answer: Future[Any] = Future()

        def call() -> None:
            try:
                answer.set_result(function(*arguments, **options))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        while not answer.done():
            wait([answer], timeout=ASK_SECONDS)
            if not answer.done():
                self.check_alive()
        return answer.result()

    def check_nodes(self, mark: Path) -> None:
        """Check that each node sees a file, and has this version of Regard. Raises: StoreError; ConfigError."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        check = self.ray.remote(num_cpus=0, max_retries=0)(_problem)
        tasks = {}
        for node in self._nodes():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            tasks[check.options(scheduling_strategy=there).remote(str(mark))] = node["NodeManagerHostname"]
        for task, host in tasks.items():
            try:
                problem = self.ray.get(task, timeout=CHECK_SECONDS)
            except self.ray.exceptions.RayError as error:
                raise ConfigError(f"node {host} cannot execute runs: {_first_line(error)}") from error
            if problem:
                raise StoreError(f"node {host} {problem}")

    def check_alive(self) -> None:
        """Raises: ClusterLost if the head has not answered for LOST_SECONDS."""
        if _service(self.head):
            self.answered = time.monotonic()
        elif time.monotonic() - self.answered > LOST_SECONDS:
            raise ClusterLost(
                f"the Ray cluster at {self.head} does not answer any more; finished work is kept, and the same command "
                "continues it on a new cluster"
            )

    def close(self) -> None:
        """Disconnect; not from a cluster that does not answer, since Ray would wait for it, also when Python ends."""
        if self.own and _service(self.head):
            self.ray.shutdown()
        elif self.own:
            atexit.unregister(self.ray.shutdown)


class RayTasks(Executor):
    """Jobs as tasks. All of them are submitted at once, so that nodes which are added later take their part."""

    queues: ClassVar[bool] = True

    def __init__(self, place: RayCluster, connection: _Connection, store: Results, devices: int) -> None:
        self.place, self.connection, self.devices, self.ray = place, connection, devices, connection.ray
        self.root = store.root.resolve()
        self.mark = self.root / f".cluster-{secrets.token_hex(8)}"
        with store_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.mark.touch()
        try:
            connection.check_nodes(self.mark)
        except BaseException:
            self.mark.unlink(missing_ok=True)
            raise
        self.task = self.ray.remote(max_retries=0)(_execute).options(
            num_cpus=place.cpus, num_gpus=connection.gpus(devices), memory=int(place.memory * 2**30) or None,
            runtime_env={"env_vars": _variables(place)},
        )  # fmt: skip
        self.running: dict[Handle, Any] = {}

    def slots(self) -> int:
        """Runs that fit on the nodes now; at least one, so that times can be estimated."""
        return max(self.connection.slots(self.place, self.devices), 1)

    def submit(self, jobs: Sequence[Any]) -> list[Handle]:
        """Submit all jobs."""
        further = str(self.root), self.devices, str(self.mark)
        tasks = [self.connection.ask(self.task.remote, job, *further) for job in jobs]
        self.running |= zip(tasks, tasks, strict=True)
        return tasks

    def poll(self, seconds: float) -> list[tuple[Handle, Ending]]:
        """See `Executor`."""
        self.connection.check_alive()
        if not self.running:
            return []
        tasks = list(self.running.values())
        try:
            ended, rest = self.connection.ask(self.ray.wait, tasks, num_returns=1, timeout=seconds)
            if ended and rest:
                ended += self.connection.ask(self.ray.wait, rest, num_returns=len(rest), timeout=0)[0]
        except ConnectionError:  # of Ray's client server; check_alive says so when it stays away
            time.sleep(seconds)
            return []
        return [(self.running.pop(task), self._ending(task)) for task in ended]

    def _ending(self, task: Any) -> Ending:
        errors = self.ray.exceptions
        try:
            return self.connection.ask(self.ray.get, task)
        except (errors.NodeDiedError, errors.ObjectLostError):
            return "lost", None, "its node is gone"
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.TaskCancelledError) as error:
            return "died", None, f"its worker was killed (out of memory?): {_first_line(error)}"
        except errors.RayError as error:
            return "stopped", None, _first_line(error)

    def cancel(self, handle: Handle) -> None:
        """Interrupt a task."""
        self.ray.cancel(self.running.pop(handle), force=False, recursive=False)

    def close(self, stop: bool) -> None:
        """Disconnect; tasks that still run save checkpoints first."""
        if stop and self.running and _service(self.connection.head):
            tasks = list(self.running.values())
            for task in tasks:
                self.ray.cancel(task, force=False, recursive=False)
            self.ray.wait(tasks, num_returns=len(tasks), timeout=STOP_SECONDS)
        self.connection.close()
        self.mark.unlink(missing_ok=True)


def without_password(address: str) -> str:
    """An address for messages: what stands before @, a user and a password, is hidden."""
    before, at, host = address.rpartition("@")
    scheme, slashes, _ = before.partition("://")
    return f"{f'{scheme}://' if slashes else ''}***@{host}" if at else address


def _execute(job: Any, root: str, devices: int, mark: str) -> Ending:
    """In a task: execute a job, unless this node, which may be new, does not see the folder of results."""
    if problem := _problem(mark):
        return "stopped", None, f"a node {problem}"
    from regard.lab.engine.jobs import execute_job

    return execute_job(job, root, devices, lock.LOST_SECONDS)


def _problem(mark: str) -> str:
    """In a task: what keeps this node from executing runs; "" if nothing does."""
    if Path(mark).exists():
        return ""
    return (
        f"does not see the folder {Path(mark).parent}; choose one that all nodes share under the same path: "
        "--results FOLDER"
    )


def _service(address: str) -> str:
    """What answers at an address: the "head" of a cluster, Ray's "client" server, or nothing, "".

    The head answers the standard health check of gRPC; the client server says that it does not know it.
    """
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5.0)
        except grpc.RpcError as error:
            return "client" if error.code() == grpc.StatusCode.UNIMPLEMENTED else ""
    return "head"


def _variables(place: RayCluster) -> dict[str, str]:
    """The environment of the workers: as of local ones, with this process's variables of Regard and path of modules."""
    own = {name: value for name, value in os.environ.items() if name.startswith("REGARD_") or name == "PYTHONPATH"}
    if (folder := os.getcwd()) in sys.path:  # for `--import`
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (own.get("PYTHONPATH"), folder)))
    return dict.fromkeys(THREADS, str(place.cpus)) | ALLOCATOR | own


def _first_line(error: BaseException) -> str:
    """The end of an error's first paragraph: Ray's texts are long."""
    return " ".join(str(error).strip().partition("\n")[0].split())[:300]
