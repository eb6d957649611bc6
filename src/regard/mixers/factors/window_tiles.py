"""Small windows of the four factors: tiles of queries with the keys around them instead of a mask over all pairs.

A tile of a x b queries in windows of side w has (a + w - 1) x (b + w - 1) keys, the tile and its halo; a mask selects
those in the window of a query. Prefix and suffix tokens are keys of every tile; as queries they attend to all keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core import Grid
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.shared.tiles import join_tokens, split_tokens

TILE = 8  # the smallest side of a tile, on lines its square: smaller products do not pay
WORTH = 4  # tiles are used where a tile has at most 1 / WORTH of all keys (benchmarks/factors.py --window)


class Axis(NamedTuple):
    """One axis: patch tokens of the map and of a tile along it, the number of tiles, the halo on either side."""

    side: int
    tile: int
    tiles: int
    halo: int

    @property
    def keys(self) -> int:
        """Keys of a tile along this axis."""
        return self.tile + 2 * self.halo


class Cut(NamedTuple):
    """The tiles of a map, and the window."""

    y: Axis
    x: Axis
    window: int

    def pairs(self, grid: Grid, keys: Grid) -> int:
        """The number of pairs of queries and keys whose logits are computed."""
        queries = self.y.tiles * self.x.tiles * self.y.tile * self.x.tile
        return queries * (self.y.keys * self.x.keys + keys.extra) + grid.extra * keys.tokens


def cut(grid: Grid, window: int) -> Cut | None:
    """The tiles for a window on a grid; None where they would not save enough."""
    if not window:
        return None
    least = max(TILE if min(grid.height, grid.width) > 1 else TILE**2, window - 1)
    axes = []
    for side in (grid.height, grid.width):
        number = -(-side // least)
        axes.append(Axis(side, -(-side // number), number, min(window // 2, side - 1)))
    tiles = Cut(axes[0], axes[1], window)
    return tiles if WORTH * tiles.y.keys * tiles.x.keys <= grid.cells else None


def attend_in_tiles(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], grid: Grid, keys: Grid,
    to: Cut,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax(q.k) v over the keys of a query's window, for queries and keys on the same grid."""
    (q_extra, q_cells), (k_extra, k_cells), (v_extra, v_cells) = (
        split_tokens(x, g) for x, g in ((q, grid), (k, keys), (v, keys))
    )
    near = [_tiles(cells, to, halo=True) for cells in (k_cells, v_cells)]
    if keys.extra:
        every = (extra.flatten(0, 1)[:, None].expand(-1, near[0].shape[1], -1, -1) for extra in (k_extra, v_extra))
        near = [torch.cat(both, 2) for both in zip(near, every, strict=True)]
    allowed = F.pad(_allowed_keys(to, q.device), (0, keys.extra), value=True)[None]  # (1, T, A, K + E)
    out = sdpa(_tiles(q_cells, to, halo=False), near[0], near[1], attn_mask=allowed, scale=1.0)
    image = out.unflatten(2, (to.y.tile, to.x.tile)).unflatten(1, (to.y.tiles, to.x.tiles)).transpose(2, 3)
    image = image.flatten(3, 4).flatten(1, 2)[:, : to.y.side, : to.x.side]  # (B H, h, w, e)
    cells = image.flatten(1, 2).unflatten(0, q.shape[:2])
    return join_tokens(sdpa(q_extra, k, v, scale=1.0), cells, grid) if grid.extra else cells


def _tiles(x: Float[Tensor, "B H cells d"], to: Cut, halo: bool) -> Float[Tensor, "G T A d"]:
    """Patch tokens in tiles, zero beyond the map, with or without the halo."""
    around_y, around_x = (to.y.halo, to.x.halo) if halo else (0, 0)
    low, right = (axis.tiles * axis.tile - axis.side for axis in (to.y, to.x))
    image = x.flatten(0, 1).unflatten(1, (to.y.side, to.x.side))
    image = F.pad(image, (0, 0, around_x, right + around_x, around_y, low + around_y))
    image = image.unfold(1, to.y.tile + 2 * around_y, to.y.tile).unfold(2, to.x.tile + 2 * around_x, to.x.tile)
    return image.movedim(3, -1).flatten(3, 4).flatten(1, 2)


def _allowed_keys(to: Cut, device: torch.device) -> Bool[Tensor, "T A K"]:
    """True for the keys of a tile in a query's window; for queries beyond the map all, so that no row is empty."""
    down, across = (_allowed_along(axis, to.window, device) for axis in (to.y, to.x))
    both = down[:, None, :, None, :, None] & across[None, :, None, :, None, :]
    return both.flatten(4, 5).flatten(2, 3).flatten(0, 1)


def _allowed_along(axis: Axis, window: int, device: torch.device) -> Bool[Tensor, "t a k"]:
    start = torch.arange(axis.tiles, device=device)[:, None] * axis.tile
    query = start + torch.arange(axis.tile, device=device)  # (t, a)
    key = start + torch.arange(axis.keys, device=device) - axis.halo  # (t, k)
    near = (key[:, None] - query[..., None]).abs() <= window // 2
    inside = (key >= 0) & (key < axis.side)
    return near & inside[:, None] | (query >= axis.side)[..., None]
