"""Triton's kernels in tests: on a GPU where there is one, else in Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is imported, so a test file runs itself again with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from operators import Run

HERE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
here = pytest.mark.skipif(not HERE, reason="runs in a process with TRITON_INTERPRET=1")
elsewhere = pytest.mark.skipif(HERE, reason="this is that process, or a GPU")
EXACT = torch.float32 if torch.cuda.is_available() else torch.float64
"""The most exact number type of the kernels: Triton has no products in float64 on a GPU."""
CLOSE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How near a kernel comes to a reference in float64, for numbers around 1."""


def run_in_interpreter(file: str) -> None:
    """Run the tests of a file in the interpreter; skip where there is no Triton."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-3000:]


def draw(*sizes: tuple[int, ...], dtype: torch.dtype = EXACT) -> list[Tensor]:
    """Normal random numbers, the same each time, whose gradients are kept."""
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype, device=DEVICE).requires_grad_() for size in sizes]


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether a kernel's result is as near to one in float64 as its number type allows."""
    tolerance = CLOSE[found.dtype]
    return torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)


def check_close(run: Run, plain: Run, leaves: Sequence[Tensor]) -> None:
    """Outputs and gradients of a kernel beside those of the plain form in float64, both functions of the leaves."""
    out = run(*leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, grad = plain(*exact), torch.randn_like(out)
    assert close(out, expected)
    found = torch.autograd.grad(out, leaves, grad)
    for one, other in zip(found, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert close(one, other)
