"""C++ kernels that are compiled on the user's machine on request and kept in the user's cache.

With `REGARD_NATIVE=1` execution="auto" uses them; without it only execution="native" compiles anything.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.core import UnsupportedError

FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),  # lets loops become vectors; NaN stays NaN
)
# without the width, compilers use vectors of half the size on some processors
TUNING = {"x86_64": ("-march=native", "-mprefer-vector-width=512")}
REMEDY = "install g++ or clang++ (or name a compiler in CXX), or leave REGARD_NATIVE unset"


def eager_on_cpu(x: Tensor) -> bool:
    """Whether code that reads memory may run on this tensor: a plain CPU tensor, not traced and not transformed."""
    eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing() or in_function_transform())
    return eager and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def in_function_transform() -> bool:
    """Whether a function transform such as `torch.func.grad`, `vmap` or `jvp` runs in eager mode."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def runs_native(name: str, execution: str, x: Tensor) -> bool:
    """Whether compiled code runs: execution is "native", or "auto" with REGARD_NATIVE=1 and a tensor that allows it.

    Raises: UnsupportedError if execution is "native" and compiled code cannot run.
    """
    possible = eager_on_cpu(x)
    if execution == "native" and not possible:
        raise UnsupportedError(
            f'{name}: execution="native" runs in eager mode on the CPU, without function transforms; use "auto"'
        )
    return possible and (execution == "native" or (execution == "auto" and native_enabled()))


def native_enabled() -> bool:
    """Whether REGARD_NATIVE is set to anything but 0."""
    return os.environ.get("REGARD_NATIVE", "") not in ("", "0")


@cache
def load_library(source: Path) -> ctypes.CDLL:
    """The library of a C++ file, compiled if the cache ($XDG_CACHE_HOME/regard) does not have it yet.

    The name in the cache depends on source, compiler and processor. The compiler is CXX, else c++, g++ or clang++.
    Raises: UnsupportedError without a compiler, or with the compiler's message.
    """
    compiler = _compiler()
    version = _run([compiler, "--version"], seconds=60).stdout
    parts = (source.read_text(), compiler, version, *_flags(), platform.machine(), processor_name("flags", "Features"))
    key = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    library = folder / f"{source.parent.name}-{source.stem}-{key}.so"
    if not library.exists():
        _compile(compiler, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise UnsupportedError(f"{library} cannot be loaded ({error}); delete it, and check {compiler}") from error


def native_function(source: Path, name: str, dtype: torch.dtype) -> Any:
    """A function without a result of a C++ file, for float32 or float64. Raises: as `load_library`."""
    function = getattr(load_library(source), f"{name}_{str(dtype).removeprefix('torch.')}")
    function.restype = None
    return function


def _compiler() -> str:
    requested = os.environ.get("CXX", "")
    compiler = next(filter(None, map(shutil.which, [requested] if requested else ["c++", "g++", "clang++"])), None)
    if compiler is None:
        raise UnsupportedError(f"compiled kernels need a C++ compiler; {requested or 'c++'} is not installed; {REMEDY}")
    return compiler


def _flags() -> tuple[str, ...]:
    return FLAGS + TUNING.get(platform.machine(), ("-mcpu=native",))


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Compile to a temporary file and rename it, so that several processes may compile at the same time."""
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            output = Path(folder) / library.name
            process = _run([compiler, *_flags(), str(source), "-o", str(output)], seconds=600)
            if process.returncode:
                raise UnsupportedError(f"{compiler} could not compile {source.name}: {process.stderr[-800:]}; {REMEDY}")
            if not output.is_file():
                raise UnsupportedError(f"{compiler} wrote no library, so it is no C++ compiler; {REMEDY}")
            output.replace(library)
    except OSError as error:
        raise UnsupportedError(f"no compiled kernels in {library.parent}: {error}; {REMEDY}") from error


def _run(command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    """The finished process of a compiler, without input. Raises: UnsupportedError if it cannot run or does not end."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=seconds,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"the compiler {command[0]} cannot run ({error}); {REMEDY}") from error


def processor_name(*names: str) -> str:
    """The first entry of /proc/cpuinfo with one of these names; without that file, Python's processor name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), platform.processor())
