"""Passes that are timed in turns (A B C A B C ...): CPU seconds of the process, or CUDA events."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import cast

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_ROUNDS = 2000
ROUNDS = 5
"""Of every pass, at least."""


@dataclass(frozen=True)
class Pass:
    """One pass: seconds, of which in the kernel, and page faults; 0 faults where the system does not count them."""

    seconds: float
    system: float
    faults: int


@dataclass(frozen=True)
class Summary:
    """Of the passes of one candidate: median and quartiles of seconds, faults a pass, share of time in the kernel."""

    median: float
    low: float
    high: float
    rounds: int
    faults: float
    system: float


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use so many threads inside the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Use one thread inside the `with` block."""
    return threads(1)


def now(device: torch.device) -> float:
    """Seconds, after all work of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def in_turns(runs: Sequence[Callable[[], object]], seconds: float, device: torch.device) -> list[Summary]:
    """Time each pass in turn, at least `ROUNDS` times and until all took seconds * len(runs); one round warms up."""
    samples: list[list[Pass]] = [[] for _ in runs]
    for run in runs:
        run()
    total = 0.0
    while runs and len(samples[0]) < MOST_ROUNDS and (len(samples[0]) < ROUNDS or total < seconds * len(runs)):
        for run, sample in zip(runs, samples, strict=True):
            sample.append(time_pass(run, device))
            total += sample[-1].seconds
    return [_summary(sample) for sample in samples]


def time_pass(run: Callable[[], object], device: torch.device) -> Pass:
    """One pass."""
    system, faults = _usage()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
        elapsed = cast(float, begin.elapsed_time(end)) / 1000
    else:
        start = time.process_time()
        run()
        elapsed = time.process_time() - start
    after = _usage()
    return Pass(elapsed, after[0] - system, after[1] - faults)


def _usage() -> tuple[float, int]:
    """(seconds in the kernel, page faults) of this process so far; zeros on Windows."""
    if resource is None:
        return 0.0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_stime, usage.ru_minflt


def _summary(passes: Sequence[Pass]) -> Summary:
    seconds = [sample.seconds for sample in passes]
    low, median, high = statistics.quantiles(seconds, n=4)
    return Summary(
        median=median, low=low, high=high, rounds=len(passes),
        faults=sum(sample.faults for sample in passes) / len(passes),
        system=sum(sample.system for sample in passes) / max(sum(seconds), 1e-9),
    )  # fmt: skip
