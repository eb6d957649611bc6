"""MiTA beside fused softmax attention: time of the forward pass, and of forward and backward, as ratios.

`python benchmarks/mita.py --rounds 9 --cases 196,25,25 1024,64,64 --dtype float32`
Candidates and `scaled_dot_product_attention` take turns; a ratio is of medians of CPU time in one thread. Ratios above
1 are losses and are marked. The process starts itself again with an allocator that keeps freed memory: otherwise page
faults of temporaries are what is measured. Landmarks are pooled inside the measured time.
"""

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from regard.measure.allocator import ALLOCATOR

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
EXECUTIONS = ("auto", "native", "lean-dense", "lean-grouped", "dense", "gather", "grouped")
CASES = ("196,25,25", "1024,25,25", "1024,64,64", "4096,128,128", "16384,128,128")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds after one warm-up")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="tokens,m,k; tokens fill h x w with h <= w")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--executions", nargs="+", default=["auto", "native"], choices=EXECUTIONS)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, allocator fixed")
    print(f"batch {options.batch}, {options.heads} heads of {options.width}, {options.rounds} rounds, CPU-time medians")
    print(f"{'N':>6} {'m':>4} {'k':>4}  {'dtype':<9} {'execution':<12} {'forward':>9} {'for+back':>9} {'faults':>9}")
    for dtype in options.dtype:
        for case in options.cases:
            tokens, m, top = (int(part) for part in case.split(","))
            for row in measure(tokens, m, top, getattr(torch, dtype), options):
                print(row, flush=True)
    print("ratio to softmax attention; (loss) marks ratios above 1; faults: minor page faults a measured call")
    return 0


def measure(tokens: int, m: int, top: int, dtype: object, options: argparse.Namespace) -> list[str]:
    """Rows of one size: every execution and softmax attention take turns."""
    import torch
    import torch.nn.functional as F

    from regard import Grid
    from regard.ops import mita, pool_landmarks

    torch.manual_seed(0)
    height = max(h for h in range(1, int(tokens**0.5) + 1) if tokens % h == 0)
    grid = Grid(height, tokens // height)
    shape = (options.batch, options.heads, tokens, options.width)
    q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3))  # type: ignore[call-overload]

    def attend(execution: str) -> Callable[[], torch.Tensor]:
        return lambda: mita(q, k, v, pool_landmarks(q, grid, m), top, execution=execution)

    runs = {"softmax": lambda: F.scaled_dot_product_attention(q, k, v)}
    runs.update({name: attend(name) for name in options.executions})
    times: dict[tuple[str, str], list[float]] = {(name, part): [] for name in runs for part in ("f", "fb")}
    faults = dict.fromkeys(runs, 0)
    for turn in range(options.rounds + 1):
        for name, run in runs.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            with torch.no_grad():
                forward = _seconds(run)
            both = _seconds(lambda run=run: run().backward(torch.ones_like(v)))  # type: ignore[misc]
            q.grad = k.grad = v.grad = None
            if turn:
                faults[name] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
                times[name, "f"].append(forward)
                times[name, "fb"].append(both)
    rows = []
    kind = str(dtype).removeprefix("torch.")
    for name in options.executions:
        ratio = {part: _median(times[name, part]) / _median(times["softmax", part]) for part in ("f", "fb")}
        losses = (
            f" (loss: {' and '.join(part for part in ratio if ratio[part] > 1)})" if max(ratio.values()) > 1 else ""
        )
        numbers = f"{ratio['f']:>9.3f} {ratio['fb']:>9.3f} {faults[name] / options.rounds / 2:>9.0f}"
        rows.append(f"{tokens:>6} {m:>4} {top:>4}  {kind:<9} {name:<12} {numbers}{losses}")
    return rows


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    sys.exit(main())
