"""What a result depends on besides the run itself: machine, versions, device, code; and errors of the machine."""

import logging
import platform
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.core import DeviceError, require
from regard.mixers.shared.native import native_enabled, processor_name

ENVIRONMENT_ERRORS = (OSError, MemoryError, torch.OutOfMemoryError, ImportError, DeviceError)
"""Errors of the machine, not of the run, which may succeed later or elsewhere; `StoreError` and `Busy` are OSErrors."""


def is_environment_error(error: Exception) -> bool:
    """Whether an error is one of the machine; PyTorch's CPU allocator, without a class, is recognised by its text."""
    return isinstance(error, ENVIRONMENT_ERRORS) or "can't allocate memory" in str(error)


def environment(device: torch.device, precision: str, devices: int = 1, compiled: bool = False) -> dict[str, Any]:
    """The "environment" of an outcome: machine, versions, threads, devices, precision and `step_execution`.

    Raises: MissingExtra without the extra `lab`.
    """
    require("lightning_fabric")

    import lightning_fabric
    import timm
    import torchvision

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name("model name")
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "lightning": lightning_fabric.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "devices": devices,
        "processor": name,
        "precision": precision,
        **step_execution(compiled),
    }


def step_execution(compiled: bool) -> dict[str, bool]:
    """Whether training steps use Regard's compiled kernels and torch.compile."""
    return {"compiled kernels": native_enabled(), "torch.compile": compiled}


def make_fabric(
    device: str, devices: int, precision: str, loggers: Iterable[Any] = (), strategy: Any = "auto", nodes: int = 1
) -> Any:
    """Lightning's Fabric, not launched yet. devices: of each node."""
    from lightning_fabric import Fabric

    return Fabric(accelerator=device, devices=devices, num_nodes=nodes, strategy=strategy, loggers=list(loggers),
                  precision=precision)  # type: ignore[arg-type]  # fmt: skip


def quiet_lightning() -> None:
    """Keep Lightning's messages on precision and processes off standard error; its warnings stay."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)


@lru_cache(maxsize=1)
def code_version() -> str:
    """The commit of the source tree ("+" if it has changes), or the installed version."""
    root = Path(__file__).resolve().parents[4]
    if not (root / ".git").exists():
        return version("regard")
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return version("regard")


def _git(root: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return process.stdout.strip()


def resolved_device(device: str) -> str:
    """The device that "auto" stands for, chosen like Lightning Fabric: CUDA, else MPS, else the CPU."""
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
