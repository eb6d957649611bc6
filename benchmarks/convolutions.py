"""Deformable convolution against torchvision's operator; dynamic convolution by matrices against taps, and its memory.

Prints the median milliseconds (CPU time of one thread) of the 3x3 operator with factors, forward and forward+backward,
and the ratio to torchvision, which has no bfloat16 on the CPU; candidates take turns in one process, and REGARD_NATIVE
does not matter. Then the operator of dynamic convolution (two images, 16 groups) on small maps, where it is a product
of matrices, and the ratio to its sum over taps, both with the kernels given. Then the seconds of a whole dynamic
convolution layer, and the peak of its process above what it had before the call, in fresh processes.
`python benchmarks/convolutions.py [--cases 4x64x14x14 ...] [--maps 14x14x256x31 ...] [--memory 31] [--rounds 5]
[--json]`
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from functools import partial

from peaks import in_fresh_process, peak_growth

from regard.core.allocator import ALLOCATOR

CASES = ["4x64x14x14", "2x64x32x32", "1x64x64x64"]
MAPS = ["8x8x64x13", "7x7x512x13", "14x14x256x15", "14x14x256x31", "25x25x256x31"]


def measure(case: str, rounds: int) -> list[dict]:
    """Rows of one case: batch x channels x height x width."""
    import torch
    from torchvision.ops import deform_conv2d

    from regard import ops

    batch, channels, height, width = map(int, case.split("x"))
    torch.manual_seed(0)
    x = torch.randn(batch, channels, height, width)
    weight = torch.randn(channels, channels, 3, 3) / (3 * channels**0.5)
    offsets, mask = torch.randn(batch, 18, height, width), torch.rand(batch, 9, height, width)
    leaves = [t.requires_grad_() for t in (x, weight, offsets, mask)]
    low = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]

    forms = {
        "torchvision": (lambda: deform_conv2d(x, offsets, weight, padding=1, mask=mask), leaves),
    }
    for name, execution in (("eager", "eager"), ("compiled", "native")):
        for label, values in ((name, [x, weight]), (f"{name}, bfloat16", low)):
            call = partial(ops.deformable_conv, *values, offsets, mask=mask, padding=1, execution=execution)
            forms[label] = (call, [*values, offsets, mask])
    difference = (forms["torchvision"][0]() - forms["eager"][0]()).abs().max().item()
    assert difference < 1e-4, difference
    elapsed: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for kind in ("forward", "forward+backward"):
            for name, (call, values) in forms.items():
                start = time.process_time()
                if kind == "forward":
                    with torch.no_grad():
                        call()
                else:
                    out = call()
                    torch.autograd.grad(out, values, torch.ones_like(out))
                if turn:
                    elapsed.setdefault((name, kind), []).append(time.process_time() - start)
    medians = {key: statistics.median(values) for key, values in elapsed.items()}
    return [
        {
            "case": case,
            "form": name,
            "pass": kind,
            "ms": 1e3 * seconds,
            "faster": medians["torchvision", kind] / seconds,
        }
        for (name, kind), seconds in medians.items()
    ]


def matrices(case: str, rounds: int) -> list[dict]:
    """Both forms of dynamic convolution of two images: height x width x channels x kernel."""
    import torch
    import torch.nn.functional as F

    from regard.mixers.convolutions.dynamic import by_matrices, by_taps, small, taps_between
    from regard.mixers.convolutions.sampling import margins

    height, width, channels, kernel = map(int, case.split("x"))
    sides, groups = (kernel, kernel), 16
    torch.manual_seed(0)
    maps = torch.randn(2, groups, channels // groups, height, width, requires_grad=True)
    kernels = torch.randn(2, groups, kernel**2, height, width).softmax(2).requires_grad_()
    assert small(maps, kernel**2), f"{case} has more cells than taps"

    def product() -> torch.Tensor:
        taps = taps_between((height, width), sides, False, maps.device)
        return by_matrices(maps, kernels.flatten(3).permute(0, 3, 1, 2), taps)

    def total() -> torch.Tensor:
        return by_taps(F.pad(maps, margins(sides, 1, False)), kernels, sides)

    assert (product() - total()).abs().max() < 1e-5
    elapsed: dict[tuple[bool, bool], list[float]] = {}
    for turn in range(rounds + 1):
        for train in (False, True):
            for form in (product, total):
                start = time.process_time()
                with torch.set_grad_enabled(train):
                    out = form()
                if train:
                    torch.autograd.grad(out.sum(), (maps, kernels))
                if turn:
                    elapsed.setdefault((train, form is product), []).append(time.process_time() - start)
    medians = {key: statistics.median(values) for key, values in elapsed.items()}
    return [
        {
            "case": case,
            "train": train,
            "ms": 1e3 * medians[train, True],
            "faster": medians[train, False] / medians[train, True],
        }
        for train in (False, True)
    ]


def memory(kernel: int, train: bool) -> dict:
    """One pass of a layer with C=256, 16 groups on 50x84 cells: seconds, and the peak above the start in GB."""
    import torch

    from regard import DynamicConv, Grid, Site

    torch.set_num_threads(1)
    grid = Grid(50, 84)
    layer = DynamicConv(kernel=kernel).build(Site(256, 8, grid))
    x = torch.randn(1, grid.cells, 256, requires_grad=train)
    small = Grid(3, 4)
    layer(torch.randn(1, 12, 256), small).sum().backward()  # libraries and gradients of parameters are there

    def once() -> None:
        with torch.set_grad_enabled(train):
            out = layer(x, grid)
        if train:
            out.sum().backward()

    start = time.process_time()
    peak = peak_growth(once)
    return {"kernel": kernel, "train": train, "seconds": time.process_time() - start, "peak_gb": peak / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--maps", nargs="*", default=MAPS, help="of dynamic convolution by matrices")
    parser.add_argument("--memory", type=int, nargs="*", default=[31], help="kernels of dynamic convolution")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    import torch

    torch.set_num_threads(1)
    rows = [row for case in options.cases for row in measure(case, options.rounds)]
    small = [row for case in options.maps for row in matrices(case, options.rounds)]
    peaks = [in_fresh_process(memory, kernel, train) for kernel in options.memory for train in (False, True)]
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
    if options.json:
        print(json.dumps({"machine": machine, "deformable": rows, "matrices": small, "dynamic": peaks}, indent=2))
        return
    print(machine)
    print(f"{'case':>12}  {'form':<18} {'pass':<17} {'ms':>9} {'times faster than torchvision':>30}")
    for row in rows:
        print(f"{row['case']:>12}  {row['form']:<18} {row['pass']:<17} {row['ms']:9.2f} {row['faster']:30.2f}")
    for row in small:
        kind = "forward+backward" if row["train"] else "forward"
        print(f"{row['case']:>14}  {kind:<17} {row['ms']:9.2f} ms, {row['faster']:.2f} times faster than taps")
    for row in peaks:
        kind = "forward and backward" if row["train"] else "forward"
        print(
            f"dynamic convolution {row['kernel']}x{row['kernel']}, 50x84, C=256, {kind}: "
            f"{row['seconds']:.1f} s, peak {row['peak_gb']:.2f} GB"
        )


if __name__ == "__main__":
    main()
