"""The four factors of spatial attention (Zhu et al. 2019, Eq. 1, 2 and 8), any subset of them.

    A = softmax over keys of  scale * (E1 + E2 + E3 + E4)
    E1 = q.k            query and key content         E3 = u.k    key content only
    E2 = q.r(delta)     query content and position    E4 = t.r(delta)    position only

terms "1011" switches E1, E3 and E4 on. delta = stride * key - query_stride * query in grid cells; r(delta) = x(delta_x)
+ y(delta_y), so positions need one table of 2 size - 1 vectors per axis. "0000" is the uniform average, which is not
the same as no mixer.
Prefix and suffix tokens have no position: E2 = E4 = 0 for every pair with one, and they lie in every window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, Contract, Cost, Grid, Inputs, Operator, Site, operator_function
from regard.core.errors import ConfigError, GridError, UnsupportedError
from regard.core.mask import NO_MASK, Mask, hide, softmax_rows
from regard.core.view import View
from regard.mixers.shared.checks import refuse_unused
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.shared.precision import without_autocast

from . import cost, forms
from .flex import flex
from .forms import PRESETS, Tables, inside_window, pairwise, table_size
from .inputs import Bases, check_case, check_needed, check_numbers, interpolate, scale_of, sort_terms, strided_tokens

__all__ = ["Factors", "factor_logits", "factors", "factors_reference"]

FACTORS = {
    "E1": "query and key content", "E2": "query content and relative position", "E3": "key content",
    "E4": "relative position",
}  # fmt: skip
"""The four factors in words."""


@operator_function
def factor_logits(
    q: Float[Tensor, "B H N d"] | None, k: Float[Tensor, "B H M d"] | None, *, terms: str, grid: Grid,
    key_grid: Grid | None = None, tables: Tables | None = None, u: Float[Tensor, "H d"] | None = None,
    t: Float[Tensor, "H d"] | None = None, stride: int = 1, query_stride: int = 1,
) -> dict[str, Float[Tensor, "#B H N M"]]:  # fmt: skip
    """The logits of each factor in `terms`, "E1" to "E4", before the scale, with an r for every pair. For pictures.

    Raises: ConfigError if an argument that the terms need is None; UnsupportedError above 2^30 entries in r (the fast
    form `factors` has no such limit).
    """
    check_needed(terms, q, k, u, t, tables)
    keys = key_grid or grid.every(stride)
    on, n, m = [flag == "1" for flag in terms], grid.tokens, keys.tokens
    logits = {}
    if on[0]:
        logits["E1"] = cast(Tensor, q) @ cast(Tensor, k).mT
    if on[1] or on[3]:
        r = pairwise(cast(Tables, tables), grid, keys, stride, query_stride)
        if on[1]:
            logits["E2"] = torch.einsum("bhnd,hnmd->bhnm", cast(Tensor, q), r.to(cast(Tensor, q).dtype))
    if on[2]:
        key = cast(Tensor, k)
        logits["E3"] = torch.einsum("hd,bhmd->bhm", cast(Tensor, u).to(key.dtype), key)[:, :, None].expand(-1, -1, n, m)
    if on[3]:
        logits["E4"] = torch.einsum("hd,hnmd->hnm", cast(Tensor, t).to(r.dtype), r)[None]
    return logits


@operator_function
def factors_reference(
    q: Float[Tensor, "B H N d"] | None, k: Float[Tensor, "B H M d"] | None, v: Float[Tensor, "B H M e"], *, terms: str,
    grid: Grid, key_grid: Grid | None = None, tables: Tables | None = None, u: Float[Tensor, "H d"] | None = None,
    t: Float[Tensor, "H d"] | None = None, scale: float | None = 1.0, window: int = 0, stride: int = 1,
    query_stride: int = 1, mask: Mask | None = None, basis: Bases | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """An r for every pair, O(N M d) memory per head. basis and execution matter for the fast form only.

    Arguments and errors as in `factors`; also UnsupportedError above 2^30 entries in r.
    """
    keys = check_case(q, k, v, terms, grid, key_grid, tables, u, t, window, stride, query_stride, basis, execution)
    k, v = k if k is None else hide(k, mask), hide(v, mask)
    parts = factor_logits(
        q, k, terms=terms, grid=grid, key_grid=keys, tables=tables, u=u, t=t, stride=stride, query_stride=query_stride
    )
    logits = v.new_zeros(*v.shape[:2], grid.tokens, keys.tokens)
    for part in parts.values():
        logits = logits + part.to(v.dtype) * scale_of(scale, q, k, v, tables)
    inside = inside_window(grid, keys, window, stride, v.device, query_stride)
    if inside is not None:
        logits = logits.masked_fill(~inside, -torch.inf)
    return softmax_rows((mask or NO_MASK).add_to(logits)).to(v.dtype) @ v


@operator_function
def factors(
    q: Float[Tensor, "B H N d"] | None, k: Float[Tensor, "B H M d"] | None, v: Float[Tensor, "B H M e"], *, terms: str,
    grid: Grid, key_grid: Grid | None = None, tables: Tables | None = None, u: Float[Tensor, "H d"] | None = None,
    t: Float[Tensor, "H d"] | None = None, scale: float | None = 1.0, window: int = 0, stride: int = 1,
    query_stride: int = 1, mask: Mask | None = None, basis: Bases | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same without a tensor over pairs of tokens; q and k may be None where no term uses them.

    tables: (x (H, 2W-1, d), y (H, 2h-1, d)), entry key - query + size - 1; size covers queries and keys, or more.
        y may be None for one row, and (H, h, h_keys, d), a vector for each pair of rows, as in frames below each
        other. u, t: (H, d), for E3 and E4. scale: factor of all terms; None = d^-0.5.
    grid: of the queries, every `query_stride`-th grid cell. key_grid: of the keys, every `stride`-th grid cell; None
        follows from grid, unless query_stride > 1.
    window: odd, the side of the square around a query whose keys it attends to; 0 = all keys.
    basis: (x (W_keys, r), y (h_keys, r)), orthonormal columns that span all possible tables along the keys (few suffice
        for sinusoids, `sinusoid_basis`); the compressed form is faster with it and as exact as the basis.
    execution: "compressed" (position features in one fused attention call), "factorised" (a product over axes, only
        without E1 and mask), "flex" (FlexAttention, for GPUs; on a CPU without gradients), "materialised" (the
        reference) or "auto", which follows the table in docs/mechanisms.md.
        The factorised product of E2 and E3 can underflow; in eager mode on the CPU this is detected and the compressed
        form runs, elsewhere "auto" does not choose it (if it is named, nothing checks for underflow).
    Values of keys hidden by padding, even NaN, have no effect.
    Raises: ConfigError, ShapeError, GridError, UnsupportedError.
    """
    keys = check_case(q, k, v, terms, grid, key_grid, tables, u, t, window, stride, query_stride, basis, execution)
    mask = None if mask is None else mask.with_bias()
    if execution == "materialised":
        return factors_reference(
            q, k, v, terms=terms, grid=grid, key_grid=keys, tables=tables, u=u, t=t,
            scale=scale, window=window, stride=stride, query_stride=query_stride, mask=mask,
        )  # fmt: skip
    k, v = k if k is None else hide(k, mask), hide(v, mask)
    with without_autocast(v.device):
        factor = scale_of(scale, q, k, v, tables)
        case = sort_terms(q, k, v, terms, grid, keys, tables, u, t, factor, window, stride, query_stride, mask, basis)
        if execution == "auto":
            execution = forms.choose_execution(case)
        if execution == "factorised" and (case.content is not None or case.mask.kinds):
            obstacle = f"a {' and '.join(sorted(case.mask.kinds))} mask" if case.mask.kinds else f"E1 (terms {terms!r})"
            raise UnsupportedError(f"the factorised form cannot do {obstacle}; use execution='auto' or 'compressed'")
        return {"compressed": forms.compressed, "factorised": forms.factorised, "flex": flex}[execution](case)


@dataclass(frozen=True, kw_only=True)
class Factors(HeadMixerConfig):
    """terms: four characters of 0/1 for E1..E4; "0010" is key content only, "0000" the uniform average.

    scale: factor of the logits (the paper has none: 1.0), None = d^-0.5. window: odd side in grid cells, 0 = global.
    A window is exact in every form, and faster than no window only where it is small (at most about a quarter of a
    side): there the compressed form runs in tiles, elsewhere it masks.
    stride: of the keys; 0 = the preset's. query_stride: of the queries; the outputs of the other patch tokens are
    interpolated bilinearly, as in mmcv (prefix and suffix tokens are all queries). positions: width P of the sinusoids,
    0 = dim (a multiple of 4; of 2 for one axis). base: of the wavelengths, 0 = the preset's. magnitude: factor of the
    coordinates. sign: 1 for delta = key - query, -1 for query - key, 0 = the preset's. position_scale: factor of the
    projected encodings, 0 = the preset's. The last five are of E2 and E4, and a ConfigError without them. axes: 2, or 1
    for sequences (grids of one row). execution: of `regard.ops.factors`.
    preset: "esa" (delta = key - query as in the paper, which gives no base of the wavelengths; 1000 as in its code),
    "mmcv" (its code: query - key, base 1000, projected encodings / sqrt 2, stride 2), "transformer_xl" (query - key,
    base 10000, u, t and positions drawn from normal(0, 0.02); also give scale=None and axes=1).

    Positions are sinusoids, each axis projected by one linear map without bias. A query bias is a hidden E3 or E4 term:
    studies of factors build their hosts without it.
    The linear maps of queries, keys, values and the output belong to the layer, not to the operator, and are drawn as
    for every mechanism: U(-a, a) with a = C^-0.5, so that comparisons start alike. The authors' code draws them with
    a = (3 / C)^0.5 (Kaiming-uniform), Transformer-XL from normal(0, 0.02).
    """

    terms: str = field(default="1111", kw_only=False)
    scale: float | None = 1.0
    window: int = 0
    stride: int = 0
    query_stride: int = 1
    positions: int = 0
    base: float = 0.0
    magnitude: float = 1.0
    axes: Literal[1, 2] = 2
    sign: Literal[-1, 0, 1] = 0
    position_scale: float = 0.0
    preset: Literal["esa", "mmcv", "transformer_xl"] = "esa"
    execution: Literal["auto", "compressed", "factorised", "flex", "materialised"] = "auto"
    samples = (
        "Factors()", 'Factors(terms="0110")', 'Factors(terms="1111", window=3)', 'Factors(terms="0000")',
        'Factors(preset="mmcv", query_stride=2)',
    )  # fmt: skip

    @property
    def contract(self) -> Contract:
        return Contract(positions=self.terms != "0000" or bool(self.dwc or self.window))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self.terms, self.window, self.key_stride, self.query_stride)
        if self.execution == "factorised" and self.terms[0] == "1":
            raise ConfigError(f"the factorised form cannot do E1 (terms {self.terms!r}); use execution='auto'")
        if self.positions < 0 or self.positions % (2 * self.axes):
            raise ConfigError(f"positions is a multiple of 2 axes = {2 * self.axes}, not positions={self.positions}")
        numbers = (self.base, self.magnitude, self.position_scale, self.stride)
        if min(numbers) < 0 or not self.magnitude:
            raise ConfigError(
                "magnitude is positive; base, position_scale and stride are positive or 0 (the preset's), not "
                f"magnitude={self.magnitude}, base={self.base}, position_scale={self.position_scale}, "
                f"stride={self.stride}"
            )
        if not self.relative:
            names = ("positions", "base", "magnitude", "sign", "position_scale")
            refuse_unused(self, names, f"the terms E2 and E4, not to {self.terms!r}")

    @property
    def key_stride(self) -> int:
        """stride, or the preset's."""
        return self.stride or (2 if self.preset == "mmcv" else 1)

    @property
    def cross(self) -> bool:  # type: ignore[override]
        """Not with a window, for which queries and keys must lie on one grid."""
        return not self.window

    @property
    def masks(self) -> frozenset[str]:  # type: ignore[override]
        """A causal mask needs all queries, all keys and dwc=0; padding needs all queries, as others are interpolated.

        execution="factorised" applies no mask.
        """
        if self.execution == "factorised":
            return frozenset()
        masks = {"bias"}
        if self.query_stride == 1:
            masks.add("padding")
            if self.key_stride == 1 and not self.dwc:
                masks.add("causal")
        return frozenset(masks)

    @property
    def depth(self) -> bool:  # type: ignore[override]
        """Frames, the third axis, need all queries and keys and no window."""
        return not self.window and self.key_stride == self.query_stride == 1 and self.axes == 2

    @property
    def uses(self) -> str:
        e1, e2, e3, _ = (flag == "1" for flag in self.terms)
        return ("q" if e1 or e2 else "") + ("k" if e1 or e3 else "") + "v"

    @property
    def relative(self) -> bool:
        """Whether the terms contain E2 or E4."""
        return "1" in (self.terms[1], self.terms[3])

    @property
    def card(self) -> Card:  # type: ignore[override]
        """The card of these terms."""
        parts = [text for text, on in zip(("q.k", "q.r", "u.k", "t.r"), self.terms, strict=True) if on == "1"]
        complexity = "O(N^2 C)" if self.terms[0] == "1" or self.terms[1] == "1" else "O(N (H + W) C)"
        return Card(
            title=f"Spatial attention factors {self.terms}", source="Zhu et al. 2019 (Eq. 1, 2, 8)",
            formula=f"softmax({' + '.join(parts)}) v" if parts else "mean of v",
            complexity=complexity if self.relative or self.terms[0] == "1" else "O(N C)",
            query_content="1" in self.terms[:2], key_content="1" in (self.terms[0], self.terms[2]),
            relative_position=self.relative, dynamic="one-step" if "1" in self.terms[:3] else "none",
            scaling=frozenset({"routing"} if self.window else ()),
            expert_type="MLP of width w^2" if self.window else "MLP of width N",
            expert_count="N" if self.window else "1", construction="locality prior" if self.window else "identity",
            topology="N x one-to-one" if self.window else "all-to-one", conditions="position" if self.window else "",
            prefix="keys and queries with relative terms 0",
        )  # fmt: skip

    def width_of_positions(self, site: Site) -> int:
        """P. Raises: ConfigError if it is dim and dim is not a multiple of 2 axes."""
        width = self.positions or site.dim
        if self.relative and width % (2 * self.axes):
            raise ConfigError(f"sinusoids need a multiple of {2 * self.axes} as width, not {width}; give positions=")
        return width

    def operator(self, site: Site) -> "FactorsOperator":
        return FactorsOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """ "executed" is what `execution` runs in float32, eager on the CPU; "paper" is the paper's Table 1."""
        e3, e4, width = self.terms[2] == "1", self.terms[3] == "1", self.width_of_positions(site)
        of_frames = width // self.axes if site.grid.depth > 1 else 0
        params = site.inner * ((width + of_frames) * self.relative + e3 + e4)
        if accounting == "paper":
            return Cost(params, cost.paper_macs(self, site, width))
        return Cost(params, cost.executed_macs(self, site, width))

    def exponentials(self, site: Site) -> int:
        """Entries in the softmax of the form that runs, for one sample; costs do not count them."""
        return cost.exponentials(self, site)


class FactorsOperator(Operator):
    """u, t (H, d) for E3 and E4; positions_x, positions_y (inner, P/2) project the sinusoids for E2 and E4, and where
    the layer has several frames positions_z.

    The sinusoids and their bases are computed for the grid of each call.
    """

    basis_x: Tensor
    basis_y: Tensor

    @property
    def one_by_one(self) -> bool:  # type: ignore[override]
        """With all queries, all keys and no window, on sequences."""
        config = self.config
        return config.axes == config.query_stride == self.stride == 1 and not config.window

    def __init__(self, config: Factors, site: Site) -> None:
        super().__init__()
        self.config, self.heads, self.grid = config, site.heads, site.grid
        base, sign, factor = PRESETS[config.preset]
        self.sign, self.factor = config.sign or sign, config.position_scale or factor
        self.base, self.stride = config.base or base, config.key_stride
        self.width = config.width_of_positions(site) // config.axes
        self.u = nn.Parameter(torch.empty(site.heads, site.width)) if config.terms[2] == "1" else None
        self.t = nn.Parameter(torch.empty(site.heads, site.width)) if config.terms[3] == "1" else None
        shape = (site.inner, self.width)
        self.positions_x = nn.Parameter(torch.empty(shape)) if config.relative else None
        self.positions_y = nn.Parameter(torch.empty(shape)) if config.relative and config.axes == 2 else None
        frames = config.relative and site.grid.depth > 1
        self.positions_z = nn.Parameter(torch.empty(shape)) if frames else None
        for name, basis in zip(("basis_x", "basis_y"), self._bases(site.grid), strict=True):
            self.register_buffer(name, torch.empty(basis.shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-a, a): a = (2d)^-0.5 for u, t, (3 / fan-in)^0.5 for positions; normal(0, 0.02) for transformer_xl."""
        for weight in (self.u, self.t, self.positions_x, self.positions_y, self.positions_z):
            if weight is None:
                continue
            if self.config.preset == "transformer_xl":
                nn.init.normal_(weight, std=0.02)
            else:
                square = 1 / (2 * weight.shape[1]) if weight is self.u or weight is self.t else 3 / weight.shape[1]
                nn.init.uniform_(weight, -math.sqrt(square), math.sqrt(square))
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        for buffer, basis in zip((self.basis_x, self.basis_y), self._bases(self.grid), strict=True):
            buffer.copy_(basis)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FactorsOperator":
        """As `nn.Module` does, with the bases computed again, so that they are as exact as their new dtype allows."""
        super()._apply(fn, recurse)
        self._fill()
        return self

    def tables(self, grid: Grid, keys: Grid) -> Tables | None:
        """The projected sinusoids of every displacement between the grids, (H, 2 size - 1, d) an axis; of frames those
        of each pair of rows. Raises: GridError for several frames in a layer that was built for one.
        """
        if self.positions_x is None:
            return None
        with without_autocast(self.positions_x.device):
            x = self._table(self.positions_x, grid.width, keys.width)
            y = None if self.positions_y is None else self._table(self.positions_y, grid.height, keys.height)
            if grid.depth == keys.depth == 1 or y is None:
                return x, y
            if self.positions_z is None:
                raise GridError(f"these factors were built for one frame, not for {grid}: swap with a clip as example")
            return x, forms.rows_of_frames(y, self._table(self.positions_z, grid.depth, keys.depth), grid, keys)

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        query_grid, q, mask = self._queries(inputs)
        source, keys, k, v, mask = self._keys(inputs, mask)
        basis = self._basis(source, v) if self.config.relative else None
        out = (factors_reference if plain else factors)(
            q, k, v, terms=self.config.terms, grid=query_grid.stacked(), key_grid=keys.stacked(),
            tables=self.tables(query_grid, keys), u=self.u, t=self.t, scale=self.config.scale,
            window=self.config.window, stride=self.stride, query_stride=self.config.query_stride, mask=mask,
            basis=basis, execution=self.config.execution,
        )  # fmt: skip
        return out if self.config.query_stride == 1 else interpolate(out, query_grid, inputs.grid)

    def views(self, inputs: Inputs) -> tuple[View, ...]:
        """Softmax of each factor alone, for whole grids without strides (the figures of the factors' paper)."""
        query_grid, q, mask = self._queries(inputs)
        _, keys, k, v, mask = self._keys(inputs, mask)
        if inputs.memory is not None or (query_grid, keys) != (inputs.grid, inputs.grid):
            return ()
        tables, config = self.tables(query_grid, keys), self.config
        logits = factor_logits(
            q, k, terms=config.terms, grid=query_grid.stacked(), key_grid=keys.stacked(), tables=tables, u=self.u,
            t=self.t,
        )  # fmt: skip
        scale, inside = (
            scale_of(config.scale, q, k, v, tables),
            inside_window(query_grid.stacked(), keys.stacked(), config.window, 1, v.device),
        )
        shown = {term: part[0] * scale for term, part in logits.items()}
        if inside is not None:
            shown = {term: part.masked_fill(~inside, -torch.inf) for term, part in shown.items()}
        return tuple(View(f"{term}: {FACTORS[term]} alone", softmax_rows(part)) for term, part in shown.items())

    def one_query(
        self, index: int, q: Tensor | None, k: Tensor | None, v: Tensor, *, mask: Mask | None = None
    ) -> Tensor:
        keys = Grid.sequence(v.shape[2])
        with without_autocast(v.device):
            tables = None if self.positions_x is None else (self._table(self.positions_x, 1, keys.width, index), None)
        return factors_reference(
            q, k, v, terms=self.config.terms, grid=Grid.sequence(1), key_grid=keys, tables=tables, u=self.u, t=self.t,
            scale=self.config.scale, mask=mask,
        )  # fmt: skip

    def _table(self, weight: Tensor, queries: int, keys: int, first: int = 0) -> Tensor:
        """first: the position of the first query, where that of the first key is 0."""
        size = table_size(queries, keys, self.stride, self.config.query_stride)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = self.width, self.base, self.config.magnitude
        waves = forms.waves_of_steps(size, first, self.sign, *shape, dtype, weight.device)
        return F.linear(waves, weight.to(dtype) * self.factor).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def _bases(self, source: Grid) -> tuple[Tensor, Tensor]:
        width, waves = self.width if self.config.relative else 0, (self.base, self.config.magnitude)
        x = forms.sinusoid_basis(source.width, width, *waves, self.stride)
        if source.depth > 1:
            return x, forms.frames_basis(source.depth, source.height, width, *waves)
        return x, forms.sinusoid_basis(source.height, width, *waves, self.stride)

    def _basis(self, source: Grid, v: Tensor) -> Bases | None:
        """None in float64, where it would lose precision, and for a new grid under torch.compile, which has no SVD."""
        if v.dtype == torch.float64:
            return None
        x, y = self.basis_x, self.basis_y
        if source.sides != self.grid.sides:
            if torch.compiler.is_compiling():
                return None
            x, y = (basis.to(x.device, x.dtype) for basis in self._bases(source))
        return x, (y if self.config.axes == 2 else None)

    def _queries(self, inputs: Inputs) -> tuple[Grid, Tensor | None, Mask | None]:
        """The grid of every query_stride-th query, and their q and mask."""
        stride, q, grid, mask = self.config.query_stride, inputs.q, inputs.grid, inputs.mask
        if stride == 1:
            return grid, q, mask
        picked = strided_tokens(grid, stride, inputs.v.device)
        if mask is not None:
            if mask.causal or mask.keep is not None:
                raise UnsupportedError("a causal or padding mask needs every query: query_stride=1")
            if mask.bias is not None and mask.bias.shape[-2] > 1:
                mask = Mask(bias=mask.bias.index_select(-2, picked))
        return grid.every(stride), None if q is None else q.index_select(-2, picked), mask

    def _keys(self, inputs: Inputs, mask: Mask | None) -> tuple[Grid, Grid, Tensor | None, Tensor, Mask | None]:
        """The grid of all keys, the grid of every stride-th key, and their k, v and mask."""
        k, v, grid, source = inputs.k, inputs.v, inputs.grid, inputs.key_grid
        if self.config.axes == 1 and max(grid.height, source.height) > 1:
            raise GridError(f"axes=1 is for sequences (one row), not {grid}; use axes=2")
        if self.stride == 1:
            return source, source, k, v, mask
        if mask is not None and mask.causal:
            raise UnsupportedError("a causal mask needs every key: stride=1")
        picked = strided_tokens(source, self.stride, v.device)
        if mask is not None:
            bias = None if mask.bias is None else mask.bias.index_select(-1, picked)
            mask = Mask(keep=None if mask.keep is None else mask.keep.index_select(-1, picked), bias=bias)
        k = None if k is None else k.index_select(-2, picked)
        return source, source.every(self.stride), k, v.index_select(-2, picked), mask
