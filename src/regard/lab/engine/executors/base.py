"""The interface of executors: `submit` jobs, `poll` for those that have ended, `cancel` one.

A place (`Local`, `RayCluster`, `Slurm`) is data: what a user chooses. `open` makes its executor, which holds processes
or connections. Executors keep no record: what was done is read from the store alone, so one may be lost at any time.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from regard.core import RegardError
from regard.lab.results.results import Results

if TYPE_CHECKING:
    from regard.lab.engine.jobs import Job

Handle = Hashable
"""What `submit` returns for a job: an object of the engine behind the executor."""

Ending = tuple[str, Mapping[str, Any] | None, str]
"""(state, outcome, text), as `JobResult` has them; the state "lost" is added: the job's machine is gone."""


class ClusterLost(RegardError):
    """The cluster does not answer any more. Finished work is kept."""


class Executor(ABC):
    """Executes jobs somewhere. queues: whether a submitted job may have to wait before it starts."""

    queues: ClassVar[bool] = False

    @abstractmethod
    def slots(self) -> int:
        """How many jobs can run at the same time now; on a cluster this changes with its nodes."""

    @abstractmethod
    def submit(self, jobs: "Sequence[Job]") -> list[Handle]:
        """Submit the first of these jobs, as many as are taken now; the handle of each."""

    @abstractmethod
    def poll(self, seconds: float) -> list[tuple[Handle, Ending]]:
        """The jobs that have ended and were not reported before. Waits until there is one, but not longer than
        `seconds`.

        Raises: ClusterLost.
        """

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Withdraw a job. If it runs, it saves a checkpoint and stops. It is not reported by `poll` any more."""

    @abstractmethod
    def close(self, stop: bool) -> None:
        """Release processes and connections. stop: jobs may still run; they save checkpoints and end."""


@runtime_checkable
class Place(Protocol):
    """Where runs are executed, as a user chooses it: a frozen dataclass."""

    @property
    def here(self) -> bool:
        """Whether runs are executed on this machine."""

    @property
    def nodes(self) -> int:
        """How many machines share each batch of a run."""

    def slots(self, devices: int) -> int:
        """How many runs of `devices` devices each are executed at the same time, to estimate times.

        Raises: as `open`.
        """

    def open(self, store: Results, devices: int, jobs: int) -> Executor:
        """An executor for so many jobs, each with `devices` devices.

        Raises: MissingExtra; ConfigError, DeviceError or StoreError if the place cannot execute them.
        """
