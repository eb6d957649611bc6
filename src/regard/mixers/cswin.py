"""Cross-shaped windows: half of the heads attend within horizontal stripes, half within vertical ones (CSWin).

A horizontal stripe is `stripe` rows of the whole map, a vertical one `stripe` columns; both halves are concatenated
(Dong et al. 2022, Sec. 3.2). The last stripe is narrower where its width does not divide the side. The positions
(LePE) are a depth-wise convolution of the values, `dwc=3`; the published code cuts it off at the borders of stripes.
Prefix and suffix tokens are in every stripe, and attend to all tokens.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Card, ConfigError, Cost, Grid, Inputs, Operator, Site, operator_function
from regard.core.mask import Mask, hide, softmax_rows

from .shared.checks import padding_only
from .shared.heads import HeadMixerConfig
from .shared.tiles import pad_pairs
from .window import window

__all__ = ["CSWin", "cswin", "cswin_reference"]


@operator_function
def cswin_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, stripe: int, *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys; those in another stripe are at -inf. Cell (y, x) is in stripe y // width of the first half
    of the heads, and x // width of the second.
    """
    mask = padding_only("cswin", mask)
    k, v = hide(k, mask), hide(v, mask)
    cell = torch.arange(grid.cells, device=q.device)
    y, x = cell // grid.width, cell % grid.width
    horizontal, vertical = ((place // stripe)[:, None] == place // stripe for place in (y, x))
    first = -(-q.shape[1] // 2)
    together = pad_pairs(torch.stack([horizontal] * first + [vertical] * (q.shape[1] - first)), grid)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return softmax_rows(mask.add_to(logits.masked_fill(~together, -torch.inf))).to(v.dtype) @ v


@operator_function
def cswin(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], grid: Grid, stripe: int, *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention within stripes of `stripe` rows (the first half of the heads) or columns (the second).

    Of an odd number of heads the middle one is in the first half. scale: None = d^-0.5. mask: padding only; a query
    without any key gives zeros.
    Raises: ShapeError, GridError for tensors that do not fit; ConfigError for a stripe below 1; UnsupportedError for
    other masks.
    """
    grid.check(q)
    mask = padding_only("cswin", mask)
    _check_stripe(stripe)
    first = -(-q.shape[1] // 2)
    halves = (slice(first), (stripe, grid.width)), (slice(first, None), (grid.height, stripe))
    out = [window(q[:, h], k[:, h], v[:, h], grid, size, scale=scale, mask=mask) for h, size in halves]
    return torch.cat(out, 1)


def _check_stripe(stripe: int) -> None:
    if stripe < 1:
        raise ConfigError(f"stripe is the width of a stripe in cells, at least 1, not {stripe}")


@dataclass(frozen=True, kw_only=True)
class CSWin(HeadMixerConfig):
    """stripe: rows or columns of a stripe (CSWin: 1, 2, 7, 7 in its four stages). scale: None = d^-0.5.

    The middle one of an odd number of heads is horizontal; the paper's are even.
    Raises: ConfigError for a stripe below 1; building, for a single head.
    """

    stripe: int = 7
    scale: float | None = None

    card = Card(
        title="Cross-shaped window attention", source="Dong et al. 2022 (CSWin), Sec. 3.2",
        formula="softmax(q K_s^T / sqrt(d)) V_s,  s = the query's horizontal or vertical stripe, by head",
        complexity="O(N s (H + W) C / 2)", query_content=True, key_content=True, relative_position=True,
        dynamic="one-step", scaling=frozenset({"routing"}), expert_type="MLP of width s W or s H",
        expert_count="H / s or W / s", construction="locality prior", topology="H/s x (s W)-to-one",
        conditions="position", prefix="global: attend to all tokens and are attended by all; in every stripe",
    )  # fmt: skip
    masks = frozenset({"padding"})
    samples = ("CSWin(stripe=1)", "CSWin(stripe=2, scale=0.7, dwc=3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stripe(self.stripe)

    def operator(self, site: Site) -> "CSWinOperator":
        if site.heads < 2:
            raise ConfigError("CSWin has horizontal stripes in half of its heads: it needs two heads or more, not 1")
        return CSWinOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """All slots of all stripes, and prefix and suffix tokens."""
        grid, first = site.grid, -(-site.heads // 2)
        total = 0
        for number, side, other in ((first, grid.height, grid.width), (site.heads - first, grid.width, grid.height)):
            wide = min(self.stripe, side)
            slots = -(-side // wide) * wide * other
            total += number * (slots * (wide * other + grid.extra) + grid.extra * grid.tokens)
        return Cost(0, 2 * total * site.width)


class CSWinOperator(Operator):
    """No parameters."""

    def __init__(self, config: CSWin) -> None:
        super().__init__()
        self.config = config

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form, config = cswin_reference if plain else cswin, self.config
        q, k, v = inputs.q, inputs.k, inputs.v
        return form(q, k, v, inputs.grid, config.stripe, scale=config.scale, mask=inputs.mask)
