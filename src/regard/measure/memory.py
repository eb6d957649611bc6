"""Peak memory of a pass: what it adds to the memory that the process, or the device, holds before it."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_growth(run: Callable[[], object], device: torch.device | None = None) -> int | None:
    """Bytes by which a call's peak exceeds the memory before it; None where the system does not tell (not Linux, CUDA).

    On a CPU it is the peak of the whole process, so that memory which libraries take is counted too. Free memory is
    returned to the system first. Small peaks (below about 1 MB) are not exact.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if sys.platform != "linux":
        return None
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return None
    resident = _process_bytes("VmRSS")
    run()
    peak = _process_bytes("VmHWM")
    return None if resident is None or peak is None else max(0, peak - resident)


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
