"""MiTA beside fused softmax attention: time of the forward pass, and of forward and backward, as ratios.

`python benchmarks/mita.py --rounds 9 --cases 196,25,25 1024,64,64 --dtype float32`
Candidates and `scaled_dot_product_attention` take turns; a ratio is of medians of CPU time in one thread. Ratios above
1 are losses and are marked. The process restarts itself with an allocator that keeps freed memory: otherwise the page
faults of temporaries would dominate. Landmarks are pooled inside the measured time.

`--choice` compares execution="auto" with the fastest of the executions that it could have taken, from 196 to 16384
tokens. `--memory` prints the peak memory of a pass above its inputs, beside softmax attention's, each in a fresh
process with the allocator as it is; it needs Linux, which counts a process's peak in /proc.
"""

import argparse
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence

from goals import goals, verdict
from peaks import in_fresh_process, peak_growth
from turns import in_turns

from regard.core.allocator import ALLOCATOR

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
EXECUTIONS = ("auto", "native", "dense", "gather", "grouped")
CASES = ("196,25,25", "1024,25,25", "1024,64,64", "4096,128,128", "16384,128,128")
CHOICES = tuple(
    f"{n},{m},{m}" for m in (25, 64) for n in (196, 256, 400, 576, 784, 1024, 1600, 2304, 4096, 9216, 16384)
)
PEAKS = tuple(f"{n},{m},{m}" for m in (25, 64) for n in (1024, 4096, 16384))
WARM = 64
"""Tokens of the pass before `--memory` measures."""
DENSE = 2304**2
"""Up to this number of logits per head `--choice` tries the executions that compute all of them."""
COPIES = 4096 * 64
"""Up to this number of copied keys per head it tries the execution that copies them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds after one warm-up")
    parser.add_argument("--cases", nargs="+", help="tokens,m,k; tokens fill h x w with h <= w")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--executions", nargs="+", choices=EXECUTIONS, help="of the table of times and of --memory")
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--choice", action="store_true", help='time of "auto" to that of the fastest execution')
    kind.add_argument("--memory", action="store_true", help="peak memory instead of time")
    options = parser.parse_args(arguments)
    settings = {"OMP_NUM_THREADS": "1"} if options.memory else SETTINGS
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)
    import torch

    torch.set_num_threads(1)
    allocator = "as it is" if options.memory else "fixed"
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, allocator {allocator}")
    print(f"batch {options.batch}, {options.heads} heads of {options.width}")
    table, default = (memory, PEAKS) if options.memory else (choice, CHOICES) if options.choice else (speed, CASES)
    for dtype in options.dtype:
        cases = [(*map(int, case.split(",")),) for case in options.cases or default]
        table(cases, getattr(torch, dtype), options)
    return 0


Case = tuple[int, ...]
"""Tokens, landmarks and keys of each."""


def speed(cases: list[Case], dtype: object, options: argparse.Namespace) -> None:
    """Every execution to softmax attention."""
    print(f"{options.rounds} rounds, CPU-time medians")
    print(f"{'N':>6} {'m':>4} {'k':>4}  {'dtype':<9} {'execution':<12} {'forward':>9} {'for+back':>9} {'faults':>9}")
    names = options.executions or ["auto", "grouped"]
    for case in cases:
        times, faults = in_turns(*candidates(case, ["softmax", *names], dtype, options), options.rounds)
        for name in names:
            ratio = {part: times[name, part] / times["softmax", part] for part in ("f", "fb")}
            losses = " and ".join(part for part in ratio if ratio[part] > 1)
            numbers = f"{ratio['f']:>9.3f} {ratio['fb']:>9.3f} {faults[name]:>9.0f}"
            goal = (
                goals("mita", str(dtype).removeprefix("torch.")).get(",".join(map(str, case)))
                if name == "auto"
                else None
            )
            notes = [f"loss: {losses}"] if losses else []
            notes += [verdict(list(ratio.values()), goal)] if goal else []
            print(f"{_sizes(case, dtype)} {name:<12} {numbers}  {'; '.join(notes)}".rstrip(), flush=True)
    print("ratio to softmax attention; faults: minor page faults a measured call")


def choice(cases: list[Case], dtype: object, options: argparse.Namespace) -> None:
    """The time of "auto" divided by that of the fastest execution, without those that need too much memory."""
    from regard.mixers.shared.native import native_enabled

    print(f"{options.rounds} rounds, CPU-time medians")
    print(f"{'N':>6} {'m':>4} {'k':>4}  {'dtype':<9} {'forward':>8}  {'fastest':<13} {'for+back':>8}  {'fastest':<13}")
    for case in cases:
        tokens, _, top = case
        names = ["grouped"]
        names += ["dense"] if tokens**2 <= DENSE else []
        names += ["gather"] if tokens * top <= COPIES else []
        names += ["native"] if native_enabled() else []
        times, _ = in_turns(*candidates(case, ["auto", *names], dtype, options), options.rounds)
        cells, slow = [], False
        for part in ("f", "fb"):
            best = min(names, key=lambda name: times[name, part])  # noqa: B023
            ratio = times["auto", part] / times[best, part]
            slow = slow or ratio > 1.05
            cells.append(f"{ratio:>8.3f}  {best:<13}")
        print(f"{_sizes(case, dtype)} {' '.join(cells)}{' (more than 5 %)' if slow else ''}", flush=True)


def memory(cases: list[Case], dtype: object, options: argparse.Namespace) -> None:
    """Peaks in MB, their ratio to softmax attention's, and how they grow with the tokens."""
    print(
        f"{'N':>6} {'m':>4} {'k':>4}  {'dtype':<9} {'execution':<12} "
        f"{'forward':>9} {'ratio':>6} {'for+back':>9} {'ratio':>6}"
    )
    names = options.executions or ["auto", "grouped"]
    peaks: dict[tuple[str, Case], list[float]] = {}
    for case in cases:
        alone = (case[0], 1, 1)  # softmax attention has no landmarks
        for name, key in (("softmax", alone), *((name, case) for name in names)):
            if (name, key) not in peaks:
                peaks[name, key] = [
                    in_fresh_process(peak, key, name, dtype, options, trained) for trained in (False, True)
                ]
            both = zip(peaks[name, key], peaks["softmax", alone], strict=True)
            numbers = " ".join(f"{value:>9.1f} {value / softmax:>6.2f}" for value, softmax in both)
            print(f"{_sizes(case, dtype)} {name:<12} {numbers}", flush=True)
    for m, top in dict.fromkeys(case[1:] for case in cases):
        same = [case for case in cases if case[1:] == (m, top)]
        for name in names if len(same) > 1 else ():
            ends = zip(peaks[name, same[0]], peaks[name, same[-1]], strict=True)
            grown = [math.log(high / low) / math.log(same[-1][0] / same[0][0]) for low, high in ends]
            print(f"exponent of N, m={m}, k={top}, {name}: {grown[0]:.2f} / {grown[1]:.2f} (forward / for+back)")


def peak(case: Case, name: str, dtype: object, options: argparse.Namespace, trained: bool) -> float:
    """MB that one pass adds at its peak to what the process holds with the inputs in it.

    A small pass goes before; the buffers that libraries keep for large products, some MB, are counted.
    """
    import torch

    for tokens in (WARM, case[0]):
        runs, _ = candidates((tokens, min(tokens, case[1]), min(tokens, case[2])), [name], dtype, options)

        def once(run: Callable = runs[name]) -> None:
            with torch.set_grad_enabled(trained):
                out = run()
            if trained:
                out.backward(torch.ones_like(out))

        more = peak_growth(once)
    return more / 2**20


def _sizes(case: Case, dtype: object) -> str:
    return f"{case[0]:>6} {case[1]:>4} {case[2]:>4}  {str(dtype).removeprefix('torch.'):<9}"


def candidates(
    case: Case, names: Sequence[str], dtype: object, options: argparse.Namespace
) -> tuple[dict[str, Callable], tuple]:
    """A pass of each of these executions ("softmax" is another attention), and the q, k and v of all."""
    import torch
    import torch.nn.functional as F

    from regard import Grid
    from regard.ops import PooledQueries, mita

    torch.manual_seed(0)
    tokens, m, top = case
    height = max(h for h in range(1, int(tokens**0.5) + 1) if tokens % h == 0)
    grid = Grid(height, tokens // height)
    shape = (options.batch, options.heads, tokens, options.width)
    q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3))  # type: ignore[call-overload]

    def attend(execution: str) -> Callable[[], torch.Tensor]:
        if execution == "softmax":
            return lambda: F.scaled_dot_product_attention(q, k, v)
        return lambda: mita(q, k, v, PooledQueries(grid, m), top, execution=execution)

    return {name: attend(name) for name in names}, (q, k, v)


if __name__ == "__main__":
    sys.exit(main())
