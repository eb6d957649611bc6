"""Times of the executions on this device, so that "auto" takes the fastest: `regard bench --calibrate`."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Grid, UnsupportedError
from regard.mixers.bra import bra
from regard.mixers.mita.mita import PooledQueries, mita
from regard.mixers.moba import moba
from regard.mixers.shared.calibration import Measured
from regard.mixers.shared.executions import MEASURED
from regard.mixers.shared.routed_attention import COPIES
from regard.mixers.topk.topk import topk

from .bench import DTYPES, checked_placement, with_gradients
from .turns import in_turns, one_thread

HEADS, WIDTH = 3, 64
Attend = Callable[[Tensor, Tensor, Tensor, Grid, str], Tensor]
"""Attention of q, k and v on a grid, by the execution of a name."""


class Case(NamedTuple):
    """What is measured. sizes: tokens, m and top, as in `Situation`."""

    mechanism: str
    grid: Grid
    sizes: tuple[int, int, int]
    attend: Attend


SIZES = ((14, 25, 25), (32, 25, 25), (32, 64, 64), (64, 64, 64), (64, 128, 128), (128, 128, 128))
"""Side of the grid, m and top; about a factor of four apart in tokens."""
SMALL = ((6, 4, 4),)


def cases(small: bool) -> Iterator[Case]:
    """What is measured. small: one tiny size, to try the way."""
    for side, m, top in SMALL if small else SIZES:
        grid = Grid(side, side)
        yield Case("MiTA", grid, (grid.cells, m, top), _mita(m, top))
        if m < 128:
            yield Case("TopK", grid, (grid.cells, 0, top), _topk(top))
        if m < 64:  # of these two the number of keys follows from the grid
            parts = {6: 2, 14: 2, 32: 4}[side]
            block = side // parts
            yield Case("MoBA, NSA", grid, (grid.cells, parts**2, 2 * block**2), _moba((block, block)))
            regions = {6: 3, 14: 7, 32: 8}[side]
            yield Case("BRA", grid, (grid.cells, regions**2, 4 * (side // regions) ** 2), _bra(regions))


def time_executions(
    device: torch.device, *, dtypes: Sequence[str] = ("fp32", "bf16"), seconds: float = 0.3, small: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[Measured]:  # fmt: skip
    """The seconds of each execution that can run here, forward and in training, one image of 3 heads of 64.

    seconds: for each execution of a case, at least five rounds. report: called with a line before each case.
    Raises: ConfigError for an unknown dtype or seconds that are not positive.
    """
    rows = []
    for dtype in dtypes:
        checked_placement(str(device), dtype, seconds=seconds)
        for case in cases(small):
            for trains in (False, True):
                if report is not None:
                    text = f"{case.mechanism}, {case.sizes[0]} tokens, m={case.sizes[1]}, top={case.sizes[2]}, {dtype}"
                    report(text + (", training" if trains else ""))
                row = _measured(case, device, DTYPES[dtype], trains, seconds)
                if row is not None:
                    rows.append(row)
    return rows


def _measured(case: Case, device: torch.device, dtype: torch.dtype, trains: bool, seconds: float) -> Measured | None:
    torch.manual_seed(0)
    shape = (1, HEADS, case.grid.tokens, WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_(trains) for _ in range(3))
    runs: dict[str, Callable[[], object]] = {}
    for name in MEASURED[case.mechanism]:
        copied = {"dense": case.grid.tokens, "gather": case.sizes[2] * WIDTH}.get(name, 0)
        if HEADS * case.grid.tokens * copied > COPIES:
            continue

        def run(name: str = name) -> Tensor:
            return case.attend(q, k, v, case.grid, name)

        try:
            runs[name] = with_gradients(run, [q, k, v]) if trains else torch.no_grad()(run)
            runs[name]()
        except UnsupportedError:
            runs.pop(name, None)
    if not runs:
        return None
    with one_thread():
        summaries = in_turns(list(runs.values()), seconds, device)
    return Measured(
        mechanism=case.mechanism, dtype=str(dtype).removeprefix("torch."), trains=trains, sizes=case.sizes,
        seconds={name: summary.median for name, summary in zip(runs, summaries, strict=True)},
    )  # fmt: skip


def _mita(m: int, top: int) -> Attend:
    return lambda q, k, v, grid, name: mita(q, k, v, PooledQueries(grid, m), top, execution=name)


def _topk(top: int) -> Attend:
    return lambda q, k, v, grid, name: topk(q, k, v, top, execution=name)


def _moba(block: tuple[int, int]) -> Attend:
    return lambda q, k, v, grid, name: moba(q, k, v, grid, block, 2, execution=name)


def _bra(regions: int) -> Attend:
    return lambda q, k, v, grid, name: bra(q, k, v, grid, regions, 4, execution=name)
