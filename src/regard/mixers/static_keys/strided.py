"""Keys on a coarser grid: each block of stride x stride patch tokens has one key, and one value, their mean.

Blocks at the lower and right border may be smaller. Prefix and suffix tokens keep their own keys and values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Grid, Mask
from regard.mixers.shared.block_attention import block_means, block_tiles
from regard.mixers.shared.checks import padding_only
from regard.mixers.shared.tiles import join_tokens, split_keep, split_tokens


def block_values(
    v: Tensor, grid: Grid, stride: int, mask: Mask | None, plain: bool
) -> tuple[Tensor, Grid, Mask | None]:
    """The values (B, H, M, e) of the keys, the keys' grid, and the mask for them; as they are for stride 1.

    Hidden tokens are left out of the means, and a block of hidden tokens alone is hidden.
    Raises: UnsupportedError for a bias, whose columns are tokens.
    """
    if stride == 1:
        return v, grid, mask
    mask = padding_only(f"CSKA(stride={stride})", mask)
    extra, cells = split_tokens(v, grid)
    if plain:
        means, real = _plain_means(cells, grid, stride, mask)
    else:
        means, real = block_means(v, grid, block_tiles(grid, (stride, stride), v.device), mask)
    values = join_tokens(extra, means.to(v.dtype), grid.every(stride))
    if mask.keep is None:
        return values, grid.every(stride), None
    first, last = mask.keep[:, : grid.prefix], mask.keep[:, grid.prefix + grid.cells :]
    return values, grid.every(stride), Mask(keep=torch.cat([first, real, last], 1))


def _plain_means(cells: Tensor, grid: Grid, stride: int, mask: Mask) -> tuple[Tensor, Tensor]:
    """The quotient of two pooled maps: of values, zero where hidden, and of tokens that are not hidden."""
    kept = cells.new_ones(cells.shape[0], 1, grid.cells, 1)
    if mask.keep is not None:
        kept = split_keep(mask.keep, grid)[1][:, None, :, None].to(cells.dtype)
        cells = cells.masked_fill(kept == 0, 0.0)

    def means(x: Tensor) -> Tensor:
        y = F.avg_pool2d(x.mT.flatten(0, 1).unflatten(-1, (grid.height, grid.width)), stride, ceil_mode=True)
        return y.unflatten(0, x.shape[:2]).flatten(3).mT

    total, count = means(cells), means(kept)
    real = count > 0
    return total / count.masked_fill(~real, 1.0), real[:, 0, :, 0]
