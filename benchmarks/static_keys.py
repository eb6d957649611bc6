"""Static keys beside softmax attention, and the paths of convolutional static keys: times, and memory of the paths.

`python benchmarks/static_keys.py --rounds 9 --part ska cska`
SKA: its core (attention on given q and v) and its whole layer (no key is projected) against softmax attention of the
same shapes; goals are at most 1.05 and 0.95. CSKA: its paths against the convolution; the goal of "lean" is at most 0.6
of the convolution's memory at 28x28. Candidates take turns; a ratio is of medians of CPU time in one thread. Ratios
above the goal are losses and are marked. The process restarts itself with an allocator that keeps freed memory.
Memory is the growth of the peak resident size of a fresh process for each path, whose allocator gives memory back.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peaks import in_fresh_process, peak_growth
from turns import in_turns

from regard.core.allocator import ALLOCATOR

if TYPE_CHECKING:
    import torch

    from regard import Grid

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
RETURNING = dict.fromkeys(ALLOCATOR, "65536")
GRIDS = ("14x14", "32x32")
CASES = ("8x8,16,8,64", "14x14,2,10,32", "14x14,16,6,64", "28x28,1,4,32", "28x28,4,4,32")
PATHS = ("conv", "patches", "lean")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds after one warm-up")
    parser.add_argument("--part", nargs="+", default=["ska", "cska"], choices=["ska", "cska"])
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), help="grids of SKA")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="cases of CSKA: grid,batch,heads,width")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, {options.rounds} rounds")
    if "ska" in options.part:
        print(f"SKA / softmax attention, batch {options.batch}, dim {options.dim}, {options.heads} heads, float32")
        print(f"{'grid':<7} {'part':<6} {'forward':>8} {'for+back':>9}")
        for grid in options.grids:
            for row in static_keys(grid, options):
                print(row, flush=True)
    if "cska" in options.part:
        print("CSKA paths / convolution, float32; MB: growth of the peak resident size")
        print(f"{'grid':<6} {'B,H,d':<8} {'path':<8} {'forward':>8} {'for+back':>9} {'MB f':>7} {'MB fb':>7}")
        for case in options.cases:
            for row in paths(case, options.rounds):
                print(row, flush=True)
    return 0


def static_keys(text: str, options: argparse.Namespace) -> list[str]:
    """SKA and softmax attention, core and layer, in turns."""
    import torch

    from regard import SKA, Grid, Site, Softmax

    height, width = (int(side) for side in text.split("x"))
    torch.manual_seed(0)
    grid = Grid(height, width)
    site = Site(options.dim, options.heads, grid)
    shape = (options.batch, options.heads, grid.cells, site.width)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    x = torch.randn(options.batch, grid.cells, options.dim, requires_grad=True)
    layers = {"softmax": Softmax().build(site), "ska": SKA().build(site)}
    leaves = [q, k, v, x, *(weight for layer in layers.values() for weight in layer.parameters())]
    rows = []
    for part, goal in (("core", 1.05), ("layer", 0.95)):
        runs: dict[str, Callable[[], torch.Tensor]] = {}
        for name, layer in layers.items():
            operator: torch.nn.Module = layer.operator  # type: ignore[assignment]
            if part == "core":
                runs[name] = lambda operator=operator: operator(q, k, v, grid=grid)  # type: ignore[misc]
            else:
                runs[name] = lambda layer=layer: layer(x, grid)  # type: ignore[misc]
        times, _ = in_turns(runs, leaves, options.rounds)
        ratios = [times["ska", kind] / times["softmax", kind] for kind in ("f", "fb")]
        rows.append(f"{text:<7} {part:<6} {ratios[0]:>8.3f} {ratios[1]:>9.3f}  {_verdict(ratios, goal)}")
    return rows


def paths(case: str, rounds: int) -> list[str]:
    """Every path of CSKA in turns, and the peak memory of each alone."""
    grid, *rest = case.split(",")
    inputs = _inputs(case)
    runs = {path: _cska_call(*inputs, path) for path in PATHS}
    times, _ = in_turns(runs, inputs[0], rounds)
    rows, base = [], [0.0, 0.0]
    for path in PATHS:
        ratios = [times[path, kind] / times["conv", kind] for kind in ("f", "fb")]
        memory = [in_fresh_process(peak, case, path, trained, **RETURNING) for trained in (False, True)]
        base = memory if path == "conv" else base
        shares = [used / of if of else float("nan") for used, of in zip(memory, base, strict=True)]
        note = f"memory {shares[0]:.2f} {shares[1]:.2f} of conv"
        numbers = f"{ratios[0]:>8.3f} {ratios[1]:>9.3f} {memory[0]:>7.1f} {memory[1]:>7.1f}"
        milliseconds = " ".join(f"{1e3 * times[path, kind]:.1f}" for kind in ("f", "fb"))
        rows.append(f"{grid:<6} {','.join(rest):<8} {path:<8} {numbers}  {note}; {milliseconds} ms")
    return rows


def _inputs(case: str) -> "tuple[list[torch.Tensor], Grid]":
    """Queries, keys' weight and bias, and values, which all require gradients, and their grid."""
    import torch

    from regard import Grid

    text, *rest = case.split(",")
    batch, heads, width = (int(number) for number in rest)
    grid = Grid(*(int(side) for side in text.split("x")))
    torch.manual_seed(0)
    q, v = (torch.randn(batch, heads, grid.cells, width, requires_grad=True) for _ in range(2))
    weight = (0.02 * torch.randn(heads * grid.cells, width, 3, 3)).requires_grad_()
    bias = torch.zeros(heads * grid.cells, requires_grad=True)
    return [q, weight, bias, v], grid


def _cska_call(inputs: "list[torch.Tensor]", grid: "Grid", path: str) -> "Callable[[], torch.Tensor]":
    from regard.ops import cska

    return lambda: cska(*inputs, grid, path=path)


def peak(case: str, path: str, trained: bool) -> float:
    """MB by which the peak resident size grows during one run, after a run that loads libraries."""
    import torch

    run = _cska_call(*_inputs(case), path)

    def once() -> None:
        with torch.set_grad_enabled(trained):
            out = run()
            if trained:
                out.sum().backward()

    peak_growth(once)
    return peak_growth(once) / 2**20


def _verdict(ratios: list[float], goal: float) -> str:
    missed = [part for part, ratio in zip(("forward", "for+back"), ratios, strict=True) if ratio > goal]
    return f"goal {goal}" + (f" (loss: {' and '.join(missed)})" if missed else "")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    sys.exit(main())
