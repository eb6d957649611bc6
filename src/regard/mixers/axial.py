"""Axial and criss-cross attention: every query attends to the patch tokens of its row and of its column.

Ho et al. 2019: a layer attends along one axis, the next along the other; Axial-DeepLab (Wang et al. 2020) has both in
one block, the first along columns. CCNet (Huang et al. 2019, Eq. 1-2): one softmax over the query's row and column, its
own position once, H + W - 1 keys; twice in a row, it reaches all patch tokens.
Prefix and suffix tokens are in every row and column, and attend to all tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Card, Cost, Grid, Inputs, Mask, Operator, Site, hide, operator_function, softmax_rows

from .shared.checks import padding_only
from .shared.heads import HeadMixerConfig
from .shared.precision import upcast, without_autocast
from .shared.tiles import join_global_tokens, pad_pairs, split_keep, split_tokens
from .window import window

__all__ = ["Axial", "axial", "axial_reference"]

Along = Literal["rows", "columns", "both", "sum", "cross"]


@operator_function
def axial_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid,
    along: Along = "both", *, scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """With A_r and A_c, softmax over all keys with those outside the query's row or column at -inf: A_r v, A_c v,
    A_r (A_c v), A_r v + A_c v, or A v, softmax over both.
    """
    mask = padding_only("axial", mask)
    k, v = hide(k, mask), hide(v, mask)
    logits = mask.add_to(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale))
    cell = torch.arange(grid.cells, device=q.device)
    row, column = cell // grid.width, cell % grid.width
    in_row, in_column = (pad_pairs(x[:, None] == x, grid) for x in (row, column))
    r, c, cross = (
        softmax_rows(logits.masked_fill(~near, -torch.inf)).to(v.dtype)
        for near in (in_row, in_column, in_row | in_column)
    )
    if along == "both":
        return r @ hide(c @ v, mask)
    return {"rows": r, "columns": c, "sum": r + c, "cross": cross}[along] @ v


@operator_function
def axial(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid,
    along: Along = "both", *, scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention along rows and columns; memory grows with N (height + width).

    along: "rows" or "columns"; "both", along columns and then along rows, with the values that this gave; "sum" of the
    two; "cross", in one softmax. scale: None = d^-0.5. mask: padding only; a query without any key gives zeros.
    Raises: ShapeError, GridError for tensors that do not fit; UnsupportedError for other masks.
    """
    grid.check(q)
    mask = padding_only("axial", mask)
    k, v = hide(k, mask), hide(v, mask)
    if along == "cross":
        return join_global_tokens(_cross(q, k, v, grid, scale, mask), q, k, v, grid, scale, mask)
    attend = partial(window, grid=grid, scale=scale, mask=mask)
    row, column = (1, grid.width), (grid.height, 1)
    if along == "both":
        along_columns = attend(q, k, v, size=column).to(v.dtype)  # autocast gives another dtype than the inputs
        return attend(q, k, hide(along_columns, mask), size=row)
    if along == "sum":
        return attend(q, k, v, size=row) + attend(q, k, v, size=column)
    return attend(q, k, v, size=row if along == "rows" else column)


def _cross(q: Tensor, k: Tensor, v: Tensor, grid: Grid, scale: float | None, mask: Mask) -> Float[Tensor, "B H n e"]:
    """The outputs of the patch tokens: one softmax over row, column without the query's own position, and others."""
    (_, q_cells), (k_extra, k_cells), (v_extra, v_cells) = (split_tokens(x, grid) for x in (q, k, v))
    sides = (grid.height, grid.width)
    with without_autocast(q.device):
        queries = upcast(q_cells).unflatten(2, sides) * (q.shape[-1] ** -0.5 if scale is None else scale)
        keys, values = upcast(k_cells).unflatten(2, sides), v_cells.unflatten(2, sides)  # (B, H, h, w, d | e)
        own = torch.eye(grid.height, dtype=torch.bool, device=q.device)[:, None]
        to_row = queries @ keys.mT  # (B, H, h, w, w)
        to_column = (queries.transpose(2, 3) @ keys.transpose(2, 3).mT).transpose(2, 3)  # (B, H, h, w, h)
        to_extra = queries @ upcast(k_extra)[:, :, None].mT
        logits = torch.cat([to_row, to_column.masked_fill(own, -torch.inf), to_extra], -1)
        if mask.keep is not None:
            extra, cells = split_keep(mask.keep, grid)
            rows = cells.unflatten(1, sides)
            parts = [rows[:, :, None].expand(-1, -1, grid.width, -1), rows.mT[:, None].expand(-1, grid.height, -1, -1)]
            keep = torch.cat([*parts, extra[:, None, None].expand(-1, *sides, -1)], -1)
            logits = logits.masked_fill(~keep[:, None], -torch.inf)
        a = (logits.softmax(-1) if mask.keep is None else softmax_rows(logits)).to(v.dtype)
        row, column, extra = a.split([grid.width, grid.height, grid.extra], -1)
        out = row @ values + (column.transpose(2, 3) @ values.transpose(2, 3)).transpose(2, 3)
        return (out + extra @ v_extra[:, :, None] if grid.extra else out).flatten(2, 3)


@dataclass(frozen=True, kw_only=True)
class Axial(HeadMixerConfig):
    """along: "rows" or "columns" (Ho et al.: layers with one axis each); "both", along columns and then along rows of
    what this gave (Axial-DeepLab, whose second part projects it again); "sum" of the two; "cross", row and column in
    one softmax (CCNet). Positions of Axial-DeepLab are left to `dwc` or the host. scale: None = d^-0.5 (CCNet: 1).
    """

    along: Along = "both"
    scale: float | None = None

    card = Card(
        title="Axial and criss-cross attention",
        source="Ho et al. 2019; Wang et al. 2020; Huang et al. 2019 (CCNet), Eq. 1-2",
        formula="A_r (A_c v),  A = softmax over the query's row or column", complexity="O(N (H + W) C)",
        query_content=True, key_content=True, relative_position=True, dynamic="one-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width W or H", expert_count="H + W",
        construction="locality prior", topology="N x two-to-one", conditions="position",
        prefix="global: attend to all tokens and are attended by all; in every row and column",
    )  # fmt: skip
    masks = frozenset({"padding"})
    samples = ("Axial()", 'Axial(along="cross", scale=0.7)', 'Axial(along="rows", dwc=3)', 'Axial(along="sum")')

    def operator(self, site: Site) -> "AxialOperator":
        return AxialOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Patch tokens to the keys of each axis, with the own position twice; prefix and suffix tokens to all."""
        grid = site.grid
        keys = {"rows": grid.width, "columns": grid.height}.get(self.along, grid.width + grid.height)
        parts = 2 if self.along in ("both", "sum") else 1
        extra = parts * grid.extra * (grid.cells + grid.tokens)
        return Cost(0, 2 * (grid.cells * keys + extra) * site.inner)


class AxialOperator(Operator):
    """No parameters."""

    def __init__(self, config: Axial) -> None:
        super().__init__()
        self.config = config

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form, config = axial_reference if plain else axial, self.config
        q, k, v = inputs.q, inputs.k, inputs.v
        return form(q, k, v, inputs.grid, config.along, scale=config.scale, mask=inputs.mask)
