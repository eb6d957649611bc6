"""Every mechanism on heads beside fused softmax attention over the number of tokens, and the N from which it is faster.

`python benchmarks/efficient.py --tokens 196,1024,4096 --seconds 0.5 [--backward] [--dtype bf16] [--only MiTA,Agent]`
Each cell is a ratio of medians of CPU time in one thread, mechanisms and softmax attention taking turns; above 1 is a
loss. "faster from" is read off between the measured sizes, on logarithmic axes. A mechanism of the package without a
line in CONFIGS is named below the table. The process restarts itself with the allocator settings of `regard bench`.
"""

import argparse
import math
import os
import platform
import sys
from collections.abc import Sequence

from regard.core.allocator import ALLOCATOR

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
# one spelling or more for a mechanism; those that the package does not have are left out
CONFIGS = (
    "MiTA(m=25, k=25)",
    "MiTA(m=64, k=64)",
    "Agent()",
    "Agent(bias=True)",
    "Linear()",
    'Linear(feature="relu")',
    "FLatten()",
    "PolaFormer()",
    "MHLA()",
    "InLine()",
    "Linformer()",
    "Performer()",
    "Nystrom(m=49)",
    "XCA()",
    "SKA()",
    'Factors(terms="0010")',
    "TopK(k=25)",
    "MoBA()",
    "BRA()",
    "NSA()",
    "Reformer()",
    "Window()",
    "ViT3()",
)
BASE = "Softmax()"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="196,1024,4096", help="numbers of tokens, each laid out as near to square")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each mechanism is repeated at each size")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--only", default="", help="names of mechanisms, by default all")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args(arguments)
    import torch

    from regard import MIXERS

    names = {cls.__name__ for cls in MIXERS}
    only = set(options.only.split(",")) - {""} or names
    chosen = [text for text in CONFIGS if text.partition("(")[0] in names & only]
    sizes = [int(part) for part in options.tokens.split(",")]
    part = "forward and backward" if options.backward else "forward"
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, {options.dtype}, {part}")
    print(
        f"batch {options.batch}, {options.heads} heads of {options.dim // options.heads}; ratios to softmax attention"
    )
    print(f"{'mechanism':<28}" + "".join(f"{'N=' + str(n):>9}" for n in sizes) + f"{'faster from':>14}")
    reasons = {}
    for text in chosen:
        ratios = [measure(text, n, options, reasons) for n in sizes]
        cells = "".join("        -" if ratio is None else f"{ratio:>9.3f}" for ratio in ratios)
        print(f"{text:<28}{cells}{crossover(sizes, ratios):>14}", flush=True)
    for text, reason in reasons.items():
        print(f"{text}: {reason}")
    if unlisted := sorted(names & only - {text.partition("(")[0] for text in (*CONFIGS, BASE)}):
        print(f"without a line in CONFIGS: {', '.join(unlisted)}")
    return 0


def measure(text: str, tokens: int, options: argparse.Namespace, reasons: dict[str, str]) -> float | None:
    """The ratio to softmax attention at one size; None, with a reason, where the mechanism cannot be timed."""
    from regard import Grid, RegardError, parse
    from regard.measure.bench import bench

    height = max(h for h in range(1, math.isqrt(tokens) + 1) if tokens % h == 0)
    try:
        timings = bench(
            [parse(BASE), parse(text)],
            [Grid(height, tokens // height)],
            dim=options.dim,
            heads=options.heads,
            batch=options.batch,
            dtype=options.dtype,
            backward=options.backward,
            seconds=options.seconds,
        )
    except RegardError as error:
        reasons[text] = f"at N={tokens}: {error}"
        return None
    return timings[1].ratio


def crossover(sizes: Sequence[int], ratios: Sequence[float | None]) -> str:
    """The number of tokens from which every measured ratio is below 1, interpolated; "-" if it is never reached."""
    points = [(math.log(n), math.log(ratio)) for n, ratio in zip(sizes, ratios, strict=True) if ratio is not None]
    if not points or points[-1][1] >= 0:
        return "-"
    index = len(points) - 1
    while index and points[index - 1][1] < 0:
        index -= 1
    if not index:
        return f"<= {round(math.exp(points[0][0]))}"
    (x0, y0), (x1, y1) = points[index - 1 : index + 1]
    return f"~ {round(math.exp(x0 + (x1 - x0) * y0 / (y0 - y1)))}"


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    sys.exit(main())
