"""Exactness of the spatial factors: the largest difference of every form to the materialised one, in float64.

Rows are the 16 strings of terms, columns the forms and the cases: a square map, a rectangular one with prefix and
suffix tokens, a window, key stride 2. "-" stands where a form does not exist (the factorised one with E1).
`python benchmarks/factor_differences.py [--json]`
"""

import argparse
import itertools
import json
import platform

BACKENDS = ("auto", "compressed", "factorised")
# case -> rows, columns, prefix, suffix; window; stride
CASES = {
    "square": ((8, 8, 0, 0), 0, 1),
    "rectangular": ((5, 12, 1, 2), 0, 1),
    "window": ((9, 7, 1, 0), 5, 1),
    "stride": ((7, 10, 2, 0), 0, 2),
}


def differences(seed: int = 0) -> list[dict]:
    """One dictionary for each string of terms, form and case: terms, backend, case, difference (None: no such form)."""
    import torch

    from regard import Grid, ops

    rows = []
    for terms, (case, (shape, window, stride)) in itertools.product(
        ("".join(flags) for flags in itertools.product("01", repeat=4)), CASES.items()
    ):
        grid, source = Grid(*shape), torch.Generator().manual_seed(seed)
        cells = -(-grid.height // stride) * -(-grid.width // stride)

        def draw(*sides: int, source: torch.Generator = source) -> torch.Tensor:
            return torch.randn(*sides, generator=source, dtype=torch.float64)

        q, k, v = draw(2, 3, grid.tokens, 8), *(draw(2, 3, cells + grid.extra, width) for width in (8, 6))
        tables = tuple(draw(3, 2 * side - 1, 8) for side in (grid.width, grid.height))
        options = {"terms": terms, "grid": grid, "tables": tables, "u": draw(3, 8), "t": draw(3, 8), "window": window}
        expected = ops.factors_reference(q, k, v, **options, stride=stride)
        for backend in BACKENDS:
            difference = None
            if backend != "factorised" or terms[0] == "0":
                out = ops.factors(q, k, v, **options, stride=stride, execution=backend)
                difference = (out - expected).abs().max().item()
            rows.append({"terms": terms, "backend": backend, "case": case, "difference": difference})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    rows = differences()
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    if options.json:
        print(json.dumps({"machine": machine, "differences": rows}, indent=2))
        return
    print(machine)
    for case, (shape, window, stride) in CASES.items():
        print(f"\n{case}: {grid_text(shape)}, window {window or 'none'}, stride {stride}")
        print(f"{'terms':>6} " + " ".join(f"{backend:>12}" for backend in BACKENDS))
        for terms in dict.fromkeys(row["terms"] for row in rows):
            line = [row["difference"] for row in rows if (row["terms"], row["case"]) == (terms, case)]
            print(f"{terms:>6} " + " ".join(f"{'-' if d is None else format(d, '.1e'):>12}" for d in line))
    worst = max(row["difference"] for row in rows if row["difference"] is not None)
    print(f"\nlargest of all: {worst:.1e}")


def grid_text(shape: tuple[int, int, int, int]) -> str:
    height, width, prefix, suffix = shape
    return f"{height}x{width} patch + {prefix} prefix + {suffix} suffix tokens"


if __name__ == "__main__":
    main()
