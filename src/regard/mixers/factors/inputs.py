"""Input checks of the four factors, the positions of strided queries and keys, and the input of the forms."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import NO_MASK, ConfigError, Grid, Mask, ShapeError, UnsupportedError, nearest

from .forms import Case, Tables, reach, table_size

EXECUTIONS = ("auto", "compressed", "factorised", "flex", "materialised")
Bases = tuple[Tensor, Tensor | None]


def strided_tokens(grid: Grid, stride: int, device: torch.device) -> Tensor:
    """The indices of the tokens of `grid.every(stride)` among those of `grid`."""
    rows = torch.arange(0, grid.height, stride, device=device) * grid.width + grid.prefix
    cells = (rows[:, None] + torch.arange(0, grid.width, stride, device=device)).flatten()
    token = torch.arange(grid.tokens, device=device)
    return torch.cat([token[: grid.prefix], cells, token[grid.prefix + grid.cells :]])


def interpolate(x: Tensor, coarse: Grid, grid: Grid) -> Tensor:
    """(B, H, N coarse, e) on `grid`: patch tokens by bilinear interpolation (corners not aligned), others unchanged."""
    cells = x[..., coarse.span, :].transpose(2, 3).flatten(1, 2).unflatten(-1, (coarse.height, coarse.width))
    full = F.interpolate(cells, (grid.height, grid.width), mode="bilinear", align_corners=False)
    full = full.unflatten(1, (x.shape[1], -1)).flatten(3).transpose(2, 3)
    return torch.cat([x[..., : grid.prefix, :], full, x[..., coarse.prefix + coarse.cells :, :]], -2)


def check_numbers(terms: str, window: int, stride: int, query_stride: int) -> None:
    """Raises ConfigError unless terms are four of 0/1, and every query has a key in its window."""
    if not isinstance(terms, str) or len(terms) != 4 or set(terms) - {"0", "1"}:
        raise ConfigError(f'terms must be four of 0/1 for E1..E4, like "0110", not {terms!r}')
    if stride < 1 or window < 0 or (window and (window % 2 == 0 or window < 2 * stride - 1)):
        raise ConfigError(f"a window is odd and >= 2 stride - 1 (0 = all), stride >= 1, not {window}, {stride}")
    if query_stride < 1:
        raise ConfigError(f"query_stride is at least 1, not {query_stride}")


def check_case(
    q: Tensor | None, k: Tensor | None, v: Tensor, terms: str, grid: Grid, key_grid: Grid | None, tables: Tables | None,
    u: Tensor | None, t: Tensor | None, window: int, stride: int, query_stride: int, basis: Bases | None,
    execution: str,
) -> Grid:  # fmt: skip
    """Check the inputs of `factors` and its reference; returns the grid of the keys.

    Raises: ConfigError, ShapeError, GridError, UnsupportedError.
    """
    check_numbers(terms, window, stride, query_stride)
    if query_stride > 1 and key_grid is None:
        raise ConfigError(f"with query_stride={query_stride} the key grid does not follow from {grid}; give key_grid=")
    if execution not in EXECUTIONS:
        raise ConfigError(f"execution {execution!r} is unknown; {nearest(execution, EXECUTIONS)}")
    keys = key_grid or grid.every(stride)
    sides = ((grid.height, keys.height), (grid.width, keys.width))
    if window and not all(_one_side(*side, stride, query_stride) for side in sides):
        raise UnsupportedError(f"a window needs keys on the grid of the queries ({grid}), not on {keys}")
    e2, e4 = terms[1] == "1", terms[3] == "1"
    needed = check_needed(terms, q, k, u, t, tables)
    keys.check(v)
    if needed["q"][0]:
        grid.check(cast(Tensor, q))
    if needed["k"][0]:
        keys.check(cast(Tensor, k))
    tensors = {name: cast(Tensor, x) for name, (used, x) in needed.items() if used and name != "tables"}
    _check_widths(v.shape[1], tensors, tables if e2 or e4 else None, grid, keys, stride, query_stride)
    for side, u_r in zip((keys.width, keys.height), basis or (), strict=False):
        if u_r is not None and (u_r.ndim != 2 or u_r.shape[0] != side):
            raise ShapeError(f"a basis has shape {tuple(u_r.shape)}; expected ({side}, r) for {side} keys of its axis")
    return keys


def check_needed(
    terms: str, q: Tensor | None, k: Tensor | None, u: Tensor | None, t: Tensor | None, tables: Tables | None
) -> dict[str, tuple[bool, Tensor | Tables | None]]:
    """Each argument by name: whether the terms use it, and its value. Raises: ConfigError if a used one is None."""
    e1, e2, e3, e4 = (flag == "1" for flag in terms)
    needed: dict[str, tuple[bool, Tensor | Tables | None]] = {
        "q": (e1 or e2, q), "k": (e1 or e3, k), "u": (e3, u), "t": (e4, t), "tables": (e2 or e4, tables),
    }  # fmt: skip
    for name, (used, value) in needed.items():
        if used and value is None:
            raise ConfigError(f"factors with terms {terms!r} needs {name}, which is None")
    return needed


def _one_side(queries: int, keys: int, stride: int, query_stride: int) -> bool:
    """Whether a grid exists whose strided sides have these numbers of queries and keys."""
    return max(query_stride * (queries - 1), stride * (keys - 1)) < min(query_stride * queries, stride * keys)


def _check_widths(
    heads: int, used: dict[str, Tensor], tables: Tables | None, grid: Grid, keys: Grid, stride: int, query_stride: int
) -> None:
    """Raises ShapeError unless the widths of q, k, u, t and the tables agree and the tables cover the grids."""
    widths = {name: x.shape[-1] for name, x in used.items()}
    if tables is not None:
        if tables[1] is None and max(grid.height, keys.height) > 1:
            raise ShapeError(f"the table of y may only be None for one row, not for {grid}")
        sides = {"x": (grid.width, keys.width), "y": (grid.height, keys.height)}
        for (axis, side), table in zip(sides.items(), tables, strict=True):
            if table is None:
                continue
            if axis == "y" and table.ndim == 4:
                if tuple(table.shape[:3]) != (heads, *side):
                    raise ShapeError(
                        f"the table of pairs of rows is {tuple(table.shape)}; expected {(heads, *side)}, d"
                    )
                widths["table of y"] = table.shape[-1]
                continue
            size = table_size(*side, stride, query_stride)
            if table.ndim != 3 or table.shape[0] != heads or table.shape[1] % 2 == 0 or table.shape[1] < 2 * size - 1:
                raise ShapeError(f"the table of {axis} is {tuple(table.shape)}; expected ({heads}, {2 * size - 1}, d)")
            widths[f"table of {axis}"] = table.shape[-1]
    for name in ("u", "t"):
        if name in used and (used[name].ndim != 2 or used[name].shape[0] != heads):
            raise ShapeError(f"{name} has shape {tuple(used[name].shape)}; expected ({heads}, d)")
    if any(width != next(iter(widths.values())) for width in widths.values()):  # torch.jit.trace has no numbers
        raise ShapeError(f"widths must be equal, not {', '.join(f'{n} {w}' for n, w in widths.items())}")


def scale_of(scale: float | None, q: Tensor | None, k: Tensor | None, v: Tensor, tables: Tables | None) -> float:
    """scale, or d^-0.5 for None; d is e where q, k and tables are None."""
    if scale is not None:
        return scale
    widths = [x.shape[-1] for x in (q, k, tables and tables[0]) if x is not None]
    return (widths or [v.shape[-1]])[0] ** -0.5


def sort_terms(
    q: Tensor | None, k: Tensor | None, v: Tensor, terms: str, grid: Grid, keys: Grid, tables: Tables | None,
    u: Tensor | None, t: Tensor | None, scale: float, window: int, stride: int, query_stride: int, mask: Mask | None,
    basis: Bases | None,
) -> Case:  # fmt: skip
    """The input of the forms; each term has q, u or t exactly once, so these are multiplied by the scale."""
    e1, e2, e3, e4 = (flag == "1" for flag in terms)
    work = torch.promote_types(v.dtype, torch.float32)
    content = saliency = place = None
    if e1:
        content = cast(Tensor, q) * scale
        content = content + (cast(Tensor, u) * scale).to(content.dtype)[:, None] if e3 else content
    elif e3:
        saliency = (cast(Tensor, k).to(work) @ (cast(Tensor, u).to(work) * scale)[..., None]).squeeze(-1)
    if e4:
        place = cast(Tensor, t).to(work)[None, :, None, None] * scale
    if e2:
        from_query = cast(Tensor, q)[..., grid.span, :].unflatten(-2, (grid.height, grid.width)).to(work) * scale
        place = from_query if place is None else from_query + place
    narrow = window and window < 2 * reach(grid, keys, stride, query_stride) - 1
    x, y = tables if tables is not None and place is not None else (None, None)
    return Case(
        content, saliency, place, k, v, None if x is None else x.to(work), None if y is None else y.to(work),
        grid, keys, window if narrow else 0, stride, mask or NO_MASK, basis or (None, None), e2, query_stride,
    )  # fmt: skip
