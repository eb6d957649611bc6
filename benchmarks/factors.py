"""Fast forms of the spatial factors against the materialised and the dense separable one.

"separable" is the dense form as mmcv runs it: all logits, a softmax, a product. "separable, fused" leaves the last two
to fused attention where there are queries and keys to give it.
Prints the median milliseconds of the forward pass of the operator with its tables (one image, C channels, 8 heads,
float32) and their ratio to "auto". Candidates take turns in one process; plain softmax attention is shown beside them.
`python benchmarks/factors.py [--sides 14 32 64] [--terms 1111 0110 0011] [--rounds 5] [--threads 1]`
"""

import argparse
import os
import platform
import statistics
import sys
import time
from unittest import mock

from regard.measure.allocator import ALLOCATOR

# glibc gives large blocks back at every free, and page faults then double the times
MATERIALISED_LIMIT = 2**29  # numbers in the tensor over pairs: 2 GB of float32


def measure(side: int, terms: str, rounds: int, dim: int, heads: int) -> dict[str, list[float]]:
    """Seconds of each round for each form that fits."""
    import torch

    from regard import Factors, Grid, Site, ops
    from regard.mixers import factor_forms

    torch.manual_seed(0)
    grid = Grid(side, side)
    operator = Factors(terms).build(Site(dim, heads, grid, qkv_bias=False)).operator
    q, k, v = torch.randn(3, 1, heads, grid.tokens, dim // heads) * (dim // heads) ** -0.25
    shape = {"terms": terms, "grid": grid, "u": operator.u, "t": operator.t}

    def run(backend):
        basis = (operator.basis_x, operator.basis_y)
        return ops.factors(q, k, v, **shape, tables=operator.tables(grid, grid), basis=basis, backend=backend)

    def by_hand():
        with mock.patch.object(factor_forms, "sdpa", dense):
            return run("separable")

    def plain():
        return ops.softmax(q, k, v, scale=1.0)

    forms = {name: lambda name=name: run(name) for name in ("auto", "compressed", "materialised")}
    forms["separable"] = by_hand
    if terms[0] == "1":
        forms["separable, fused"] = lambda: run("separable")
    if grid.tokens**2 * dim > MATERIALISED_LIMIT:
        del forms["materialised"]
    forms["softmax attention"] = plain
    taken: dict[str, list[float]] = {name: [] for name in forms}
    with torch.no_grad():
        expected = run("auto")
        for name, form in forms.items():
            if name != "softmax attention":
                assert (form() - expected).abs().max() < 1e-4, name
        for _ in range(rounds):
            for name, form in forms.items():
                start = time.perf_counter()
                form()
                taken[name].append(time.perf_counter() - start)
    return taken


def dense(q, k, v, *, attn_mask, scale):
    """Attention with all logits at once."""
    return (q @ k.mT * scale).add_(attn_mask).softmax(-1) @ v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[14, 32, 64])
    parser.add_argument("--terms", nargs="+", default=["1111", "0110", "0011"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    import torch

    torch.set_num_threads(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{options.threads} thread(s), C={options.dim}, {options.heads} heads, median of {options.rounds} rounds"
    )
    print(f"{'grid':>7} {'terms':>5}  {'form':<18} {'ms':>9} {'quartiles':>17} {'/ auto':>7}")
    for side in options.sides:
        for terms in options.terms:
            taken = measure(side, terms, options.rounds, options.dim, options.heads)
            own = statistics.median(taken["auto"])
            for name, seconds in taken.items():
                low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
                print(
                    f"{side}x{side:<4} {terms:>5}  {name:<18} {middle:9.2f} {low:8.2f}-{high:<8.2f} "
                    f"{middle / 1e3 / own:7.2f}"
                )


if __name__ == "__main__":
    main()
