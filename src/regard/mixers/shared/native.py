"""Compiled kernels: C++ functions of the libraries that CMakeLists.txt builds, and where they may run.

A library is built for each instruction set and lies in the folder `native` of the package; a package that was built
without a compiler has none. `REGARD_NATIVE=0` in the environment turns all of them off.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.core import UnsupportedError
from regard.core.tensors import is_exporting

REMEDY = "install a wheel of your platform, or a C++ compiler (g++, clang++) before you install Regard from its source"


def eager_on_cpu(x: Tensor) -> bool:
    """Whether code that reads memory may run on this tensor: a plain CPU tensor, not traced and not transformed."""
    return not in_trace() and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def in_trace() -> bool:
    """Whether code is compiled, exported, traced or transformed, so that it must not look at values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or in_function_transform()


def in_function_transform() -> bool:
    """Whether a function transform such as `torch.func.grad`, `vmap` or `jvp` runs in eager mode."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _in_vmap() -> bool:
    return torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Vmap


def runs_native(name: str, execution: str, x: Tensor) -> bool:
    """Whether a compiled kernel runs: execution is "native", or "auto" where there are kernels for this tensor.

    "auto" leaves function transforms to PyTorch's operators, and `torch.export` too, so that exported programs need
    no Regard. `torch.compile` takes kernels as operators of its graph.
    Raises: UnsupportedError if execution is "native" and no kernel can run.
    """
    if execution == "native":
        if x.device.type != "cpu":
            raise UnsupportedError(f'{name}: execution="native" runs on the CPU, x is on {x.device}; use "auto"')
        if in_function_transform() and not _in_vmap():
            raise UnsupportedError(f'{name}: execution="native" runs without torch.func.grad and jvp; use "auto"')
        kernels()
        return True
    if execution != "auto" or x.device.type != "cpu" or not native_enabled():
        return False
    if torch.compiler.is_compiling():
        return not is_exporting()
    return eager_on_cpu(x)


def native_enabled() -> bool:
    """Whether execution="auto" takes compiled kernels: this package has them, and REGARD_NATIVE is not 0."""
    return LIBRARY is not None and os.environ.get("REGARD_NATIVE", "") != "0"


def instruction_set() -> str:
    """The instruction set that PyTorch takes, which ATEN_CPU_CAPABILITY can lower: "avx512", "avx2", "neon" or ""."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability if capability in ("avx2", "avx512") else ""


def _library() -> Path | None:
    """The library for this processor, or None if the package has none."""
    try:
        path = Path(str(distribution("regard").locate_file(f"regard/native/kernels-{instruction_set()}.so")))
    except PackageNotFoundError:  # a source tree that was never installed
        return None
    return path if path.is_file() else None


LIBRARY = _library()


@cache
def kernels() -> ctypes.CDLL:
    """The library of compiled kernels. Raises: UnsupportedError if there is none or it cannot be loaded."""
    if LIBRARY is None:
        level = instruction_set() or f"this processor ({platform.machine()})"
        raise UnsupportedError(f"this installation of Regard has no compiled kernels for {level}; {REMEDY}")
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise UnsupportedError(f"{LIBRARY} cannot be loaded ({error}); install Regard again") from error


@cache
def kernel(name: str, dtype: torch.dtype, arguments: tuple[Any, ...]) -> Any:
    """A function without a result, for float32 or float64. arguments: their types, of `ctypes`.

    Raises: UnsupportedError as `kernels`.
    """
    function = getattr(kernels(), f"{name}_{str(dtype).removeprefix('torch.')}")
    function.restype, function.argtypes = None, arguments
    return function


@cache
def half_products(dtype: torch.dtype) -> bool:
    """Whether products of this dtype run in bfloat16, by AMX's tiles; else they run in float32 or float64.

    ONEDNN_MAX_CPU_ISA, which holds PyTorch's products to an older instruction set, holds these too.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    allowed = most in ("", "ALL", "DEFAULT") or "AMX" in most
    return dtype is torch.bfloat16 and allowed and bool(kernels().half_products())


def views(arrays: Sequence[Tensor]) -> bytes:
    """`View` of native.h for each array (B, H, N, width): its address, and strides of samples, heads and rows."""
    return struct.pack(f"{4 * len(arrays)}q", *(x for array in arrays for x in (array.data_ptr(), *array.stride()[:3])))


def upcast_rows(*arrays: Tensor) -> list[Tensor]:
    """The arrays in float32 or float64, that of the first, with contiguous rows."""
    dtype = torch.promote_types(arrays[0].dtype, torch.float32)
    upcast = [array if array.dtype == dtype else array.to(dtype) for array in arrays]
    return [array if array.stride(-1) == 1 or array.shape[-1] == 1 else array.contiguous() for array in upcast]


def empty_heads(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty (B, H, N, width), in memory (B, N, H, width) like SDPA's output, so that merging heads is a view."""
    b, h, n, width = shape
    return like.new_empty(b, n, h, width).transpose(1, 2)


def processor_name(*names: str) -> str:
    """The first entry of /proc/cpuinfo with one of these names; without that file, Python's processor name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), platform.processor())
