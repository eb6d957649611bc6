"""Kernels in C++ that are compiled on the user's machine, when they are asked for, and kept in the user's cache.

`REGARD_NATIVE=1` lets execution="auto" take them; nothing is compiled without it or a call that names them.
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
# a compiler would else halve the vectors on some processors
TUNING = {"x86_64": ("-march=native", "-mprefer-vector-width=512")}
REMEDY = "install g++ or clang++ (or name a compiler in CXX), or leave REGARD_NATIVE unset"


def eager_on_cpu(x: Tensor) -> bool:
    """Whether code that reads memory may take this tensor: nothing is traced or transformed, and it is a plain one."""
    eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed())
    return eager and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def transformed() -> bool:
    """Whether a function transform runs in eager mode: `torch.func.grad`, `vmap`, `jvp` or another."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def takes_native(name: str, execution: str, x: Tensor) -> bool:
    """Whether compiled code runs: execution is "native", or "auto" where the environment asks and x allows it.

    Raises: UnsupportedError if it was asked for by name and cannot run.
    """
    able = eager_on_cpu(x)
    if execution == "native" and not able:
        raise UnsupportedError(
            f'{name}: execution="native" runs in eager mode on the CPU, without function transforms; use "auto"'
        )
    return able and (execution == "native" or (execution == "auto" and native_wanted()))


def native_wanted() -> bool:
    """Whether the environment asks for compiled kernels."""
    return os.environ.get("REGARD_NATIVE", "") not in ("", "0")


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """The library of a C++ file, compiled if the cache ($XDG_CACHE_HOME/regard) does not have it yet.

    The cache tells apart sources, compilers and processors. The compiler is CXX, else c++, g++ or clang++.
    Raises: UnsupportedError without a compiler, or with what it said.
    """
    compiler = _compiler()
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (source.read_text(), compiler, said, *_flags(), platform.machine(), processor("flags", "Features"))
    key = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    library = folder / f"{source.stem}-{key}.so"
    if not library.exists():
        _compile(compiler, source, library)
    return ctypes.CDLL(str(library))


def kernel(source: Path, name: str, dtype: torch.dtype) -> Any:
    """A function of a C++ file that returns nothing, for float32 or float64. Raises: as `compiled`."""
    function = getattr(compiled(source), f"{name}_{str(dtype).removeprefix('torch.')}")
    function.restype = None
    return function


def _compiler() -> str:
    named = os.environ.get("CXX", "")
    found = next(filter(None, map(shutil.which, [named] if named else ["c++", "g++", "clang++"])), None)
    if found is None:
        raise UnsupportedError(f"compiled kernels need a C++ compiler and there is no {named or 'c++'} here; {REMEDY}")
    return found


def _flags() -> tuple[str, ...]:
    return FLAGS + TUNING.get(platform.machine(), ("-mcpu=native",))


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Into a file of its own that is then renamed, so that several processes may do it at once."""
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            done = subprocess.run(
                [compiler, *_flags(), str(source), "-o", str(made)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise UnsupportedError(f"{compiler} could not compile {source.name}: {done.stderr[-800:]}; {REMEDY}")
            made.replace(library)
    except OSError as error:
        raise UnsupportedError(f"no compiled kernels in {library.parent}: {error}; {REMEDY}") from error


def processor(*names: str) -> str:
    """What the system says of the processor under the first of these names that it has; else Python's name of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), platform.processor())
