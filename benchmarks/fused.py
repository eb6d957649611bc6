"""The fused attention kernel in training on a CPU against its float32 form and against plain products: ratios of time.

`python benchmarks/fused.py --rounds 15 --cases 64,32,32 64,48,32 196,64,64 --dtype float32 bfloat16`
A case is tokens, width of queries and keys, width of values. The limits by which `regard.mixers.shared.sdpa` chooses
(SLOW_BACKWARD, FEW) follow from these times. Forward and backward pass, eager and compiled; candidates take turns; a
ratio is of medians of CPU time in one thread, above 1 where the candidate is faster than the kernel as it is.
The process restarts itself with an allocator that keeps freed memory.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence

from turns import in_turns

from regard.core.allocator import ALLOCATOR

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
CASES = ("64,32,32", "64,48,32", "64,64,64", "144,32,32", "196,64,64", "400,64,64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds after one warm-up")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="tokens,width,width of values")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=2**19, help="logits of all images and heads of a case")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, allocator fixed")
    print(f"{options.pairs} logits, {options.rounds} rounds, medians of both passes; times faster than the kernel")
    print(f"{'case':<12} {'dtype':<9} {'kernel ms':>10} {'in float32':>11} {'products':>9}   compiled: the same")
    for dtype in options.dtype:
        for case in options.cases:
            tokens, width, values = (int(part) for part in case.split(","))
            cells = [value for how in (False, True) for value in measure(tokens, width, values, dtype, how, options)]
            first, second = (f"{ms:>10.2f} {wide:>11.2f} {plain:>9.2f}" for ms, wide, plain in (cells[:3], cells[3:]))
            print(f"{case:<12} {dtype:<9} {first} {second}", flush=True)
    return 0


def measure(
    tokens: int, width: int, values: int, dtype: str, compiled: bool, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Milliseconds of the kernel, and how many times faster its float32 form and plain products are."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    torch.compiler.reset()
    torch_dtype = getattr(torch, dtype)
    number = max(1, options.pairs // tokens**2)
    leaves = [torch.randn(number, 1, tokens, d, dtype=torch_dtype).requires_grad_() for d in (width, width, values)]

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, F.pad(v, (0, width - values)))[..., :values]

    def wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel(q.float(), k.float(), v.float()).to(v.dtype)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = q.float() * width**-0.5 @ k.float().mT
        return (logits.softmax(-1) @ v.float()).to(v.dtype)

    forms: dict[str, Callable[..., torch.Tensor]] = {"kernel": kernel, "wide": wide, "plain": plain}
    if compiled:
        forms = {name: torch.compile(form) for name, form in forms.items()}
    runs = {name: (lambda form=form: form(*leaves)) for name, form in forms.items()}  # type: ignore[misc]
    times, _ = in_turns(runs, leaves, options.rounds)
    kernel_s, wide_s, plain_s = (times[name, "fb"] for name in forms)
    return 1e3 * kernel_s, kernel_s / wide_s, kernel_s / plain_s


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    sys.exit(main())
