"""Peak memory of a pass or a run: what it adds to the memory that the process, or the device, holds before it."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class PeakMemory:
    """The largest amount of memory beyond what was in use when this object was made.

    On a GPU: the memory that torch allocated there. On the CPU: the resident set size of this process, so that memory
    which libraries take is counted too; free memory is returned to the system first. Only Linux can reset that peak.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """device: None is the CPU."""
        gc.collect()
        self.gpu = device if device is not None and device.type == "cuda" else None
        if self.gpu is not None:
            torch.cuda.synchronize(self.gpu)
            torch.cuda.reset_peak_memory_stats(self.gpu)
            self.before: int | None = torch.cuda.memory_allocated(self.gpu)
        else:
            self.before = _reset_peak()

    def bytes(self) -> int | None:
        """The largest value so far; None where the system does not tell."""
        if self.before is None:
            return None
        peak = _process_bytes("VmHWM") if self.gpu is None else torch.cuda.max_memory_allocated(self.gpu)
        return None if peak is None else max(0, peak - self.before)


def peak_growth(run: Callable[[], object], device: torch.device | None = None) -> int | None:
    """Bytes by which a call's peak exceeds the memory before it, as `PeakMemory`; small ones (below about 1 MB) are not
    exact.
    """
    peak = PeakMemory(device)
    run()
    return peak.bytes()


def _reset_peak() -> int | None:
    """Reset the peak of this process to what it holds, which is returned; None where the system cannot."""
    if sys.platform != "linux":
        return None
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _process_bytes("VmRSS")


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device; of a CPU, those that the process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [2**40]  # where the system does not say (Windows)
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in map(Path, _GROUP_LIMITS):
        text = file.read_text().strip() if os.access(file, os.R_OK) else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def _process_bytes(name: str) -> int | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
