"""Convolutional static keys: the logits of a cell are a grouped 3x3 convolution of the query map (SKA, Sec. 4.2).

A[h, i, j] = scale (sum over the taps t of q_h[i + t] . W_h[j, :, t] + b[h, j]), softmax over j, zeros outside the grid.
The paper's Algorithm 2 does not fit together; its text (Sec. 4.2), its Table 6 and the authors' code for ViT, CaiT and
CAFormer agree on this reading, in which the outputs of the convolution are the keys, not places.

The filters belong to the cells of the keys' grid; the map of the queries may have any size. Extra tokens are not on the
map: their keys are plain vectors that every query meets (`cols`), their queries meet keys of their own (`rows`).
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core import (
    NOTHING,
    Card,
    ConfigError,
    Cost,
    Grid,
    GridError,
    Mask,
    ShapeError,
    Site,
    attend,
    nearest,
    softmax_rows,
)

from .heads import check_heads
from .ska import ska, ska_reference
from .static import StaticConfig, StaticOperator, apart, in_windows, join, same_cells, tiled, tokens_of, windows_on

PATHS = ("auto", "conv", "patches", "lean")
WARN_MACS = 2e9
"""Above so many MACs of the key a layer warns."""
CONV_CELLS = 100
"""Up to so many cells the convolution is the fastest path."""
LEAN_LOGITS = 2**24
"""From so many logits on the batch is trained in strips whose logits are computed again in the backward pass."""
STRIP = 128
"""Cells in a strip of rows."""


def cska_reference(
    q: Float[Tensor, "B H N d"],
    weight: Float[Tensor, "HM d k k2"],
    bias: Float[Tensor, " HM"] | None,
    v: Float[Tensor, "B H M e"],
    grid: Grid,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    path: str = "auto",
) -> Float[Tensor, "B H N e"]:
    """The sum over taps of static-key logits of shifted queries; `path` has no effect."""
    heads, kernel = q.shape[1], weight.shape[-1]
    image = q.unflatten(2, (grid.height, grid.width))
    image = F.pad(image, (0, 0, *(kernel // 2,) * 4))
    taps = weight.unflatten(0, (heads, -1))  # (H, M, d, k, k)
    logits = q.new_zeros(()) if bias is None else bias.view(heads, 1, -1)
    for row in range(kernel):
        for column in range(kernel):
            shifted = image[:, :, row : row + grid.height, column : column + grid.width].flatten(2, 3)
            logits = logits + shifted @ taps[..., row, column].mT
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return softmax_rows((mask or NOTHING).added(logits * scale)) @ v


def cska(
    q: Float[Tensor, "B H N d"],
    weight: Float[Tensor, "HM d k k2"],
    bias: Float[Tensor, " HM"] | None,
    v: Float[Tensor, "B H M e"],
    grid: Grid,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    path: str = "auto",
) -> Float[Tensor, "B H N e"]:
    """Attention whose logits are a convolution of the queries on `grid` (without extra tokens); M keys, head by head.

    weight (H*M, d, k, k) is that of a `Conv2d` with H groups, bias (H*M,) or None, k odd.
    path: "conv" is that convolution. "patches" gathers neighbourhoods and multiplies matrices. "lean" does so in strips
    of rows: it never holds more than a strip of logits, and computes them again for the backward pass. "auto" takes
    "conv" up to CONV_CELLS cells; above, "lean" without gradients or from LEAN_LOGITS logits on, else "patches".
    Raises: ShapeError, GridError if the tensors do not fit; ConfigError for an unknown path.
    """
    _check(q, weight, bias, v, grid, path)
    if path == "auto":
        path = _choose(q, weight, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = None if bias is None else bias * scale
    dense = (mask or NOTHING).dense(q, v.shape[-2])
    run = _conv if path == "conv" else _patches
    return run(q * scale, weight, bias, v, grid, dense, path == "lean")


def _choose(q: Tensor, weight: Tensor, v: Tensor) -> str:
    """The path for these sizes, from times on a CPU: `benchmarks/static_keys.py`."""
    batch, heads, n, _ = q.shape
    if n <= CONV_CELLS:
        return "conv"
    trained = torch.is_grad_enabled() and (q.requires_grad or weight.requires_grad or v.requires_grad)
    return "patches" if trained and batch * heads * n * v.shape[-2] < LEAN_LOGITS else "lean"


def _conv(
    q: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, grid: Grid, dense: Tensor | None, lean: bool
) -> Tensor:
    batch, heads, n, _ = q.shape
    image = q.mT.reshape(batch, -1, grid.height, grid.width)
    logits = F.conv2d(image, weight, bias, padding=weight.shape[-1] // 2, groups=heads)
    logits = logits.view(batch, heads, -1, n)  # keys before queries
    if dense is None:
        return logits.softmax(2).mT @ v
    return softmax_rows(_masked(logits.mT, dense)) @ v


def _patches(
    q: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, grid: Grid, dense: Tensor | None, lean: bool
) -> Tensor:
    """The same with heads before the batch, so that one matrix product a head serves the whole batch."""
    heads, kernel = q.shape[1], weight.shape[-1]
    image = q.transpose(0, 1).unflatten(2, (grid.height, grid.width))
    image = F.pad(image, (0, 0, *(kernel // 2,) * 4))
    keys = weight.unflatten(0, (heads, -1)).flatten(3).mT.flatten(2)  # (H, M, k*k*d)
    bias = None if bias is None else bias.view(heads, 1, -1)
    v = v.transpose(0, 1)
    if dense is not None:
        dense = dense.view((1,) * (4 - dense.ndim) + dense.shape).transpose(0, 1)
    rows = min(max(1, STRIP // grid.width), grid.height) if lean else grid.height
    again = torch.is_grad_enabled() and rows < grid.height
    out = []
    for first in range(0, grid.height, rows):
        last = min(first + rows, grid.height)
        part = image[:, :, first : last + kernel - 1]
        hidden = dense
        if dense is not None and dense.shape[-2] > 1:
            hidden = dense[..., first * grid.width : last * grid.width, :]
        arguments = (part, keys, bias, v, hidden, kernel)
        out.append(checkpoint(_strip, *arguments, use_reentrant=False) if again else _strip(*arguments))
    return (torch.cat(out, 2) if len(out) > 1 else out[0]).transpose(0, 1)


def _strip(
    image: Tensor, keys: Tensor, bias: Tensor | None, v: Tensor, dense: Tensor | None, kernel: int
) -> Float[Tensor, "H B n e"]:
    # some rows of the padded map (H, B, rows + k - 1, width + k - 1, d)
    rows, columns = image.shape[2] - kernel + 1, image.shape[3] - kernel + 1
    taps = [image[:, :, i : i + rows, j : j + columns] for i in range(kernel) for j in range(kernel)]
    patches = torch.cat(taps, -1).flatten(1, 3)
    logits = patches @ keys.mT if bias is None else torch.baddbmm(bias, patches, keys.mT)
    logits = logits.unflatten(1, (image.shape[1], -1))
    a = logits.softmax(-1) if dense is None else softmax_rows(_masked(logits, dense))
    return a @ v


def _masked(logits: Tensor, dense: Tensor) -> Tensor:
    return logits.masked_fill(~dense, -torch.inf) if dense.dtype == torch.bool else logits + dense


@dataclass(frozen=True, kw_only=True)
class CSKA(StaticConfig):
    """scale, init, resize: see `StaticConfig`; init="paper" draws the filters as PyTorch does a convolution's.

    kernel: side of the filters, odd. rows: the keys that the queries of extra tokens meet: "static", vectors of their
    own, or "centre", the centre taps of the filters. cols: the keys of extra tokens: "static", vectors, or "conv",
    filters like those of the cells.
    factorised: a filter = a key times a depth-wise kernel on the queries that all keys share (not in the paper): k*k
    times fewer parameters and about as fast as SKA. It has no bias, and its kernel starts as the identity.
    bias: whether the filters have one bias a key, as in the paper's code. path: how `ops.cska` computes it.
    A padding mask hides tokens from the filters too: their queries count as zeros, as those outside the grid do.
    """

    kernel: int = 3
    rows: Literal["static", "centre"] = "static"
    cols: Literal["static", "conv"] = "static"
    factorised: bool = False
    bias: bool = True
    path: Literal["auto", "conv", "patches", "lean"] = "auto"

    card: ClassVar[Card] = Card(
        title="Convolutional static key attention",
        source="Static Key Attention in Vision, Sec. 4.2",
        formula="softmax(conv(q)) v with one output channel per key",
        complexity="O(N^2 k^2 C)",
        query_content=True,
        key_content=False,
        dynamic="one-step",
        expert_type="MLP of width N, keys static",
        expert_count="1",
        construction="learned keys",
        topology="all-to-one",
        prefix="keys and queries with static keys of their own; not on the map",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"padding", "bias"})  # a filter sees later cells: nothing is causal

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options({"rows": ("static", "centre"), "cols": ("static", "conv"), "path": PATHS})
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"kernel is the odd side of a convolution, not {self.kernel}")
        if self.factorised and self.cols == "conv":
            raise ConfigError("a factorised key is one vector a token; cols='conv' needs factorised=False")

    def operator(self, site: Site) -> "CSKAOperator":
        return CSKAOperator(self, site)

    def key_macs(self, site: Site, queries: Grid, keys: Grid) -> int:
        """MACs of the logits of cells: k*k times those of SKA."""
        if self.factorised:
            return queries.cells * site.inner * (keys.tokens + self.kernel**2)
        return queries.cells * keys.tokens * site.inner * self.kernel**2

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Static keys of extra tokens run as filters of one tap, at the cost of filters; "paper" counts one product."""
        grid, memory = site.grid, site.memory or site.grid
        taps = self.kernel**2
        macs = self.key_macs(site, grid, memory) + grid.cells * memory.tokens * site.inner
        if accounting == "paper" and not self.factorised and self.cols == "static":
            macs -= grid.cells * memory.extra * site.inner * (taps - 1)
        macs += attend(grid.extra, memory.tokens, site.inner).macs
        if self.factorised:
            params = (taps + memory.tokens) * site.inner
        else:
            filters = taps * site.inner + site.heads * self.bias
            params = memory.cells * filters + memory.extra * (site.inner if self.cols == "static" else filters)
        rows = memory.tokens * site.inner if grid.extra and self.rows == "static" else 0
        return Cost(params + rows, macs)


class CSKAOperator(StaticOperator):
    """weight (H*cells, d, k, k), bias (H*cells,); factorised: kernel (inner, 1, k, k) and keys (H, cells, d) instead.

    Where there are extra tokens: col_keys (H, E, d), or col_weight (H*E, d, k, k) and col_bias (H*E,); and with
    rows="static" row_keys (H, cells, d) and extra_row_keys (H, E of the keys, d), the keys of extra queries.
    """

    config: CSKA
    weight: Tensor
    bias: Tensor
    kernel: Tensor
    keys: Tensor
    col_keys: Tensor
    col_weight: Tensor
    col_bias: Tensor
    row_keys: Tensor
    extra_row_keys: Tensor

    def __init__(self, config: CSKA, site: Site) -> None:
        super().__init__(config, site)
        self.heads, self.width, self.taps, cells = site.heads, site.width, config.kernel, self.grid.cells
        self.site = site
        for name, shape in self._shapes(cells).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()
        _warn(config.key_macs(site, site.grid, self.grid), site.grid, config)

    def _shapes(self, cells: int) -> dict[str, tuple[int, ...]]:
        heads, width, kernel, extra = self.heads, self.width, self.taps, self.grid.extra
        square = (kernel, kernel)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.config.factorised:
            shapes |= {"kernel": (heads * width, 1, *square), "keys": (heads, cells, width)}
        else:
            shapes["weight"] = (heads * cells, width, *square)
            if self.config.bias:
                shapes["bias"] = (heads * cells,)
        if extra and self.config.cols == "static":
            shapes["col_keys"] = (heads, extra, width)
        elif extra:
            shapes["col_weight"] = (heads * extra, width, *square)
            if self.config.bias:
                shapes["col_bias"] = (heads * extra,)
        if self.site_grid.extra and self.config.rows == "static":
            shapes["row_keys"] = (heads, cells, width)
            if extra:
                shapes["extra_row_keys"] = (heads, extra, width)
        return shapes

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Keys and filters as `config.init` says, biases 0, a factorised kernel as the identity."""
        self.freeze(None)
        paper, bound = self.config.init == "paper", (self.width * self.taps**2) ** -0.5
        for name, parameter in self.named_parameters():
            if name == "kernel":
                parameter.zero_()[:, :, self.taps // 2, self.taps // 2] = 1.0
            elif paper and name.endswith(("weight", "bias")):
                nn.init.uniform_(parameter, -bound, bound)  # as nn.Conv2d
            elif name.endswith("bias"):
                parameter.zero_()
            elif paper:
                nn.init.normal_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02)

    @torch.no_grad()
    def set_keys(self, keys: Float[Tensor, "H M d"]) -> None:
        """Take these keys, in token order on the build grid, as centre taps: the operator then equals SKA's."""
        self.freeze(None)
        extra, cells = apart(keys, self.grid)
        centre = (..., self.taps // 2, self.taps // 2)
        for name, value in (("", cells), ("col_", extra)):
            if f"{name}weight" in self._parameters:
                self.get_parameter(f"{name}weight").zero_()[centre] = value.flatten(0, 1)
            if f"{name}bias" in self._parameters:
                self.get_parameter(f"{name}bias").zero_()
        for name, value in (("keys", cells), ("col_keys", extra), ("row_keys", cells), ("extra_row_keys", extra)):
            if name in self._parameters:
                self.get_parameter(name).copy_(value)
        if self.config.factorised:
            self.kernel.zero_()[centre] = 1.0

    def constants(self, grid: Grid) -> dict[str, Tensor]:
        """weight (H*M, d, k, k) and bias (H*M,), or kernel and keys (H, M, d), and rows (H, M, d), row_bias (H, 1, M).

        M keys in token order: those of a window where windows carry the keys to other grids.
        """
        home = self.grid if self.windowed(grid) else grid
        made = self._factorised(home) if self.config.factorised else self._filters(home)
        if not self.site_grid.extra:
            return made
        if self.config.rows == "static":
            cells = self.resampled(self.row_keys, grid)
            made["rows"] = tokens_of(cells, self.extra_row_keys, home) if self.grid.extra else cells
        elif self.config.factorised:
            centre = self.kernel[:, 0, self.taps // 2, self.taps // 2].view(self.heads, 1, -1)
            made["rows"] = made["keys"] * centre
        else:
            made["rows"] = made["weight"][..., self.taps // 2, self.taps // 2].unflatten(0, (self.heads, -1))
            if self.config.bias:
                made["row_bias"] = made["bias"].view(self.heads, 1, -1)
        return made

    def _factorised(self, home: Grid) -> dict[str, Tensor]:
        cells = self.resampled(self.keys, home)
        return {"kernel": self.kernel, "keys": tokens_of(cells, self.col_keys, home) if home.extra else cells}

    def _filters(self, home: Grid) -> dict[str, Tensor]:
        heads, square = self.heads, (self.width, self.taps, self.taps)
        parts = [self.weight.view(heads, self.grid.cells, -1)]
        if self.config.bias:
            parts.append(self.bias.view(heads, -1, 1))
        if not same_cells(self.grid, home):
            parts = [self.resampled(part, home) for part in parts]
        if home.extra and self.config.cols == "static":
            around = (self.taps // 2,) * 4
            more = [F.pad(self.col_keys[..., None, None], around).flatten(2)]  # filters of one tap, without bias
            more += [part.new_zeros(heads, home.extra, 1) for part in parts[1:]]
        elif home.extra:
            more = [self.col_weight.view(heads, home.extra, -1)]
            more += [self.col_bias.view(heads, -1, 1)] if self.config.bias else []
        if home.extra:
            parts = [tokens_of(part, extra, home) for part, extra in zip(parts, more, strict=True)]
        made = {"weight": parts[0].unflatten(-1, square).flatten(0, 1)}
        if self.config.bias:
            made["bias"] = parts[1].flatten()
        return made

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q, v = _visible(cast(Tensor, q), None if memory else mask), cast(Tensor, v)
        memory = memory or grid
        made = {name: value.to(q.dtype) for name, value in self.on(memory).items()}
        extra, cells = apart(q, grid)
        below, above = _rows_of(mask, grid)
        if self.windowed(memory):
            windows = (self.site_grid, self.grid)
            part, values, hidden = in_windows(cells, v, (grid, memory), windows, above)
            out = join(self._cells(part, values, Grid(*_sides(self.site_grid)), made, hidden), grid, self.site_grid)
        else:
            if not torch.compiler.is_compiling() and not same_cells(self.site_grid, grid):
                _warn(self.config.key_macs(self.site, grid, memory), grid, self.config)
            out = self._cells(cells, v, Grid(*_sides(grid)), made, above)
        if not grid.extra:
            return out
        keys, bias = self._extra_keys(made, memory)
        return tokens_of(out, ska(extra, keys, v, scale=self.config.scale, mask=_with(below, bias, self, extra)), grid)

    def _cells(self, q: Tensor, v: Tensor, grid: Grid, made: dict[str, Tensor], mask: Mask | None) -> Tensor:
        scale = self.config.scale
        if self.config.factorised:
            return ska(self._filtered(q, grid, made["kernel"]), made["keys"], v, scale=scale, mask=mask)
        return cska(q, made["weight"], made.get("bias"), v, grid, scale=scale, mask=mask, path=self.config.path)

    def _filtered(self, q: Tensor, grid: Grid, kernel: Tensor) -> Tensor:
        image = q.mT.reshape(len(q), -1, grid.height, grid.width)
        image = F.conv2d(image, kernel, padding=self.taps // 2, groups=len(kernel))
        return image.view(len(q), self.heads, self.width, -1).mT

    def _extra_keys(self, made: dict[str, Tensor], memory: Grid) -> tuple[Tensor, Tensor | None]:
        """Keys (H, M, d) and a bias of the logits (H, 1, M) for the queries of extra tokens; windows are tiled."""
        keys, bias = made["rows"], made.get("row_bias")
        if self.windowed(memory):
            extra, cells = apart(keys, self.grid)
            keys = tokens_of(tiled(cells, self.grid, memory), extra, memory)
            if bias is not None:
                extra, cells = apart(bias.mT, self.grid)
                bias = tokens_of(tiled(cells, self.grid, memory), extra, memory).mT
        return keys, bias

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q, v = _visible(cast(Tensor, q), None if memory else mask), cast(Tensor, v)
        memory = memory or grid
        made = {name: value.to(q.dtype) for name, value in self.on(memory).items()}
        extra, cells = apart(q, grid)
        below, above = _rows_of(mask, grid)
        if self.config.factorised:  # as full filters
            taps = made["kernel"].view(self.heads, 1, self.width, self.taps, self.taps)
            weight, bias = (made["keys"][..., None, None] * taps).flatten(0, 1), None
        else:
            weight, bias = made["weight"], made.get("bias")
        scale = self.config.scale
        if self.windowed(memory):
            out = self._one_by_one(cells, v, (grid, memory), weight, bias, above)
        else:
            out = cska_reference(cells, weight, bias, v, Grid(*_sides(grid)), scale=scale, mask=above)
        if not grid.extra:
            return out
        keys, row_bias = self._extra_keys(made, memory)
        row = ska_reference(extra, keys, v, scale=scale, mask=_with(below, row_bias, self, extra))
        return tokens_of(out, row, grid)

    def _one_by_one(
        self,
        q: Tensor,
        v: Tensor,
        grids: tuple[Grid, Grid],
        weight: Tensor,
        bias: Tensor | None,
        mask: Mask | None,
    ) -> Tensor:
        """Each window alone: its part of the map, the filters of the cells that it has."""
        grid, memory = grids
        outside, places = _numbers(memory, q)
        home_extra, filters = _numbers(self.grid, q)
        image = q.unflatten(2, _sides(grid))
        out = torch.zeros(*image.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        weight = weight.unflatten(0, (self.heads, -1))
        down, across = windows_on(memory, self.grid)
        for row in range(down):
            for column in range(across):
                rows, columns = (
                    slice(i * side, (i + 1) * side)
                    for i, side in zip((row, column), _sides(self.site_grid), strict=True)
                )
                part = image[:, :, rows, columns]
                ours = places[row * self.grid.height :, column * self.grid.width :]
                ours = ours[: self.grid.height, : self.grid.width]
                theirs = filters[: ours.shape[0], : ours.shape[1]].flatten()
                pick, chosen = torch.cat([outside, ours.flatten()]), torch.cat([home_extra, theirs])
                made = cska_reference(
                    part.flatten(2, 3),
                    weight[:, chosen].flatten(0, 1),
                    None if bias is None else bias.view(self.heads, -1)[:, chosen].flatten(),
                    v[:, :, pick],
                    Grid(*part.shape[2:4]),
                    scale=self.config.scale,
                    mask=None if mask is None or mask.keep is None else Mask(keep=mask.keep[:, pick]),
                )
                out[:, :, rows, columns] = made.unflatten(2, part.shape[2:4])
        return out.flatten(2, 3)


def _numbers(grid: Grid, q: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the extra tokens in the sequence, and those of the cells as a map."""
    numbers = torch.arange(grid.tokens, device=q.device)
    start, stop = grid.span.start, grid.span.stop
    return torch.cat([numbers[:start], numbers[stop:]]), numbers[start:stop].view(_sides(grid))


def _sides(grid: Grid) -> tuple[int, int]:
    return grid.height, grid.width


def _visible(q: Tensor, mask: Mask | None) -> Tensor:
    """Queries of hidden tokens as zeros, where keys and queries are the same tokens."""
    return q if mask is None or mask.keep is None else q * mask.keep[:, None, :, None]


def _rows_of(mask: Mask | None, grid: Grid) -> tuple[Mask | None, Mask | None]:
    """A mask for the rows of extra tokens and one for those of the cells."""
    if mask is None or not mask.kinds:
        return None, None
    if not grid.extra or mask.bias is None or mask.bias.shape[-2] == 1:
        return mask, mask
    extra, cells = apart(mask.bias, grid)
    return Mask(keep=mask.keep, bias=extra), Mask(keep=mask.keep, bias=cells)


def _with(mask: Mask | None, bias: Tensor | None, operator: CSKAOperator, q: Tensor) -> Mask | None:
    """The mask of extra rows with the bias of the centre taps, which is scaled as the logits are."""
    if bias is None:
        return mask
    bias = bias * (q.shape[-1] ** -0.5 if operator.config.scale is None else operator.config.scale)
    if mask is None:
        return Mask(bias=bias)
    return Mask(keep=mask.keep, bias=bias if mask.bias is None else mask.bias + bias)


def _warn(macs: int, grid: Grid, config: CSKA) -> None:
    if macs > WARN_MACS and not config.factorised:
        warnings.warn(
            f"CSKA's key costs {macs / 1e9:.2f} GMAC a layer and image on {grid}; resize='window' on a trained "
            "smaller grid, factorised=True or SKA() cost far less",
            stacklevel=3,
        )


def _check(q: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, grid: Grid, path: str) -> None:
    check_heads("cska", q=q, v=v)
    if grid.extra:
        raise GridError(f"cska works on cells alone, not on {grid}; keys of extra tokens are further filters")
    grid.check(q)
    outputs, width, *sides = weight.shape
    expected = (q.shape[1] * v.shape[-2], q.shape[-1])
    if (outputs, width) != expected or len(sides) != 2 or sides[0] != sides[1] or sides[0] % 2 == 0:
        raise ShapeError(
            f"cska: weight has shape {tuple(weight.shape)}; expected (heads * keys, width, k, k) = "
            f"({expected[0]}, {expected[1]}, k, k) with an odd k"
        )
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise ShapeError(f"cska: bias has shape {tuple(bias.shape)}; expected ({outputs},)")
    if weight.dtype != q.dtype or (bias is not None and bias.dtype != q.dtype):
        raise ShapeError(f"cska: weight is {weight.dtype}, q is {q.dtype}; cast filters and bias to one dtype")
    if path not in PATHS:
        raise ConfigError(f"cska has no path {path!r}; {nearest(path, PATHS)}")
