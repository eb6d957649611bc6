"""What a result depends on besides the run: machine, versions, device, code."""

import ctypes
import logging
import platform
import subprocess
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.mixers.shared.native_build import native_wanted, processor


def environment(device: torch.device, precision: str, devices: int = 1, compiled: bool = False) -> dict[str, Any]:
    """machine, python, torch, threads, device and how many, precision, versions and `steps_by`, for the outcome."""
    import lightning
    import timm
    import torchvision

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor("model name")
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "lightning": lightning.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "devices": devices,
        "processor": name,
        "precision": precision,
        **steps_by(compiled),
    }


def steps_by(compiled: bool) -> dict[str, bool]:
    """Whether our compiled kernels or torch.compile make the training steps; ours run in eager mode alone."""
    return {"compiled kernels": native_wanted() and not compiled, "torch.compile": compiled}


def hush() -> None:
    """Lightning says on standard error which precision and processes it uses; let it tell of warnings alone."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)


@lru_cache(maxsize=1)
def code_version() -> str:
    """The commit of the source tree ("+" if it has changes), or the installed version."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return version("regard")
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return version("regard")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def resolved(device: str) -> str:
    """What "auto" means on this machine, as Lightning Fabric chooses: a GPU, else Apple's, else the CPU."""
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class PeakMemory:
    """The most memory that is in use from now on, for one run among several of a process.

    On a GPU it is what torch had allocated there. On the CPU it is the resident size of this process: Python, the
    libraries and the images included, but not what earlier runs gave back. Only Linux can begin anew on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.known = device.type == "cuda" or _reset()

    def bytes(self) -> int | None:
        """The number until now; None where the system cannot tell that of this run from the process's."""
        if not self.known:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return 1024 * int(found[0]) if found else None


def _reset() -> bool:
    """Set the largest resident size of this process to the present one; False where the system has no such thing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps is not this run's
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
