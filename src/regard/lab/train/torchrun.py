"""One run in the processes that `torchrun` started, on one node or many: each executes the same command.

The first process alone locks and writes the store, and reports; the others follow its decisions. Batches are divided as
on the devices of one machine (`distributed`). A process that dies or hangs ends all others within a minute: torchrun
ends those of its own node, heartbeats those of the others.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

from regard.core import ConfigError, DataError, DeviceError, RegardError
from regard.lab.results.lock import Busy

from .child_processes import without_launcher
from .distributed import check_number
from .environment import make_fabric, quiet_lightning

BEAT_SECONDS = 5.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The number of this process and how many there are, of all and of those on its node."""
SILENT_SECONDS = 40.0
"""A process that has not renewed its heartbeat for so long counts as dead."""

Value = TypeVar("Value")


class FirstFailed(RegardError):
    """The first process, which reports why, has failed."""


@dataclass(frozen=True)
class Launch:
    """What torchrun says of this process. rank: among all `processes`; local: of which are on this node."""

    rank: int = 0
    processes: int = 1
    local: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes, which all have the same number of processes."""
        return self.processes // self.local

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def environment(self) -> AbstractContextManager[None]:
        """The variables of torchrun for its processes; for a process by itself none of a launcher's."""
        return nullcontext() if self.processes > 1 else without_launcher()


def launch() -> Launch:
    """How this process was started; by itself without torchrun. Raises: ConfigError for variables that disagree."""
    if not distributed.is_torchelastic_launched():
        return Launch()
    given = [os.environ.get(name, "") for name in VARIABLES]
    rank, processes, here, local = (int(value) if re.fullmatch("[0-9]{1,9}", value) else -1 for value in given)
    reachable = os.environ.get("MASTER_ADDR") and re.fullmatch("[0-9]{1,5}", os.environ.get("MASTER_PORT", ""))
    counted = 0 <= rank < processes and 0 <= here < local and processes % local == 0
    if not counted or (processes > 1 and not reachable):
        said = " ".join(f"{name}={os.environ.get(name, '')}" for name in (*VARIABLES, "MASTER_ADDR", "MASTER_PORT"))
        raise ConfigError(
            f"TORCHELASTIC_RUN_ID is set, but the variables of torchrun do not agree ({said}); start the run with "
            "torchrun, or unset TORCHELASTIC_RUN_ID"
        )
    return Launch(rank, processes, local)


def check_launch(launched: Launch, devices: int, nodes: int) -> None:
    """Compare --devices and --nodes, which torchrun decides, with what it started. Raises: ConfigError."""
    if launched.processes == 1 and nodes > 1:
        raise ConfigError(
            f"a run on {nodes} nodes needs a launcher: run this on every node: torchrun --nnodes {nodes} "
            f"--nproc-per-node {devices} --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m regard train ..."
        )
    for name, value, started in (("devices", devices, launched.local), ("nodes", nodes, launched.nodes)):
        if launched.processes > 1 and value not in (1, started):
            raise ConfigError(f"torchrun started {launched.local} processes on each of {launched.nodes} nodes, "
                              f"not --{name} {value}: leave --{name} out")  # fmt: skip


class Group:
    """The processes of a run; a process by itself is a group of one."""

    def __init__(self, launched: Launch, fabric: Any = None) -> None:
        self.launched, self.fabric = launched, fabric

    def agree(self, decide: Callable[[], Value]) -> Value:
        """What `decide` returns in the first process, in all of them. Raises: what it raises; FirstFailed elsewhere."""
        if self.fabric is None:
            return decide()
        if not self.launched.first:
            value, error, busy = self.fabric.broadcast(None)
            if error:
                raise Busy(error) if busy else FirstFailed(error)
            return value
        try:
            value = decide()
        except RegardError as error:
            self.fabric.broadcast((None, str(error), isinstance(error, Busy)))
            raise
        self.fabric.broadcast((value, "", False))
        return value

    def check_key(self, key: str) -> None:
        """Raises: DataError if another process has another key: its node has other data or another version."""
        first = self.agree(lambda: key)
        if first != key:
            raise DataError(
                f"process {self.launched.rank} has run {key}, the first process run {first}: all nodes need the same "
                "data, options and version of regard"
            )

    def one_after_another(self, prepare: Callable[[], Any]) -> None:
        """Call `prepare` in one process of each node, then in the others, which find what it left in the cache."""
        if self.fabric is None:
            return
        if self.fabric.local_rank == 0:
            prepare()
        self.fabric.barrier()
        if self.fabric.local_rank:
            prepare()


@contextmanager
def join_group(launched: Launch, device: str, batch: int) -> Iterator[Group]:
    """The group of this process, with heartbeats while the block runs.

    Raises: DeviceError if a batch cannot be divided among the processes, the node has fewer GPUs than processes, or
    another process has ended.
    """
    if launched.processes == 1:
        yield Group(launched)
        return
    if batch % launched.processes:
        raise DeviceError(f"a batch of {batch} cannot be divided among {launched.processes} processes of torchrun")
    if device != "cpu" and torch.cuda.is_available():
        check_number(launched.local, torch.cuda.device_count())
    quiet_lightning()
    with _peer_errors():
        group = Group(launched, fabric_of(launched, device, "32-true"))
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=SILENT_SECONDS),
        )  # fmt: skip
        with heartbeats(distributed.PrefixStore("regard", store), launched):
            yield group


def fabric_of(
    launched: Launch, device: str, precision: str, strategy: Any = None, loggers: tuple[Any, ...] = ()
) -> Any:
    """A launched Fabric for these processes. strategy: DDP unless given."""
    from lightning_fabric.strategies import DDPStrategy

    fabric = make_fabric(device, launched.local, precision, loggers, strategy or DDPStrategy(), launched.nodes)
    fabric.launch()
    return fabric


@contextmanager
def heartbeats(
    store: Any,
    launched: Launch,
    beat: float = BEAT_SECONDS,
    silent: float = SILENT_SECONDS,
    end: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Say to the other processes that this one lives, and end it when one of them has been silent for too long.

    store: of torch.distributed. beat, silent: seconds. end: called with the message, instead of ending the process.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(store, launched, beat, silent, stop, end or _end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(beat)


def _beat(
    store: Any, launched: Launch, beat: float, silent: float, stop: threading.Event, end: Callable[[str], None]
) -> None:
    others = [rank for rank in range(launched.processes) if rank != launched.rank]
    seen = dict.fromkeys(others, (0, 0))  # the counter of each, and for how many beats it has stood still
    try:
        store.set(f"{launched.rank} has ended", "0")  # an earlier group of this launch had its own end
        while not stop.wait(beat):
            store.add(str(launched.rank), 1)
            for rank, (before, still) in seen.items():
                count = store.add(str(rank), 0)
                seen[rank] = (count, still + 1 if count == before else 0)
                if seen[rank][1] * beat > silent and store.add(f"{rank} has ended", 0) == 0:
                    end(f"process {rank} of {launched.processes} has been silent for {silent:.0f} seconds")
                    return
        store.add(f"{launched.rank} has ended", 1)
    except (RuntimeError, OSError) as error:  # the store is in torchrun's process of the first node
        if not stop.is_set():
            end(f"torchrun of the first node cannot be reached ({str(error).splitlines()[0][:100]})")


def _end(reason: str) -> NoReturn:
    print(f"regard: {reason}; this process ends too. The same command continues from the last checkpoint",
          file=sys.stderr, flush=True)  # fmt: skip
    os._exit(1)


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Name the cause of errors of communication: another process has ended. Raises: DeviceError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0] if str(error) else ""
        if not isinstance(error, distributed.DistError) and "gloo" not in text and "NCCL" not in text:
            raise
        raise DeviceError(
            f"another process of this run has ended, or cannot be reached; its own message tells why ({text[:120]})"
        ) from error
