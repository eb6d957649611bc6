"""Fast forms of the spatial factors against the materialised and the dense separable one.

"separable" is the dense form as mmcv runs it: all logits, a softmax, a product. In "separable, fused" fused attention
computes the softmax and the product, for terms with E1.
Prints the median milliseconds of the forward pass of the operator with its tables (one image, C channels, 8 heads,
float32) and their ratio to "auto". Candidates take turns in one process; plain softmax attention is shown beside them.
With --memory it prints instead the peak of a forward and backward pass above what its process had before, in a fresh
process for each form, at the first of --sides and --terms, one thread.
`python benchmarks/factors.py [--sides 14 32 64] [--terms 1111 0110 0011] [--rounds 5] [--threads 1] [--window 7]`
"""

import argparse
import os
import platform
import statistics
import sys
import time
from contextlib import nullcontext
from unittest import mock

from dense_factors import as_mmcv
from peaks import in_fresh_process, peak_growth

from regard.core.allocator import ALLOCATOR

MATERIALISED_LIMIT = 2**29  # numbers in the tensor over pairs: 2 GB of float32


def measure(side: int, terms: str, rounds: int, dim: int, heads: int, window: int) -> dict[str, list[float]]:
    """Seconds of each round for each form that fits."""
    import torch

    from regard import Factors, Grid, Site, ops
    from regard.mixers.factors import forms as factor_forms

    torch.manual_seed(0)
    grid = Grid(side, side)
    operator = Factors(terms).build(Site(dim, heads, grid, qkv_bias=False)).operator
    q, k, v = torch.randn(3, 1, heads, grid.tokens, dim // heads) * (dim // heads) ** -0.25
    shape = {"terms": terms, "grid": grid, "u": operator.u, "t": operator.t, "window": window}

    def run(backend, **more):
        basis, tables = (operator.basis_x, operator.basis_y), operator.tables(grid, grid)
        return ops.factors(q, k, v, **shape | more, tables=tables, basis=basis, execution=backend)

    def by_hand(fused=False):
        with as_mmcv(fused=fused):
            return run("compressed")

    def masked():
        with mock.patch.object(factor_forms, "cut_of", return_value=None):
            return run("compressed")

    def plain():
        return ops.softmax(q, k, v, scale=1.0)

    forms = {name: lambda name=name: run(name) for name in ("auto", "compressed", "materialised")}
    forms["separable"] = by_hand
    if terms[0] == "1":
        forms["separable, fused"] = lambda: by_hand(fused=True)
    if grid.tokens**2 * dim > MATERIALISED_LIMIT:
        del forms["materialised"]
    if window:
        forms |= {"compressed, masked": masked, "no window": lambda: run("auto", window=0)}
    forms["softmax attention"] = plain
    elapsed: dict[str, list[float]] = {name: [] for name in forms}
    with torch.no_grad():
        expected = run("auto")
        for name, form in forms.items():
            if name not in ("softmax attention", "no window"):
                assert (form() - expected).abs().max() < 1e-4, name
        for _ in range(rounds):
            for name, form in forms.items():
                start = time.perf_counter()
                form()
                elapsed[name].append(time.perf_counter() - start)
    return elapsed


def peak(side: int, terms: str, form: str, dim: int, heads: int) -> float:
    """Megabytes that a forward and backward pass of one form adds to this process at its peak."""
    import torch

    from regard import Factors, Grid, Site, ops

    torch.set_num_threads(1)
    torch.manual_seed(0)
    baseline = as_mmcv(fused=form.endswith("fused")) if form.startswith("separable") else nullcontext()

    def more(side):
        grid = Grid(side, side)
        operator = Factors(terms).build(Site(dim, heads, grid, qkv_bias=False)).operator
        q, k, v = (torch.randn(3, 1, heads, grid.tokens, dim // heads) * (dim // heads) ** -0.25).unbind()
        tables, basis = operator.tables(grid, grid), (operator.basis_x, operator.basis_y)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        execution = "auto" if form == "auto" else "compressed"
        shape = {"terms": terms, "grid": grid, "u": operator.u, "t": operator.t, "execution": execution}
        return peak_growth(lambda: ops.factors(*leaves, **shape, tables=tables, basis=basis).sum().backward())

    with baseline:
        more(8)  # libraries are loaded
        return more(side) / 1e6


def memory(side: int, terms: str, dim: int, heads: int) -> None:
    """Print the peaks of the forms."""
    automatic = 0.0
    for form in ("auto", "separable", "separable, fused"):
        megabytes = in_fresh_process(peak, side, terms, form, dim, heads)
        automatic = automatic or megabytes
        print(
            f"{side}x{side:<4} {terms:>5}  {form:<18} {megabytes:9.0f} MB  auto has {automatic / megabytes:.3f} of it",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[14, 32, 64])
    parser.add_argument("--terms", nargs="+", default=["1111", "0110", "0011"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument(
        "--window", type=int, default=0, help="side in cells: also the mask over all pairs, and no window"
    )
    parser.add_argument("--memory", action="store_true", help="peaks of memory instead of times")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    import torch

    torch.set_num_threads(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{options.threads} thread(s), C={options.dim}, {options.heads} heads, median of {options.rounds} rounds"
    )
    if options.memory:
        memory(options.sides[0], options.terms[0], options.dim, options.heads)
        return
    print(f"{'grid':>7} {'terms':>5}  {'form':<18} {'ms':>9} {'quartiles':>17} {'/ auto':>7}")
    for side in options.sides:
        for terms in options.terms:
            elapsed = measure(side, terms, options.rounds, options.dim, options.heads, options.window)
            automatic = statistics.median(elapsed["auto"])
            for name, seconds in elapsed.items():
                low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
                print(
                    f"{side}x{side:<4} {terms:>5}  {name:<18} {middle:9.2f} {low:8.2f}-{high:<8.2f} "
                    f"{middle / 1e3 / automatic:7.2f}"
                )


if __name__ == "__main__":
    main()
