"""Wall time with one thread and with two, in turns: how far each mechanism's products and kernels use a second core.

`python benchmarks/threads.py --grids 14x14 32x32 64x64 --rounds 9`
A ratio is of medians of wall time, one thread to two: 2 is twice as fast, 1 gains nothing. The machine needs two idle
cores. The process restarts itself with an allocator that keeps freed memory.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence

from regard.core.allocator import ALLOCATOR

MIXERS = (
    "Softmax()",
    "MiTA(m=25, k=25)",
    "SKA()",
    "TopK(k=25)",
    "Linear()",
    'Factors("0110")',
    "Conv()",
    "DeformableConv()",
)
THREADS = (1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds after one warm-up")
    parser.add_argument("--grids", nargs="+", default=["14x14", "32x32", "64x64"])
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS))
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args(arguments)
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    import torch

    torch.set_num_threads(max(THREADS))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, float32")
    print(f"batch {options.batch}, {options.heads} heads, C={options.dim}, {options.rounds} rounds, wall time")
    print(f"{'grid':<8} {'mechanism':<20} {'forward ms':>11} {'ratio':>6} {'both ms':>9} {'ratio':>6}")
    for grid in options.grids:
        for mixer in options.mixers:
            cells = [value for backward in (False, True) for value in measure(mixer, grid, backward, options)]
            print(
                f"{grid:<8} {mixer:<20} {cells[0]:>11.2f} {cells[1]:>6.2f} {cells[2]:>9.2f} {cells[3]:>6.2f}",
                flush=True,
            )
    print("ms: one thread; ratio: one thread to two")
    return 0


def measure(spelling: str, sides: str, backward: bool, options: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of one thread, and the ratio of one thread to two."""
    import torch

    from regard import Grid, Site, parse
    from regard.measure.bench import layer_pass
    from regard.mixers.shared.heads import HeadMixer

    grid = Grid(*map(int, sides.split("x")))
    layer = parse(spelling).build(Site(options.dim, options.heads, grid))
    part = "operator" if isinstance(layer, HeadMixer) else "layer"
    run = layer_pass(
        layer, grid, None, options.batch, (torch.device("cpu"), torch.float32), backward=backward, part=part
    )
    times: dict[int, list[float]] = {threads: [] for threads in THREADS}
    for turn in range(options.rounds + 1):
        for threads in THREADS:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            run()
            if turn:
                times[threads].append(time.perf_counter() - start)
    one, two = (statistics.median(times[threads]) for threads in THREADS)
    return one * 1e3, one / two


if __name__ == "__main__":
    sys.exit(main())
