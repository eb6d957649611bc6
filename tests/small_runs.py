"""Small picklable runs for the tests of the workers: each does its `action` and uses the real store."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch

from regard.core import ConfigError, DataError, DeviceError, StoreError
from regard.lab.results.lock import Busy
from regard.lab.results.results import Results
from regard.lab.train.execute import execute
from regard.lab.train.watch import Watch
from waiting import wait_until

ENVIRONMENT_ERRORS = {
    "disk": StoreError("cannot write"), "memory": MemoryError("2 GiB"), "package": ImportError("no timm"),
    "GPU": torch.OutOfMemoryError("CUDA out of memory"),
    "CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "devices": DeviceError("5 devices"),
}  # fmt: skip
RUN_ERRORS = {"data": DataError("images are missing"), "configuration": ConfigError("5 heads do not divide 64")}


@dataclass(frozen=True)
class Small:
    """action: "work", a key of ENVIRONMENT_ERRORS or RUN_ERRORS, "die" (killed), "die once", "wait" (for a minute),
    "hold" (the next number's lock, until that run was refused), "late" (when its lock is held) or "save" (when
    interrupted, but not before runs 0, 1 and 2 are interrupted).
    compile: the value of `Watch.compile` that it expects."""

    number: int
    action: str = "work"
    compile: bool = False

    @property
    def key(self) -> str:
        """12 hexadecimal digits."""
        return f"{self.number:012x}"

    def work(self, store: Results) -> dict[str, Any]:
        with store.lock(self.key) as folder:
            if (outcome := store.outcome(self.key)) is not None:
                return outcome
            with (folder / "run.json").open("a") as file:
                file.write(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\n")
            self._act(store, len((folder / "run.json").read_text().splitlines()))
            store.finish(self.key, {"status": "done", "metrics": {"top1": 1.0}, "seconds": 0.1})
        return store.outcome(self.key) or {}

    def _act(self, store: Results, attempt: int) -> None:
        errors = ENVIRONMENT_ERRORS | RUN_ERRORS
        if self.action in errors:
            raise errors[self.action]
        if self.action == "die" or (self.action == "die once" and attempt == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "hold":
            with store.lock(Small(self.number + 1).key):
                (store.root / "held").touch()
                wait_until((store.root / "refused").exists)
        if self.action == "wait":
            time.sleep(60)
        if self.action == "save":
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                (store.root / f"interrupted {self.number}").touch()
                for number in range(3):
                    wait_until((store.root / f"interrupted {number}").exists)
                (store.root / f"saved {self.number}").touch()
                raise


@execute.register
def work(run: Small, store: Results, devices: int = 1, *, watch: Watch | None = None) -> dict[str, Any]:
    """As `execute` of a run: under the lock, and nothing if it is finished."""
    assert watch is not None
    assert watch.compile is run.compile
    if run.action == "late":
        wait_until((store.root / "held").exists)
    try:
        return run.work(store)
    except Busy:
        (store.root / "refused").touch()
        raise
