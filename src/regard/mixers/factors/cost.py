"""Multiply-accumulates of the four factors, as the paper counts them and as the forms execute them."""

import math
from typing import Protocol, runtime_checkable

from regard.core import Grid, Site

from .forms import PRESETS, feature_width, frames_basis, product_pays, reach, sinusoid_basis, table_size
from .window_tiles import Cut, cut


@runtime_checkable
class FactorFields(Protocol):
    """The attributes of a `Factors` configuration that the costs use."""

    @property
    def terms(self) -> str: ...
    @property
    def execution(self) -> str: ...
    @property
    def preset(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def axes(self) -> int: ...
    @property
    def relative(self) -> bool: ...
    @property
    def magnitude(self) -> float: ...
    @property
    def base(self) -> float: ...
    @property
    def key_stride(self) -> int: ...
    @property
    def query_stride(self) -> int: ...

    def width_of_positions(self, site: Site) -> int: ...


def paper_macs(config: FactorFields, site: Site, width: int) -> int:
    """Table 1 of the paper, the products of the operator alone.

    A window has window^axes keys everywhere, also at the border, but never more than the map has, and the prefix and
    suffix tokens: a window as large as the map costs the same as no window.
    """
    e1, e2, _, _ = (flag == "1" for flag in config.terms)
    grid, keys, inner = _queries(config, site), _keys(config, site), site.inner
    source, window, axes = site.memory or site.grid, config.window or math.inf, config.axes
    per_query = int(min(window**axes, keys.cells)) + keys.extra
    macs = 0
    if config.relative:
        steps = [q + k - 1 for q, k in _axes(site.grid, source, axes)]
        macs += int(sum(min(window, count) for count in steps)) * inner * width
    if e1:
        macs += grid.tokens * per_query * inner
    elif e2:
        macs += grid.tokens * int(min(axes * window, sum((keys.width, keys.height)[:axes]))) * inner
    return macs + (keys.tokens * inner if config.terms == "0010" else grid.tokens * per_query * inner)


def executed_macs(config: FactorFields, site: Site, width: int) -> int:
    """All matrix products of the form that runs for one sample in float32 without a mask, in eager mode on the CPU."""
    e1, e2, e3, e4 = (flag == "1" for flag in config.terms)
    grid, keys, inner, d = _queries(config, site), _keys(config, site), site.inner, site.width
    form = _form(config, site)
    # with E1, E3 is part of its product; the materialised form computes every term by itself
    macs = keys.tokens * inner if e3 and (not e1 or form == "materialised") else 0
    sides = ((grid.width, keys.width), (grid.height, keys.height))[: config.axes]
    if config.relative:
        grids = site.grid.every(config.query_stride), (site.memory or site.grid).every(config.key_stride)
        apart = _axes(*grids, config.axes)
        sizes = [table_size(q, k, config.key_stride, config.query_stride) for q, k in apart]
        macs += sum(2 * size - 1 for size in sizes) * inner * (width // config.axes)
    if form == "materialised":
        pairs = grid.tokens * keys.tokens * inner
        return macs + pairs * (e1 + e2 + e4 + 1)
    if form == "compressed":
        return macs + _compressed_macs(config, site, keys, sides)
    row = keys.tokens * inner * e3
    if not config.relative and not _window(config, site):
        return macs + row
    macs += _position_macs(e2, e4, grid, sides, inner) + (row if grid.extra else 0)
    if e2:
        each = site.heads * (d + e3)
        return macs + grid.cells * keys.height * (keys.width + 1) * each + grid.cells * keys.extra * inner
    return macs + grid.width * inner * (keys.cells + grid.height * (keys.height + keys.extra))


def exponentials(config: FactorFields, site: Site) -> int:
    """Entries in the softmax of that form: one per pair of tokens, or one per token and row or column of keys."""
    _, e2, e3, _ = (flag == "1" for flag in config.terms)
    grid, keys, heads = _queries(config, site), _keys(config, site), site.heads
    form = _form(config, site)
    if form != "factorised":
        tiles = _cut(config, site) if form == "compressed" else None
        return heads * (grid.tokens * keys.tokens if tiles is None else tiles.pairs(grid, keys))
    row = heads * keys.tokens * e3
    if not config.relative and not _window(config, site):
        return row
    row = row if grid.extra else 0
    if e2:
        last = grid.cells * (1 + keys.extra) if keys.extra else 0
        return row + heads * (grid.cells * (keys.width + keys.height) + keys.cells * e3 + last)
    heads = heads if config.relative or e3 else 1
    return row + heads * (grid.width * keys.cells + grid.cells * (keys.height + keys.extra))


def _form(config: FactorFields, site: Site) -> str:
    """The form that the configuration names, or that `forms.choose_execution` takes for one sample."""
    if config.execution != "auto":
        return config.execution
    e1, e2, _, _ = (flag == "1" for flag in config.terms)
    if not e1 and not e2:
        return "factorised"
    if e1 or _cut(config, site) is not None:
        return "compressed"
    grid, keys = _queries(config, site), _keys(config, site)
    return "factorised" if product_pays(1, site.heads, site.width, grid, keys) else "compressed"


def _window(config: FactorFields, site: Site) -> int:
    """The window, 0 where it covers the whole map."""
    grid, keys = _queries(config, site), _keys(config, site)
    whole = 2 * reach(grid, keys, config.key_stride, config.query_stride) - 1
    return 0 if config.window >= whole else config.window


def _cut(config: FactorFields, site: Site) -> Cut | None:
    return cut(site.grid, _window(config, site)) if config.key_stride == config.query_stride == 1 else None


def _axes(grid: Grid, keys: Grid, axes: int) -> list[tuple[int, int]]:
    """Sides of queries and keys along each axis with a table: x, y, and frames where there are several."""
    sides = [(grid.width, keys.width), (grid.height, keys.height)][:axes]
    return [*sides, (grid.depth, keys.depth)] if max(grid.depth, keys.depth) > 1 else sides


def _keys(config: FactorFields, site: Site) -> Grid:
    return (site.memory or site.grid).every(config.key_stride).stacked()


def _queries(config: FactorFields, site: Site) -> Grid:
    return site.grid.every(config.query_stride).stacked()


def _position_macs(e2: bool, e4: bool, grid: Grid, sides: tuple[tuple[int, int], ...], inner: int) -> int:
    """MACs of the position logits of the patch tokens with the keys of each axis."""
    if not (e2 or e4):
        return 0
    return sum((grid.cells if e2 else q) * k * inner for q, k in sides)


def _compressed_macs(config: FactorFields, site: Site, keys: Grid, sides: tuple[tuple[int, int], ...]) -> int:
    e1, e2, e3, _ = (flag == "1" for flag in config.terms)
    grid, inner, d = _queries(config, site), site.inner, site.width
    source = site.memory or site.grid
    features, macs = d * e1 + (e3 and not e1), 0
    if config.relative:
        base = config.base or PRESETS[config.preset][0]
        width = config.width_of_positions(site) // config.axes
        ranks = [
            sinusoid_basis(side, width, base, config.magnitude, config.key_stride).shape[1]
            for side in (source.width, source.height)
        ]
        if source.depth > 1:
            ranks[1] = frames_basis(source.depth, source.height, width, base, config.magnitude).shape[1]
        for (q, k), rank in zip(sides, ranks, strict=False):
            features += rank
            macs += (grid.cells if e2 else q) * rank * inner + (q * k * rank * inner if rank < k else 0)
    tiles = _cut(config, site)
    pairs = grid.tokens * keys.tokens if tiles is None else tiles.pairs(grid, keys)
    return macs + 2 * pairs * site.heads * feature_width(features, d)
