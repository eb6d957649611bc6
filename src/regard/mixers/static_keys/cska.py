"""Convolutional static keys: the logits are a grouped 3x3 convolution of the query map (SKA, Sec. 4.2).

A[h, i, j] = softmax over j of scale (sum over the taps t of q_h[i + t] . W_h[j, :, t] + b[h, j]), zeros outside the
grid. The paper has no scale; the authors' code has d^-0.5, the default here. The paper's Algorithm 2 contradicts
itself; its text (Sec. 4.2), its Table 6 and the authors' code for ViT, CaiT and CAFormer agree on this reading, in
which the output channels of the convolution are the keys. The reading of their code for Swin is the option
reading="key": `cska_keys`.

The filters belong to the patch tokens of the keys' grid; the map of the queries may have any size. Prefix and suffix
tokens are not on the map: their keys are plain vectors for all queries (`cols`), and their queries have keys of their
own (`rows`). Algorithm 2 has one key `cls_k` of the class token for all queries and says nothing about the class
token's query.

stride makes keys coarser than queries (Sec. 7 wishes for downsampling inside the key and does not define it): here a
block of stride x stride patch tokens has one key and the mean of its values, `strided`; every token has its query.
"""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import NO_MASK, Cost, Grid, Inputs, Mask, Operator, Site, hide, operator_function
from regard.core.errors import ConfigError, GridError, ShapeError, UnsupportedError, nearest
from regard.mixers.shared.tiles import join_tokens, split_tokens

from .cska_forms import PATHS, by_convolution, by_patches, choose_path, one_by_one, rows_of, sides
from .cska_keys import QueryKeyOperator, query_keys_cost
from .grids import in_windows, join_windows, repeat_window, same_cells
from .keys import ACTIVATIONS, FROM_TEACHER, StaticConfig, StaticOperator, weigh
from .ska import SKA, ska, ska_macs, ska_reference
from .strided import block_values

__all__ = ["CSKA", "cska", "cska_reference"]

_OF_LOGITS = ("rows", "cols", "factorised", "path", "resize", "activation")
WARN_MACS = 2e9
"""Above so many MACs of the key a layer warns."""


@operator_function
def cska_reference(
    q: Float[Tensor, "B H N d"], weight: Float[Tensor, "HM d k k2"], bias: Float[Tensor, " HM"] | None,
    v: Float[Tensor, "B H M e"], grid: Grid, *, scale: float | None = None, mask: Mask | None = None,
    path: str = "auto", activation: str = "softmax",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The sum over taps of static-key logits of shifted queries; `path` has no effect."""
    _check(q, weight, bias, v, grid)
    heads, kernel, v = q.shape[1], weight.shape[-1], hide(v, mask)
    image = q.unflatten(2, (grid.height, grid.width))
    image = F.pad(image, (0, 0, *(kernel // 2,) * 4))
    taps = weight.unflatten(0, (heads, -1))  # (H, M, d, k, k)
    logits = q.new_zeros(()) if bias is None else bias.view(heads, 1, -1)
    for row in range(kernel):
        for column in range(kernel):
            shifted = image[:, :, row : row + grid.height, column : column + grid.width].flatten(2, 3)
            logits = logits + shifted @ taps[..., row, column].mT
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return weigh((mask or NO_MASK).add_to(logits * scale), activation).to(v.dtype) @ v


@operator_function
def cska(
    q: Float[Tensor, "B H N d"], weight: Float[Tensor, "HM d k k2"], bias: Float[Tensor, " HM"] | None,
    v: Float[Tensor, "B H M e"], grid: Grid, *, scale: float | None = None, mask: Mask | None = None,
    path: str = "auto", activation: str = "softmax",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention whose logits are a convolution of the queries on `grid` (without prefix and suffix tokens); M keys.

    weight (H*M, d, k, k) is that of a `Conv2d` with H groups, bias (H*M,) or None, k odd.
    path: "conv" is that convolution. "patches" gathers neighbourhoods and multiplies matrices. "lean" does so in strips
    of rows: it holds the logits of one strip at a time, and computes them again in the backward pass. "auto" takes
    "conv" up to CONV_CELLS queries; above, "patches", and from LEAN_LOGITS logits on "lean".
    activation: as of `ska`. Raises: ShapeError, GridError if the tensors do not fit; ConfigError for an unknown path or
    activation.
    """
    _check(q, weight, bias, v, grid)
    for name, value, options in (("path", path, PATHS), ("activation", activation, ACTIVATIONS)):
        if value not in options:
            raise ConfigError(f"cska has no {name} {value!r}; {nearest(value, options)}")
    if mask is not None and mask.causal:
        raise UnsupportedError("cska cannot apply a causal mask: a filter reads later tokens")
    if path == "auto":
        path = choose_path(q, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = None if bias is None else bias * scale
    dense, v = (mask or NO_MASK).dense(q, v.shape[-2]), hide(v, mask)
    if path == "conv":
        return by_convolution(q * scale, weight, bias, v, grid, dense, activation)
    return by_patches(q * scale, weight, bias, v, grid, dense, activation, lean=path == "lean")


@dataclass(frozen=True, kw_only=True)
class CSKA(StaticConfig):
    """scale, init, resize, activation, heads, normalise: see `StaticConfig`.

    init="paper" draws the filters as PyTorch does a convolution's. A head is a group of the convolution.
    kernel: side of the filters, odd. rows: the keys for the queries of prefix and suffix tokens: "static", vectors of
    their own, or "centre", the centre taps of the filters; both are our choice, since Algorithm 2 defines only the
    class token's key for the queries of all tokens. cols: the keys of prefix and suffix tokens: "static", vectors, or
    "conv", filters like those of patch tokens.
    factorised: filter = key times a depth-wise kernel on the queries that all keys share (not in the paper): k*k times
    fewer parameters and about as fast as SKA. It has no bias, and its kernel starts as the identity.
    bias: whether the filters have one bias per key, as in the authors' code. path: see `ops.cska`.
    reading: "logits", or "key" for a convolution that makes keys from queries (the authors' code for Swin), k*k*d
    parameters per channel on any grid. It uses scale, heads, kernel, bias and init of the other fields, and has
    no cross-attention.
    stride: side of the blocks of patch tokens that share a key and the mean of their values. In reading="key" it is the
    stride of the convolution. Above 1 it has no bias mask, no resize="window", and no keys from a teacher.
    With a padding mask the queries of hidden tokens are zero for the filters, like those outside the grid.
    """

    kernel: int = 3
    rows: Literal["static", "centre"] = "static"
    cols: Literal["static", "conv"] = "static"
    factorised: bool = False
    bias: bool = True
    path: Literal["auto", "conv", "patches", "lean"] = "auto"
    reading: Literal["logits", "key"] = "logits"
    stride: int = 1

    card = replace(
        SKA.card, title="Convolutional static key attention", source="Static Key Attention in Vision, Sec. 4.2",
        formula="softmax(conv(q)) v with one output channel per key; by default times d^-0.5",
        complexity="O(N^2 k^2 C)", prefix="not on the map; static keys, and static keys for their queries",
    )  # fmt: skip
    masks = frozenset({"padding", "bias"})  # not causal: a filter reads later tokens
    samples = (
        "CSKA()", 'CSKA(rows="centre", cols="conv", resize="window", path="lean")',
        'CSKA(factorised=True, rows="centre", path="patches")', 'CSKA(reading="key", dwc=3)', 'CSKA(activation="gelu")',
        "CSKA(stride=2)", 'CSKA(reading="key", stride=3)',
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"kernel is the odd side of a convolution, not {self.kernel}")
        if self.factorised and self.cols == "conv":
            raise ConfigError("a factorised key is one vector a token; cols='conv' needs factorised=False")
        if self.reading == "key":
            changed = [name for name in _OF_LOGITS if getattr(self, name) != getattr(CSKA, name)]
            if changed or self.init not in ("trunc_normal", "paper"):
                raise ConfigError(f"reading='key' has no {', '.join(changed) or f'init={self.init!r}'}; leave it out")
        if self.stride < 1:
            raise ConfigError(f"stride is at least 1, not {self.stride}")
        if self.stride > 1:
            if self.resize == "window" or self.init in FROM_TEACHER:
                other = "resize='window'" if self.resize == "window" else f"init={self.init!r}"
                raise ConfigError(f"stride={self.stride} has no {other}: its keys are of blocks; leave one of them out")
            object.__setattr__(self, "masks", frozenset({"padding"}))

    @property
    def cross(self) -> bool:  # type: ignore[override]
        """reading="key" has none: its keys are computed from the queries."""
        return self.reading == "logits"

    def operator(self, site: Site) -> Operator:
        if self.reading == "key":
            return QueryKeyOperator(site, self.kernel, self.bias, self.scale, self.init == "paper", self.stride)
        return CSKAOperator(self, self._with_blocks(site))

    def _with_blocks(self, site: Site) -> Site:
        """The site whose memory is the grid of the keys."""
        return replace(site, memory=(site.memory or site.grid).every(self.stride)) if self.stride > 1 else site

    def key_macs(self, site: Site, queries: Grid, keys: Grid) -> int:
        """MACs of the patch tokens' logits, k*k times SKA's; with factorised=True of the depth-wise kernel alone."""
        return queries.cells * site.inner * self.kernel**2 * (1 if self.factorised else keys.tokens)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Static keys of prefix and suffix tokens run as filters with one tap; "paper" counts that tap alone."""
        if self.reading == "key":
            return query_keys_cost(site, self.kernel, self.bias, self.stride)
        site = self._with_blocks(site)
        grid, memory = site.grid, site.memory or site.grid
        taps, biased = self.kernel**2, self.rows == "centre" and self.bias and not self.factorised
        macs = self.key_macs(site, grid, memory)
        if self.factorised:
            macs += ska_macs(grid.cells, memory.tokens, site, self.activation)
        else:
            macs += grid.cells * memory.tokens * site.inner
        if accounting == "paper" and not self.factorised and self.cols == "static":
            macs -= grid.cells * memory.extra * site.inner * (taps - 1)
        if grid.extra:
            macs += ska_macs(grid.extra, memory.tokens, site, self.activation, biased)
        if self.factorised:
            params = (taps + memory.tokens) * site.inner
        else:
            filters = taps * site.inner + site.heads * self.bias
            params = memory.cells * filters + memory.extra * (site.inner if self.cols == "static" else filters)
        rows = memory.tokens * site.inner if grid.extra and self.rows == "static" else 0
        return Cost(params + rows, macs)


class CSKAOperator(StaticOperator):
    """weight (H*cells, d, k, k), bias (H*cells,); factorised: kernel (inner, 1, k, k) and keys (H, cells, d) instead.

    With prefix or suffix tokens: col_keys (H, E, d), or col_weight (H*E, d, k, k) and col_bias (H*E,); with
    rows="static" also row_keys (H, cells, d) and extra_row_keys (H, E, d), the keys for their queries.
    cells are those of the keys' grid: with a stride, blocks.
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
        self.site, self.taps = site, config.kernel
        for name, shape in self._shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()
        _warn(config.key_macs(site, site.grid, self.grid), site.grid, config)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        heads, width, square = self.heads, self.width, (self.taps, self.taps)
        cells, extra = self.grid.cells, self.grid.extra
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

    def freeze(self, grid: Grid | None) -> None:
        """As in `StaticOperator`; grid: of the tokens, also with a stride."""
        super().freeze(grid and grid.every(self.config.stride))

    @torch.no_grad()
    def set_keys(self, keys: Float[Tensor, "H M d"]) -> None:
        """Use these keys, in token order on the build grid, as centre taps: the operator then equals SKA's."""
        self.freeze(None)
        extra, cells = split_tokens(keys, self.grid)
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

        M keys in token order; those of one window where windows cover another grid.
        """
        grid_of_keys = self.grid if self.runs_in_windows(grid) else grid
        constants = self._factors(grid_of_keys) if self.config.factorised else self._filters(grid_of_keys)
        if not self.site_grid.extra:
            return constants
        if self.config.rows == "static":
            cells = self.resample_keys(self.row_keys, grid)
            constants["rows"] = join_tokens(self.extra_row_keys, cells, grid_of_keys) if self.grid.extra else cells
        elif self.config.factorised:
            centre = self.kernel[:, 0, self.taps // 2, self.taps // 2].view(self.heads, 1, -1)
            constants["rows"] = constants["keys"] * centre
        else:
            constants["rows"] = constants["weight"][..., self.taps // 2, self.taps // 2].unflatten(0, (self.heads, -1))
            if self.config.bias:
                constants["row_bias"] = constants["bias"].view(self.heads, 1, -1)
        return constants

    def _factors(self, grid_of_keys: Grid) -> dict[str, Tensor]:
        cells = self.resample_keys(self.keys, grid_of_keys)
        return {
            "kernel": self.kernel,
            "keys": join_tokens(self.col_keys, cells, grid_of_keys) if grid_of_keys.extra else cells,
        }

    def _filters(self, grid_of_keys: Grid) -> dict[str, Tensor]:
        heads, square = self.heads, (self.width, self.taps, self.taps)
        parts = [self.weight.view(heads, self.grid.cells, -1)]
        if self.config.bias:
            parts.append(self.bias.view(heads, -1, 1))
        if not same_cells(self.grid, grid_of_keys):
            parts = [self.resample_keys(part, grid_of_keys) for part in parts]
        if grid_of_keys.extra and self.config.cols == "static":
            around = (self.taps // 2,) * 4
            more = [F.pad(self.col_keys[..., None, None], around).flatten(2)]  # filters of one tap, without bias
            more += [part.new_zeros(heads, grid_of_keys.extra, 1) for part in parts[1:]]
        elif grid_of_keys.extra:
            more = [self.col_weight.view(heads, grid_of_keys.extra, -1)]
            more += [self.col_bias.view(heads, -1, 1)] if self.config.bias else []
        if grid_of_keys.extra:
            parts = [join_tokens(extra, part, grid_of_keys) for part, extra in zip(parts, more, strict=True)]
        constants = {"weight": parts[0].unflatten(-1, square).flatten(0, 1)}
        if self.config.bias:
            constants["bias"] = parts[1].flatten()
        return constants

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        grid, q = inputs.grid, hide(inputs.q, None if inputs.memory else inputs.mask)
        v, memory, mask = block_values(inputs.v, inputs.key_grid, self.config.stride, inputs.mask, plain)
        constants = {name: value.to(q.dtype) for name, value in self.on(memory).items()}
        extra, cells = split_tokens(q, grid)
        below, above = rows_of(mask, grid)
        form = self._plain_cells if plain else self._fast_cells
        out = form(cells, v, grid, memory, constants, above)
        if not grid.extra:
            return out
        keys, bias = self._extra_keys(constants, memory)
        v, below = self.share(v, memory.tokens), self._row_mask(below, bias)
        attention = ska_reference if plain else ska
        rows = attention(extra, keys, v, scale=self.config.scale, mask=below, activation=self.config.activation)
        return join_tokens(rows, out, grid)

    def _fast_cells(
        self, q: Tensor, v: Tensor, grid: Grid, memory: Grid, constants: dict[str, Tensor], mask: Mask | None
    ) -> Tensor:
        if self.runs_in_windows(memory):
            shared, windows = self.share(v, self.grid.tokens), (self.site_grid, self.grid)
            part, values, hidden = in_windows(q, shared, (grid, memory), windows, mask)
            out = self._cells(part, values, Grid(*sides(self.site_grid)), constants, hidden)
            return join_windows(out, grid, self.site_grid)
        if not torch.compiler.is_compiling() and not same_cells(self.site_grid, grid):
            _warn(self.config.key_macs(self.site, grid, memory), grid, self.config)
        return self._cells(q, self.share(v, memory.tokens), Grid(*sides(grid)), constants, mask)

    def _plain_cells(
        self, q: Tensor, v: Tensor, grid: Grid, memory: Grid, constants: dict[str, Tensor], mask: Mask | None
    ) -> Tensor:
        filters = self._plain_filters(constants)
        plain = partial(cska_reference, scale=self.config.scale, activation=self.config.activation)
        if self.runs_in_windows(memory):
            shared, windows = self.share(v, self.grid.tokens), (self.site_grid, self.grid)
            return one_by_one(plain, q, shared, filters, (grid, memory), windows, mask)
        return plain(q, *filters, self.share(v, memory.tokens), Grid(*sides(grid)), mask=mask)

    def _cells(self, q: Tensor, v: Tensor, grid: Grid, constants: dict[str, Tensor], mask: Mask | None) -> Tensor:
        scale, path, activation = self.config.scale, self.config.path, self.config.activation
        if self.config.factorised:
            q = self._convolve_queries(q, grid, constants["kernel"])
            return ska(q, constants["keys"], v, scale=scale, mask=mask, activation=activation)
        weight, bias = constants["weight"], constants.get("bias")
        return cska(q, weight, bias, v, grid, scale=scale, mask=mask, path=path, activation=activation)

    def _convolve_queries(self, q: Tensor, grid: Grid, kernel: Tensor) -> Tensor:
        image = q.mT.reshape(q.shape[0], self.heads * self.width, grid.height, grid.width)
        image = F.conv2d(image, kernel, padding=self.taps // 2, groups=len(kernel))
        return image.view(q.shape[0], self.heads, self.width, grid.cells).mT

    def _extra_keys(self, constants: dict[str, Tensor], memory: Grid) -> tuple[Tensor, Tensor | None]:
        """Keys (H, M, d) and a bias (H, 1, M) for the queries of prefix and suffix tokens; windows are repeated."""
        keys, bias = constants["rows"], constants.get("row_bias")
        if self.runs_in_windows(memory):
            keys = repeat_window(keys, self.grid, memory)
            bias = None if bias is None else repeat_window(bias.mT, self.grid, memory).mT
        return keys, bias

    def _plain_filters(self, constants: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the filters; a factorised key times its kernel is a full filter."""
        if not self.config.factorised:
            return constants["weight"], constants.get("bias")
        taps = constants["kernel"].view(self.heads, 1, self.width, self.taps, self.taps)
        return (constants["keys"][..., None, None] * taps).flatten(0, 1), None

    def _row_mask(self, mask: Mask | None, bias: Tensor | None) -> Mask | None:
        """The mask for queries of prefix and suffix tokens with the bias of the centre taps, scaled as the logits."""
        if bias is None:
            return mask
        bias = bias * (self.width**-0.5 if self.config.scale is None else self.config.scale)
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


def _check(q: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, grid: Grid) -> None:
    if grid.extra:
        raise GridError(f"cska needs a grid of patch tokens alone, not {grid}; give other keys as further filters")
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
