"""Maps of each factor of spatial attention (Zhu et al. 2019, Eq. 2 and Figure 1), for one query of an image.

A layer with `Factors` adds the logits of its enabled terms; here every term also has its separate softmax. Only the
logits of one query are computed, in float64, so memory is linear in the number of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Mask, softmax_rows
from regard.mixers.factors.factors import FactorsOperator
from regard.mixers.factors.forms import Tables
from regard.mixers.factors.inputs import scale_of, strided_tokens

from .layer_inputs import Call, query_cells, recorded_calls, whole_image_calls
from .strips import on_strip, strip, token_at

ALL = "all"
"""The name of the map of all terms together, as the layer uses it."""
MEANING = {
    "E1": "query & key content", "E2": "query content & position", "E3": "key content", "E4": "relative position",
    ALL: "as the layer attends",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TermMaps:
    """The terms of one layer for one query.

    grid: of the queries, with frames side by side; cell: (row, column) of the query on it. keys: the grid of the keys,
    before a stride. logits:
    scaled, of the enabled terms "E1" to "E4", (heads, tokens of keys). bias: added to their sum, (heads or 1, tokens):
    -inf for keys that the query does not attend to (window, stride, mask), otherwise 0 or the host's bias.
    """

    layer: str
    grid: Grid
    keys: Grid
    cell: tuple[int, int]
    logits: Mapping[str, Float[Tensor, "H M"]]
    bias: Float[Tensor, "#H M"]

    @property
    def names(self) -> tuple[str, ...]:
        """The enabled terms, and "all"."""
        return (*self.logits, ALL)

    def weights(self, name: str) -> Float[Tensor, "H M"]:
        """Softmax of one term alone over the keys that the query attends to, or of all terms and the bias."""
        if name == ALL:
            return softmax_rows(sum(self.logits.values(), start=self.bias))
        return softmax_rows(self.logits[name].masked_fill(self.bias == -torch.inf, -torch.inf))

    def map(self, name: str) -> Float[Tensor, "H h w"]:
        """The weights of the patch tokens on their grid, with frames side by side. They may sum to less than 1: other
        tokens are left out."""
        return on_strip(self.weights(name)[:, self.keys.span], self.keys)


def term_maps(
    model: nn.Module, image: Float[Tensor, "C *frames H W"], query: tuple[int, int] | None = None, *, layers: str = "*"
) -> list[TermMaps]:
    """The maps of each term in the layers with `Factors`, for one query of an image, in the order of the network.

    image: as the model expects it. query: (row, column) on the finest grid of these layers, by default the middle
    cell; in a coarser layer the query is the cell that contains it. Where queries have a stride, the next strided query
    up and to the left is used, since the layer interpolates between these. layers: a glob of names. Layers that get the
    image in parts (windows of a Swin transformer) are left out.
    Raises: UnsupportedError if no layer has `Factors` or none sees the whole image; ConfigError if no name matches;
    GridError for a query outside the grid.
    """
    calls = recorded_calls(model, image, FactorsOperator, "layer with Factors", layers)
    whole = whole_image_calls(calls, {name: len(call.args[2]) for name, call in calls.items()})
    positions = query_cells({name: strip(call.kwargs["grid"]) for name, call in whole.items()}, query)
    with torch.no_grad():
        return [_of_call(name, call, positions[name]) for name, call in whole.items()]


def _of_call(name: str, call: Call, cell: tuple[int, int]) -> TermMaps:
    grid: Grid = call.kwargs["grid"]
    stride = call.module.config.query_stride
    cell = (cell[0] - cell[0] % stride, cell[1] - cell[1] % stride)
    memory: Grid | None = call.kwargs.get("memory")
    mask: Mask | None = call.kwargs.get("mask")
    operator, keys = call.module, memory or grid
    logits = term_logits(operator, *call.args[:3], grid=grid, memory=memory, cell=cell)
    bias = key_bias(operator, grid, keys, cell, mask)
    return TermMaps(
        layer=name, grid=strip(grid), keys=keys, cell=cell,
        logits={term: value[0].cpu() for term, value in logits.items()},
        bias=bias.cpu().expand(operator.heads if not logits else bias.shape[0], -1),
    )  # fmt: skip


def term_logits(
    operator: FactorsOperator, q: Float[Tensor, "B H N d"] | None, k: Float[Tensor, "B H M d"] | None,
    v: Float[Tensor, "B H M e"], *, grid: Grid, cell: tuple[int, int], memory: Grid | None = None,
) -> dict[str, Float[Tensor, "B H M"]]:  # fmt: skip
    """The scaled logits of the enabled terms for one query and all keys, in float64.

    Keys are those before the operator's stride; `key_bias` excludes those that the stride skips.
    """
    keys, config = memory or grid, operator.config
    enabled = dict(zip(("E1", "E2", "E3", "E4"), (flag == "1" for flag in config.terms), strict=True))
    tables = operator.tables(grid, keys)
    scale = scale_of(config.scale, q, k, v, tables)
    r = None if tables is None else _position_terms(tables, keys, cell)
    token = token_at(grid, cell)
    query = None if q is None else q[:, :, token].double()
    content = None if k is None else k.double()
    u, t = (None if vector is None else vector.double() for vector in (operator.u, operator.t))
    logits: dict[str, Tensor] = {}
    if enabled["E1"]:
        logits["E1"] = torch.einsum("bhd,bhmd->bhm", cast(Tensor, query), cast(Tensor, content))
    if enabled["E2"]:
        logits["E2"] = torch.einsum("bhd,hmd->bhm", cast(Tensor, query), cast(Tensor, r))
    if enabled["E3"]:
        logits["E3"] = torch.einsum("hd,bhmd->bhm", cast(Tensor, u), cast(Tensor, content))
    if enabled["E4"]:
        logits["E4"] = torch.einsum("hd,hmd->hm", cast(Tensor, t), cast(Tensor, r)).expand(len(v), -1, -1)
    return {name: value * scale for name, value in logits.items()}


def _position_terms(tables: Tables, keys: Grid, cell: tuple[int, int]) -> Float[Tensor, "H M d"]:
    """r, the embedded relative position of every key (zero for tokens outside the grid)."""
    x, y = tables
    frame, column = divmod(cell[1], keys.width)  # of one frame, unless there are several
    cell, keys = (frame * keys.height + cell[0], column), keys.stacked()
    r = x.new_zeros(x.shape[0], keys.tokens, x.shape[-1], dtype=torch.float64)
    columns = torch.arange(keys.width, device=x.device) - cell[1] + x.shape[1] // 2
    on_grid = x[:, None, columns].double().expand(-1, keys.height, -1, -1)
    if y is not None and y.ndim == 4:
        on_grid = on_grid + y[:, cell[0], :, None].double()
    elif y is not None:
        rows = torch.arange(keys.height, device=x.device) - cell[0] + y.shape[1] // 2
        on_grid = on_grid + y[:, rows, None].double()
    r[:, keys.span] = on_grid.flatten(1, 2)
    return r


def key_bias(
    operator: FactorsOperator, grid: Grid, keys: Grid, cell: tuple[int, int], mask: Mask | None = None
) -> Float[Tensor, "#H M"]:
    """The bias of the logits of one query in the first sample: -inf for a key that it does not attend to."""
    device, window = operator.basis_x.device, operator.config.window
    bias = torch.zeros(1, keys.tokens, dtype=torch.float64, device=device)
    token = token_at(grid, cell)
    if mask is not None:
        rows = torch.zeros(1, 1, grid.tokens, keys.tokens, dtype=torch.float64, device=device)
        bias = mask.add_to(rows)[0, :, token]
    attended = torch.zeros(keys.tokens, dtype=torch.bool, device=device)
    attended[strided_tokens(keys.stacked(), operator.stride, device)] = True
    if window:
        far_y = (torch.arange(keys.height, device=device) - cell[0]).abs() > window // 2
        far_x = (torch.arange(keys.width, device=device) - cell[1]).abs() > window // 2
        attended[keys.span] &= ~(far_y[:, None] | far_x).flatten()
    return bias.masked_fill(~attended, -torch.inf)
