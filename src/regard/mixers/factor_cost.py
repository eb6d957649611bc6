"""Multiply-accumulates of the four factors: as the paper counts them, and as the forms execute them."""

from typing import TYPE_CHECKING

from regard.core import Grid, Site

from .factor_door import strided_grid
from .factor_forms import COMPRESSED_CELLS, PRESETS, feature_width, reach, sinusoid_basis, table_size

if TYPE_CHECKING:
    from .factors import Factors


def paper_macs(config: "Factors", site: Site, width: int) -> int:
    """Table 1 of the paper, with the products of the operator only; a window has window^2 keys everywhere."""
    e1, e2, _, _ = (flag == "1" for flag in config.terms)
    grid, keys, inner = strided_grid(site.grid, config.query_stride), _keys(config, site), site.inner
    seen = config.window**2 if config.window else keys.tokens
    macs = 0
    if config.relative:
        lengths = (config.window,) * 2 if config.window else (2 * site.grid.width - 1, 2 * site.grid.height - 1)
        macs += sum(lengths[: config.axes]) * inner * width
    if e1:
        macs += grid.tokens * seen * inner
    elif e2:
        sides = 2 * config.window if config.window else keys.width + keys.height
        macs += grid.tokens * sides * inner
    return macs + (keys.tokens * inner if config.terms == "0010" else grid.tokens * seen * inner)


def executed_macs(config: "Factors", site: Site, width: int) -> int:
    """Every matrix product of the form that runs for one sample in float32 without a mask, eager on the CPU."""
    e1, e2, e3, e4 = (flag == "1" for flag in config.terms)
    grid, keys, inner, d = strided_grid(site.grid, config.query_stride), _keys(config, site), site.inner, site.width
    macs = keys.tokens * inner if e3 and not e1 else 0
    sides = ((grid.width, keys.width), (grid.height, keys.height))[: config.axes]
    if config.relative:
        sizes = [table_size(q, k, config.key_stride, config.query_stride) for q, k in sides]
        macs += sum(2 * size - 1 for size in sizes) * inner * (width // config.axes)
    form = config.backend
    if form == "auto":
        form = "compressed" if e1 or (e2 and grid.cells <= COMPRESSED_CELLS) else "factorised"
    if form == "materialised":
        pairs = grid.tokens * keys.tokens * inner
        return macs + pairs * (e1 + e2 + e4 + 1)
    if form == "separable":
        return macs + _places(e2, e4, grid, sides, inner) + grid.tokens * keys.tokens * inner * (1 + e1)
    if form == "compressed":
        return macs + _compressed(config, site, keys, sides)
    whole = 2 * reach(grid, keys, config.key_stride, config.query_stride) - 1
    window = 0 if config.window >= whole else config.window
    row = keys.tokens * inner * e3
    if not config.relative and not window:
        return macs + row
    macs += _places(e2, e4, grid, sides, inner) + (row if grid.extra else 0)
    if e2:
        each = site.heads * (d + e3)
        return macs + grid.cells * keys.height * (keys.width + 1) * each + grid.cells * keys.extra * inner
    return macs + grid.width * inner * (keys.cells + grid.height * (keys.height + keys.extra))


def _keys(config: "Factors", site: Site) -> Grid:
    return strided_grid(site.memory or site.grid, config.key_stride)


def _places(e2: bool, e4: bool, grid: Grid, sides: tuple[tuple[int, int], ...], inner: int) -> int:
    """Position logits of the cells against the keys of each axis."""
    if not (e2 or e4):
        return 0
    return sum((grid.cells if e2 else q) * k * inner for q, k in sides)


def _compressed(config: "Factors", site: Site, keys: Grid, sides: tuple[tuple[int, int], ...]) -> int:
    e1, e2, e3, _ = (flag == "1" for flag in config.terms)
    grid, inner, d = strided_grid(site.grid, config.query_stride), site.inner, site.width
    source = site.memory or site.grid
    features, macs = d * e1 + (e3 and not e1), 0
    if config.relative:
        base = config.base or PRESETS[config.preset][0]
        width = config.width_of_positions(site) // config.axes
        for (q, k), side in zip(sides, (source.width, source.height), strict=False):
            rank = sinusoid_basis(side, width, base, config.magnitude, config.key_stride).shape[1]
            features += rank
            macs += (grid.cells if e2 else q) * rank * inner + (q * k * rank * inner if rank < k else 0)
    return macs + 2 * grid.tokens * keys.tokens * site.heads * feature_width(features, d)
