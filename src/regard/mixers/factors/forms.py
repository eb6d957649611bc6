"""Exact fast forms of the four factors: position features, a product over the axes. See `factors`."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Grid, Mask, UnsupportedError
from regard.mixers.shared.executions import Situation, choose, true_facts
from regard.mixers.shared.kept import kept
from regard.mixers.shared.native import eager_on_cpu
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.shared.tiles import split_tokens

from .window_tiles import Cut, attend_in_tiles, cut

Tables = tuple[Tensor, Tensor | None]
"""Of x and y: a vector for each displacement (H, 2 size - 1, d); of y also one for each pair of rows (H, h, h_keys, d).
"""
# the factorised form with E2 has N * height vectors per head; above this many entries "auto" takes the compressed form
FACTORISED_LIMIT = 2**28
# up to this number of queries the compressed form is faster (measured: benchmarks/factors.py)
COMPRESSED_CELLS = 400
# base of the wavelengths, sign of delta, factor of the projected encodings
PRESETS = {"esa": (1000.0, 1, 1.0), "mmcv": (1000.0, -1, 2**-0.5), "transformer_xl": (10000.0, -1, 1.0)}


class Case(NamedTuple):
    """The input of the forms, already scaled.

    content (B,H,N,d): q + u where E1 is on. saliency (B,H,M): E3 where E1 is off. place (B or 1, H, h or 1, w or 1, d):
    the factor of r on patch tokens, q, t or their sum. x, y: the tables. per_query: whether E2 is on, so that
    `place` depends on the query. stride, query_stride: steps between keys and between queries in grid cells.
    """

    content: Tensor | None
    saliency: Tensor | None
    place: Tensor | None
    k: Tensor | None
    v: Tensor
    x: Tensor | None
    y: Tensor | None
    grid: Grid
    keys: Grid
    window: int
    stride: int
    mask: Mask
    basis: tuple[Tensor | None, Tensor | None]
    per_query: bool
    query_stride: int = 1


def choose_execution(case: Case) -> str:
    """The execution of "auto": it depends on shapes, device and compiler, never on values."""
    batch, heads, _, e = case.v.shape
    fits = product_pays(batch, heads, e, case.grid, case.keys) and eager_on_cpu(case.v)
    facts = {
        "content": case.content is not None, "mask": case.mask.kinds, "per query": case.per_query,
        "tiles": case.per_query and cut_of(case) is not None, "fits": fits,
    }  # fmt: skip
    situation = Situation(
        device=case.v.device, dtype=case.v.dtype, tokens=case.grid.tokens, keys=case.keys.tokens,
        facts=true_facts(facts),
    )  # fmt: skip
    return choose("Factors", "auto", situation)


def product_pays(batch: int, heads: int, e: int, grid: Grid, keys: Grid) -> bool:
    """Whether "auto" takes the factorised form of E2 for values of width e, in eager mode on the CPU."""
    return grid.cells > COMPRESSED_CELLS and batch * heads * grid.cells * keys.height * (e + 1) <= FACTORISED_LIMIT


def cut_of(case: Case) -> Cut | None:
    """The tiles of the compressed form: for small windows without a mask and without strides."""
    return cut(case.grid, case.window) if case.stride == case.query_stride == 1 and not case.mask.kinds else None


def inside_window(
    grid: Grid, keys: Grid, window: int, stride: int, device: torch.device, query_stride: int = 1
) -> Bool[Tensor, "N M"] | None:
    """True where |stride * key - query_stride * query| <= (window - 1) / 2 on both axes, and for prefix and suffix
    tokens.

    None without a window, or if it covers the whole map.
    """
    if not window or window >= 2 * reach(grid, keys, stride, query_stride) - 1:
        return None
    near_y = _near(grid.height, keys.height, window, stride, query_stride, device)
    near_x = _near(grid.width, keys.width, window, stride, query_stride, device)
    near = (near_y[:, None, :, None] & near_x[None, :, None, :]).flatten(2).flatten(0, 1)
    return F.pad(near, (keys.prefix, keys.suffix, grid.prefix, grid.suffix), value=True)


def table_size(queries: int, keys: int, stride: int, query_stride: int = 1) -> int:
    """The number of grid cells that queries and keys span: a table needs 2 size - 1 displacements."""
    return max(query_stride * (queries - 1), stride * (keys - 1)) + 1


def reach(grid: Grid, keys: Grid, stride: int, query_stride: int) -> int:
    """The longer side of the area that queries and keys span, in grid cells."""
    sides = ((grid.width, keys.width), (grid.height, keys.height))
    return max(table_size(*side, stride, query_stride) for side in sides)


def compressed(case: Case) -> Tensor:
    """One attention call: the position logits of an axis are dot products of r features, r the rank along the keys."""
    queries, keys = _features(case)
    v, e = case.v, case.v.shape[-1]
    width = feature_width(queries.shape[-1], e)
    queries, keys = (F.pad(x, (0, width - x.shape[-1])) for x in (queries, keys))
    # the fused kernels of the CPU need values as wide as queries
    padded = F.pad(v, (0, width - e)) if v.device.type == "cpu" else v
    tiles = cut_of(case)
    if tiles is not None:
        return attend_in_tiles(queries, keys, padded, case.grid, case.keys, tiles)[..., :e]
    out = sdpa(queries, keys, padded, attn_mask=_dense_mask(case, queries), scale=1.0)
    return out[..., :e]


def feature_width(features: int, e: int) -> int:
    """The width of a head after padding: a multiple of 8, at least the width of the values."""
    return -(-max(features, e) // 8) * 8


def factorised(case: Case) -> Tensor:
    """A product over the axes: exp(e_x + e_y + e_3) factorises, and the keys of a query are a rectangle."""
    work = torch.promote_types(case.v.dtype, torch.float32)
    if case.place is None and not case.window:
        return _one_row(case, case.v.to(work)).to(case.v.dtype).expand(-1, -1, case.grid.tokens, -1)
    v = case.v.to(work)
    cells = _product(case, v) if case.per_query else _kronecker(case, v)
    if cells is None:
        return compressed(case)
    cells = cells.flatten(2, 3).to(case.v.dtype)
    if not case.grid.extra:
        return cells
    row = _one_row(case, case.v.to(work)).to(case.v.dtype)
    before, after = (row.expand(-1, -1, count, -1) for count in (case.grid.prefix, case.grid.suffix))
    return torch.cat([before, cells, after], -2)


def pairwise(tables: Tables, grid: Grid, keys: Grid, stride: int, query_stride: int = 1) -> Float[Tensor, "H N M d"]:
    """r of every pair of tokens, zero for prefix and suffix tokens. Raises: UnsupportedError above 2^30 entries."""
    x, y = tables
    heads, _, d = x.shape
    if heads * grid.tokens * keys.tokens * d > 2**30:
        raise UnsupportedError(f"the materialised form needs a vector for each of {grid.tokens} x {keys.tokens} pairs")
    r = x.new_zeros(heads, grid.tokens, keys.tokens, d)
    coordinates = []
    for g in (grid, keys):
        row, column = torch.meshgrid(torch.arange(g.height), torch.arange(g.width), indexing="ij")
        coordinates.append((row.flatten().to(x.device), column.flatten().to(x.device)))
    (row, column), (key_row, key_column) = coordinates
    cells = x[:, stride * key_column[None, :] - query_stride * column[:, None] + x.shape[1] // 2]
    if y is not None and y.ndim == 4:
        cells = cells + y[:, row[:, None], key_row[None]]
    elif y is not None:
        cells = cells + y[:, stride * key_row[None, :] - query_stride * row[:, None] + y.shape[1] // 2]
    r[:, grid.span, keys.span] = cells
    return r


def sinusoids(positions: Float[Tensor, " n"], width: int, base: float, magnitude: float = 1.0) -> Float[Tensor, "n P"]:
    """sin(w_i p) for i < width / 2, then cos(w_i p); w_i = magnitude * base^(-2i / width)."""
    half = width // 2
    steps = torch.arange(half, device=positions.device, dtype=positions.dtype)
    angles = positions[:, None] * (magnitude * base ** (-steps / max(half, 1)))
    return torch.cat([angles.sin(), angles.cos()], -1)


@kept
def waves_of_steps(
    size: int, first: int, sign: int, width: int, base: float, magnitude: float, dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "n P"]:  # fmt: skip
    """`sinusoids` of all displacements within `size` places, n = 2 size - 1. first: the position of the first query,
    where that of the first key is 0.
    """
    steps = (torch.arange(1 - size, size, device=device, dtype=dtype) - first) * sign
    return sinusoids(steps, width, base, magnitude)


@lru_cache(maxsize=256)
def sinusoid_basis(
    keys: int, width: int, base: float, magnitude: float = 1.0, stride: int = 1, tolerance: float = 1e-7
) -> Tensor:
    """Orthonormal columns (keys / stride, r), float64, that span sin and cos of `width` / 2 wavelengths along the keys.

    keys: grid cells along the axis, of which every stride-th is a key. Singular values below tolerance times the
    largest are dropped; 1e-7 is a float32 rounding and costs one or two columns more than 1e-6. The identity where less
    than a tenth would be saved. By angle addition r(key - query) is a combination of sines and cosines of the key
    alone; they are band-limited, so about keys / pi of them matter.
    """
    number = -(-keys // stride)
    if width == 0 or number == 1:
        return torch.eye(number, dtype=torch.float64, device="cpu")
    positions = stride * torch.arange(number, dtype=torch.float64, device="cpu")
    waves = sinusoids(positions - positions.mean(), width, base, magnitude)
    left, values, _ = torch.linalg.svd(waves, full_matrices=False)
    rank = int((values > tolerance * values[0]).sum())
    return left[:, :rank].contiguous() if rank <= 0.9 * number else torch.eye(number, dtype=torch.float64, device="cpu")


@lru_cache(maxsize=256)
def frames_basis(depth: int, height: int, width: int, base: float, magnitude: float = 1.0) -> Tensor:
    """As `sinusoid_basis`, for the rows of `depth` frames below each other: (depth * height, r)."""
    time, row = (sinusoid_basis(side, width, base, magnitude) for side in (depth, height))
    both = torch.cat([time.repeat_interleave(height, 0), row.repeat(depth, 1)], 1)
    left, values, _ = torch.linalg.svd(both, full_matrices=False)
    return left[:, values > 1e-7 * values[0]].contiguous()


def rows_of_frames(y: Float[Tensor, "H Y d"], z: Float[Tensor, "H Z d"], grid: Grid, keys: Grid) -> Tensor:
    """The vector of each pair of rows of stacked frames, (H, depth * height, depth * height of the keys, d).

    y, z: by the displacement between rows of a frame, and between frames.
    """
    rows = _toeplitz(y, grid.height, keys.height, 1, 1)[:, None, :, None]
    frames = _toeplitz(z, grid.depth, keys.depth, 1, 1)[:, :, None, :, None]
    return (rows + frames).flatten(3, 4).flatten(1, 2)


def _steps(queries: int, keys: int, stride: int, query_stride: int, device: torch.device) -> Tensor:
    """stride * key - query_stride * query, (queries, keys)."""
    return (
        stride * torch.arange(keys, device=device)[None] - query_stride * torch.arange(queries, device=device)[:, None]
    )


def _near(queries: int, keys: int, window: int, stride: int, query_stride: int, device: torch.device) -> Tensor:
    return _steps(queries, keys, stride, query_stride, device).abs() <= window // 2


def _toeplitz(
    table: Float[Tensor, "H ... d"], queries: int, keys: int, stride: int, query_stride: int
) -> Float[Tensor, "H Q K d"]:
    """The table at stride * key - query_stride * query, counted from its middle; as it is where it is of pairs."""
    if table.ndim == 4:
        return table
    index = _entries(queries, keys, stride, query_stride, table.shape[1] // 2, table.device)
    return table.index_select(1, index).unflatten(1, (queries, keys))


@kept
def _entries(
    queries: int, keys: int, stride: int, query_stride: int, middle: int, device: torch.device
) -> Int[Tensor, " pairs"]:
    return (_steps(queries, keys, stride, query_stride, device) + middle).flatten()


def _along_x(place: Tensor, table: Float[Tensor, "H w K d"]) -> Tensor:
    """(b, H, h, w, d) with (H, w, K, d) -> (b, H, h, w, K): one matrix product per head and column of queries."""
    b, heads, h, w, d = place.shape
    if h == w == 1 and b == 1:  # the same vector everywhere (E4 alone)
        return (table @ place.view(heads, 1, d, 1))[None, :, None, :, :, 0]
    rows = place.permute(1, 3, 0, 2, 4).reshape(heads, w, b * h, d)
    return (rows @ table.mT).unflatten(2, (b, h)).permute(2, 0, 3, 1, 4)


def _along_y(place: Tensor, table: Float[Tensor, "H h K d"]) -> Tensor:
    """(b, H, h, w, d) with (H, h, K, d) -> (b, H, h, w, K)."""
    return _along_x(place.transpose(2, 3), table).transpose(2, 3)


def axis_logits(case: Case, transform: Callable[[Tensor, Tensor | None], Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """For x and y: logits (b,H,h,w,r) with the keys of the axis, r after `transform` of the table, and the basis."""
    place, grid, keys = cast(Tensor, case.place), case.grid, case.keys
    strides = case.stride, case.query_stride
    x = transform(_toeplitz(cast(Tensor, case.x), grid.width, keys.width, *strides), case.basis[0])
    axes = [(_along_x(place, x), case.basis[0])]
    if case.y is not None:
        y = transform(_toeplitz(case.y, grid.height, keys.height, *strides), case.basis[1])
        axes.append((_along_y(place, y), case.basis[1]))
    return axes


def _project(table: Tensor, basis: Tensor | None) -> Tensor:
    return table if _trivial(basis) else cast(Tensor, basis).to(table.dtype).mT @ table


def _trivial(basis: Tensor | None) -> bool:
    """Whether there is no basis, or a square one, which changes nothing."""
    return basis is None or basis.shape[0] == basis.shape[1]


def _features(case: Case) -> tuple[Tensor, Tensor]:
    """Query and key features (B, H, N, D), (B, H, M, D) whose dot products are the logits."""
    v, grid, keys = case.v, case.grid, case.keys
    lead = v.shape[:2]
    queries, columns = [], []
    if case.content is not None:
        queries.append(case.content)
        columns.append(cast(Tensor, case.k))
    if case.saliency is not None:
        queries.append(v.new_ones(*lead, grid.tokens, 1))
        columns.append(case.saliency[..., None].to(v.dtype))
    if case.place is not None:
        sides = (keys.width, keys.height)
        for axis, (logits, basis) in enumerate(axis_logits(case, _project)):
            r = logits.shape[-1]
            cells = logits.to(v.dtype).expand(*lead, grid.height, grid.width, r).flatten(2, 3)
            queries.append(F.pad(cells, (0, 0, grid.prefix, grid.suffix)))
            along = torch.eye(r, dtype=v.dtype, device=v.device) if _trivial(basis) else cast(Tensor, basis).to(v)
            along = along[:, None] if axis else along[None]
            key = along.expand(keys.height, sides[0], r).flatten(0, 1)
            columns.append(F.pad(key, (0, 0, keys.prefix, keys.suffix)).expand(*lead, -1, -1))
    if not queries:
        return v.new_zeros(*lead, grid.tokens, 0), v.new_zeros(*lead, keys.tokens, 0)
    return torch.cat(queries, -1), torch.cat(columns, -1)


def _dense_mask(case: Case, queries: Tensor) -> Tensor | None:
    mask = case.mask.dense(queries, case.keys.tokens)
    inside = inside_window(case.grid, case.keys, case.window, case.stride, queries.device, case.query_stride)
    if inside is None or mask is None:
        return inside if mask is None else mask
    return mask & inside if mask.dtype == torch.bool else mask.masked_fill(~inside, -torch.inf)


def _one_row(case: Case, v: Tensor) -> Tensor:
    """(B, H, 1, e): the output of a query without a position, by E3 alone or the mean."""
    return v.mean(-2, keepdim=True) if case.saliency is None else case.saliency.softmax(-1)[..., None, :] @ v


def _split(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """(B, H, M, e) -> prefix and suffix tokens (B, H, E, e) and patch tokens (B, H, h, w, e)."""
    extra, cells = split_tokens(x, grid)
    return extra, cells.unflatten(-2, (grid.height, grid.width))


def _axis_logits(case: Case) -> tuple[Tensor, Tensor]:
    """e_x (b, H, h or 1, w, W) and e_y (b, H, h, w or 1, H), -inf outside the window."""
    grid, keys, device = case.grid, case.keys, case.v.device
    zero = torch.zeros((), dtype=torch.promote_types(case.v.dtype, torch.float32), device=device)
    logits = [part for part, _ in axis_logits(case, lambda table, _: table)] if case.place is not None else []
    x = logits[0] if logits else zero.expand(1, 1, 1, grid.width, keys.width)
    y = logits[1] if len(logits) == 2 else zero.expand(1, 1, grid.height, 1, keys.height)
    if case.window:
        steps = (case.window, case.stride, case.query_stride, device)
        x = x.masked_fill(~_near(grid.width, keys.width, *steps), -torch.inf)
        y = y.masked_fill(~_near(grid.height, keys.height, *steps)[:, None], -torch.inf)
    return x, y


def _kronecker(case: Case, v: Tensor) -> Tensor:
    """Without E2: a softmax along each row of keys, then one over the rows and the other keys; cannot underflow.

    Every weight is exp(e_x + e_y + e_3); the logarithm of a row's sum is the logit of the row. O(N (H+W) C).
    """
    x, y = _axis_logits(case)
    extra, cells = _split(v, case.keys)
    x, y = x[:, :, 0][:, :, None], y[:, :, :, 0][:, :, None]  # (1, H, 1, w, W), (1, H, 1, h, H)
    salient = v.new_zeros(1, 1, case.keys.tokens) if case.saliency is None else case.saliency
    salient_extra, salient_cells = _split(salient[..., None], case.keys)
    first = x + salient_cells.squeeze(-1)[..., None, :]  # (B, H, H_keys, w, W_keys)
    total = first.logsumexp(-1)
    rows = (first - total[..., None]).exp() @ cells  # (B, H, H_keys, w, e)
    second = y + total.transpose(2, 3)[..., None, :]  # (B, H, w, h, H_keys)
    values = rows.transpose(2, 3)
    if case.keys.extra:
        more = salient_extra.mT[..., None, :]  # (B, H, 1, 1, E)
        lead = (*second.shape[:2], *second.shape[2:4])
        second = torch.cat([second, more.expand(*lead, -1)], -1)
        values = torch.cat([values, extra[:, :, None].expand(-1, -1, case.grid.width, -1, -1)], -2)
    out = second.softmax(-1) @ values  # (B, H, w, h, e)
    return out.transpose(2, 3)


def _product(case: Case, v: Tensor) -> Tensor | None:
    """With E2: sum_y a_y(q, y) sum_x a_x(q, x) s(y, x) v, divided by the same sum of s; None if that may underflow."""
    x, y = _axis_logits(case)
    y = y.expand(x.shape[:4] + y.shape[-1:])
    extra, cells = _split(v, case.keys)
    batch, heads, height, width, e = cells.shape
    salient_extra = v.new_zeros(batch, heads, case.keys.extra, 1)
    top = v.new_zeros(batch, heads, 1, 1)
    if case.saliency is not None:
        salient_extra, salient = _split(case.saliency[..., None], case.keys)
        top = salient.detach().amax((2, 3))[..., None]  # (B, H, 1, 1)
        s = (salient - top[..., None]).exp()
        cells = torch.cat([cells * s, s], -1)
    stacked = cells.transpose(2, 3).flatten(3)  # (B, H, W, H * (e + 1))
    sums = x.softmax(-1).flatten(2, 3) @ stacked
    out = (y.softmax(-1).flatten(2, 3)[..., None, :] @ sums.unflatten(-1, (height, -1))).squeeze(-2)
    weight = out.new_ones(())
    if case.saliency is not None:
        out, weight = out[..., :e], out[..., e:]
        number = torch.finfo(out.dtype)
        if eager_on_cpu(v) and bool((weight < 1e3 * number.tiny / number.eps).any()):
            return None
        out = out / weight
    if case.keys.extra:
        total = x.logsumexp(-1) + y.logsumexp(-1)
        grid_logit = total.flatten(2)[..., None] + top + weight.log()
        more = salient_extra.mT.expand(-1, -1, case.grid.cells, -1)
        share = torch.cat([grid_logit, more], -1).softmax(-1)
        out = share[..., :1] * out + share[..., 1:] @ extra
    return out.unflatten(2, (case.grid.height, case.grid.width))
