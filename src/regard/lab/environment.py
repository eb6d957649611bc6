"""What a result depends on besides the run: machine, versions, device, code."""

import logging
import platform
import resource
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import regard
from regard.mixers.compiled import native_wanted, processor


def environment(device: torch.device, precision: str, devices: int = 1) -> dict[str, Any]:
    """machine, python, torch, threads, device and how many, precision, versions and kernels, for the outcome."""
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
        "compiled kernels": native_wanted(),
    }


def hush() -> None:
    """Lightning says on standard error which precision and processes it uses; let it tell of warnings alone."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)


@lru_cache(maxsize=1)
def code_version() -> str:
    """The commit of the source tree ("+" if it has changes), or the installed version."""
    root = Path(regard.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return regard.__version__
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return regard.__version__


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU the most that torch had allocated; on the CPU the largest size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
