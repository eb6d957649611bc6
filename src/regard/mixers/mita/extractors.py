"""How MiTA's landmarks come from the queries: averages, drawn tokens, learned vectors, convolutions, merged tokens."""

import math
import warnings
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import Cost, Grid, GridError, Site, only_kept
from regard.mixers.shared.landmarks import PooledQueries, Windows, landmark_windows, nonempty_landmarks, pool_landmarks
from regard.mixers.shared.precision import finest, upcast

Landmarks = tuple[Tensor, Tensor | None]
"""Landmarks (B, H, m, d); True for those with at least one token, (B, m), or None without a mask."""


@runtime_checkable
class LandmarkOptions(Protocol):
    """The fields that an extractor uses. m: a number or windows; preset: "official" pools from token 0."""

    @property
    def m(self) -> Windows: ...
    @property
    def number(self) -> int: ...
    @property
    def windows(self) -> str: ...
    @property
    def preset(self) -> str: ...


class Extractor(nn.Module):
    """Computes landmarks from queries. learned: whether it has parameters. Built for a site, called with any grid."""

    learned: ClassVar[bool] = False

    def __init__(self, options: LandmarkOptions, site: Site) -> None:
        super().__init__()
        self.options = options

    @classmethod
    def check(cls, options: LandmarkOptions, grid: Grid) -> None:
        """Called before building. Raises: GridError if the grid is too small for the landmarks."""
        landmark_windows(grid, options.m)

    def pooled_queries(self, grid: Grid) -> PooledQueries | None:
        """The landmarks of queries without padding as a description, if they are averages; else None."""
        return None

    @classmethod
    def cost(cls, options: LandmarkOptions, site: Site) -> Cost:
        """Parameters and products; averages are sums, which are not counted."""
        return Cost()

    def forward(self, q: Float[Tensor, "B H N d"], grid: Grid, keep: Bool[Tensor, "B N"] | None = None) -> Landmarks:
        """The landmarks; keep: False for tokens that are not used."""
        raise NotImplementedError


class Avg2d(Extractor):
    """Averages over windows of the image."""

    @staticmethod
    def surface(grid: Grid) -> Grid:
        """The grid whose windows are averaged."""
        return grid

    @classmethod
    def check(cls, options: LandmarkOptions, grid: Grid) -> None:
        landmark_windows(cls.surface(grid), options.m)

    def pooled_queries(self, grid: Grid) -> PooledQueries:
        start = 0 if self.options.preset == "official" else None
        return PooledQueries(self.surface(grid), self.options.m, start, self.options.windows)

    def forward(self, q: Tensor, grid: Grid, keep: Tensor | None = None) -> Landmarks:
        pooled = self.pooled_queries(grid)
        if keep is None:
            return pooled.of(q), None
        surface, m, start, policy = pooled.grid, pooled.m, pooled.start, pooled.policy
        landmarks = pool_landmarks(q, surface, m, keep=keep, start=start, policy=policy)
        return landmarks, nonempty_landmarks(surface, m, keep, start, policy)


class Avg1d(Avg2d):
    """Averages over runs of patch tokens in row-major order."""

    @staticmethod
    def surface(grid: Grid) -> Grid:
        return grid.row_major()


class RandomTokens(Extractor):
    """Queries of distinct patch tokens: random in each forward pass of training, fixed in evaluation."""

    @classmethod
    def check(cls, options: LandmarkOptions, grid: Grid) -> None:
        if options.number > grid.cells:
            raise GridError(f"{options.number} landmarks cannot be drawn from {grid}; choose at most {grid.cells}")

    def forward(self, q: Tensor, grid: Grid, keep: Tensor | None = None) -> Landmarks:
        grid.check(q)
        self.check(self.options, grid)
        q = only_kept(q, keep)
        noise = torch.rand(grid.cells, device=q.device) if self.training else _pseudo_random(grid.cells, q.device)
        noise = noise[None]
        if keep is not None:
            noise = torch.where(keep[:, grid.span], noise, 2.0)
        cells = noise.argsort(-1)[:, : self.options.number]  # (1 | B, m)
        index = (cells + grid.prefix).expand(q.shape[0], -1)
        landmarks = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1]))
        return landmarks, None if keep is None else keep.gather(1, index)


def warn_of_strips(m: int, grid: Grid) -> None:
    """Warn of landmarks that average strips more than twice as long as wide."""
    counts = landmark_windows(grid, m)
    windows = [side / count for side, count in zip(grid.sides, counts, strict=True)]
    longest, shortest = max(windows[-2:]), min(windows[-2:])  # a frame is no longer or shorter than a row
    if min(grid.height, grid.width) > 1 and longest > 2 * shortest:
        warnings.warn(
            f"m={m} on {grid} gives {'x'.join(map(str, counts))} landmarks, averages over strips of "
            f"{' x '.join(f'{side:.3g}' for side in windows)} cells; take a number with factors nearer to the "
            f"grid's sides, or write m={counts} if strips are meant",
            stacklevel=3,
        )


def _pseudo_random(number: int, device: torch.device) -> Tensor:
    """Fixed numbers in [0, 1): a hash of the index."""
    x = torch.arange(1, number + 1, device=device)
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % (1 << 32)
    return (x ^ (x >> 16)).to(finest(device)) / 2.0**32


class Learned(Extractor):
    """m learned queries per head, landmarks (H, m, d), the same for every image; initially truncated normal, 0.02."""

    learned = True

    def __init__(self, options: LandmarkOptions, site: Site) -> None:
        super().__init__(options, site)
        self.landmarks = nn.Parameter(torch.empty(site.heads, options.number, site.width))
        self.reset_parameters()

    @classmethod
    def check(cls, options: LandmarkOptions, grid: Grid) -> None:
        """No grid is too small."""

    def reset_parameters(self) -> None:
        """Draw new landmarks."""
        nn.init.trunc_normal_(self.landmarks, std=0.02)

    @classmethod
    def cost(cls, options: LandmarkOptions, site: Site) -> Cost:
        return Cost(options.number * site.inner, 0)

    def forward(self, q: Tensor, grid: Grid, keep: Tensor | None = None) -> Landmarks:
        return self.landmarks.to(q.dtype).repeat(q.shape[0], 1, 1, 1), None


class DepthwiseConv(Extractor):
    """A convolution of the queries' map with stride floor(h / m_h) and kernel h - (m_h - 1) stride.

    weight (C, 1 or C, kernel), bias (C,); it starts as the mean over its window. Works on the build grid only.
    Masked tokens count as 0, and the result is divided by the share of tokens that are kept.
    """

    learned = True

    def __init__(self, options: LandmarkOptions, site: Site) -> None:
        super().__init__(options, site)
        self.rows, self.columns = site.grid.height, site.grid.width
        self.stride, self.kernel = _strides(site.grid, options.m)
        self.weight = nn.Parameter(torch.empty(site.inner, self.depth(site), *self.kernel))
        self.bias = nn.Parameter(torch.empty(site.inner))
        self.reset_parameters()

    @staticmethod
    def depth(site: Site) -> int:
        """Input channels of one filter."""
        return 1

    def reset_parameters(self) -> None:
        """The mean of each channel's window; not random."""
        with torch.no_grad():
            channels, depth = self.weight.shape[:2]
            identity = torch.eye(channels) if depth > 1 else torch.ones(channels, 1)
            self.weight.copy_((identity / math.prod(self.kernel))[:, :, None, None].expand_as(self.weight))
            self.bias.zero_()

    @classmethod
    def cost(cls, options: LandmarkOptions, site: Site) -> Cost:
        _, kernel = _strides(site.grid, options.m)
        filters = site.inner * cls.depth(site) * math.prod(kernel)
        return Cost(filters + site.inner, options.number * filters)

    def forward(self, q: Tensor, grid: Grid, keep: Tensor | None = None) -> Landmarks:
        grid.check(q)
        if grid.sides != (self.rows, self.columns):
            raise GridError(
                f"convolved landmarks were built for {self.rows}x{self.columns} cells, not for {grid}; "
                'build the layer for this grid, or choose landmarks="avg2d"'
            )
        b, h, _, d = q.shape
        image = only_kept(q, keep)[:, :, grid.span].mT.reshape(b, h * d, grid.height, grid.width)
        share = None
        if keep is not None:
            kept = keep[:, None, grid.span].to(q.dtype).unflatten(-1, (grid.height, grid.width))
            share = F.avg_pool2d(kept, self.kernel, self.stride)
        weight = self.weight.to(q.dtype)
        out = F.conv2d(image, weight, None, self.stride, groups=h * d // weight.shape[1])
        if share is not None:
            out = out / share.clamp_min(1e-6)
        out = out + self.bias.to(q.dtype)[:, None, None]
        landmarks = out.flatten(-2).mT.unflatten(-1, (h, d)).transpose(1, 2)
        return landmarks, None if share is None else share.flatten(1) > 0


class FullConv(DepthwiseConv):
    """The same convolution with filters over all channels of all heads."""

    @staticmethod
    def depth(site: Site) -> int:
        return site.inner


def _strides(grid: Grid, m: Windows) -> tuple[tuple[int, int], tuple[int, int]]:
    """Strides and kernels (rows, columns) of a convolution whose outputs are the windows. Raises: GridError."""
    if grid.depth > 1:
        raise GridError(f'convolved landmarks are of one image, not of {grid}; choose landmarks="avg2d"')
    sizes = list(zip((grid.height, grid.width), landmark_windows(grid, m), strict=True))
    strides = [size // number for size, number in sizes]
    kernels = [size - (number - 1) * stride for (size, number), stride in zip(sizes, strides, strict=True)]
    return (strides[0], strides[1]), (kernels[0], kernels[1])


class ToMe(Extractor):
    """Queries merged by similarity until m are left (Bolya et al. 2023): a landmark is the mean of its members.

    In each round every second token is paired with the most similar of the others, by the mean of its heads, and the
    most similar pairs merge. All heads share the merges, which have no gradient.
    """

    @classmethod
    def check(cls, options: LandmarkOptions, grid: Grid) -> None:
        if options.number > grid.cells:
            raise GridError(f"{options.number} landmarks cannot be merged from {grid}; choose at most {grid.cells}")

    @classmethod
    def cost(cls, options: LandmarkOptions, site: Site) -> Cost:
        number, products = site.grid.cells, 0
        while number > options.number:
            products += (number - number // 2) * (number // 2)
            number -= min(number - options.number, number // 2)
        return Cost(0, products * site.width)

    def forward(self, q: Tensor, grid: Grid, keep: Tensor | None = None) -> Landmarks:
        grid.check(q)
        self.check(self.options, grid)
        cells = only_kept(q, keep)[:, :, grid.span]
        kept = None if keep is None else keep[:, grid.span]
        cluster_of, sizes = merge_tokens(upcast(cells).mean(1), self.options.number, kept)
        wide = upcast(cells)  # a sum of many cells may exceed float16
        total = wide.new_zeros(*cells.shape[:2], self.options.number, cells.shape[-1])
        total = total.scatter_add(2, cluster_of[:, None, :, None].expand_as(cells), wide)
        landmarks = total / sizes.to(wide.dtype).clamp_min(1.0)[:, None, :, None]
        return landmarks.to(q.dtype), None if keep is None else sizes > 0


@torch.no_grad()
def merge_tokens(
    x: Float[Tensor, "B n d"], clusters: int, keep: Bool[Tensor, "B n"] | None = None
) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B m"]]:
    """Bipartite matching until `clusters` are left: the cluster of each token, and the number of tokens in each.

    keep: tokens that count; the others merge first, with weight 0. Scores are in float32 at least.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    sizes = x.new_ones(x.shape[:2]) if keep is None else keep.to(x.dtype)
    sums = x if keep is None else x.masked_fill(~keep[..., None], 0.0)
    cluster_of = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    while (number := sums.shape[1]) > clusters:
        unit = F.normalize(sums, dim=-1)
        scores = unit[:, ::2] @ unit[:, 1::2].mT
        scores = scores.masked_fill(sizes[:, None, 1::2] == 0, -2.0).masked_fill(sizes[:, ::2, None] == 0, 2.0)
        best = scores.max(-1)
        order = best.values.argsort(-1, descending=True)
        merged = min(number - clusters, number // 2)
        stay = order.shape[1] - merged
        unmerged = torch.arange(stay, device=x.device).expand(x.shape[0], -1)
        even = torch.cat([stay + best.indices.gather(1, order[:, :merged]), unmerged], 1)
        even = torch.empty_like(order).scatter(1, order, even)
        odd = torch.arange(stay, stay + number // 2, device=x.device).expand(x.shape[0], -1)
        cluster = order.new_empty(x.shape[0], number)
        cluster[:, ::2], cluster[:, 1::2] = even, odd
        cluster_of = cluster.gather(1, cluster_of)
        remain = number - merged
        sums = sums.new_zeros(x.shape[0], remain, x.shape[-1]).scatter_add(1, cluster[..., None].expand_as(sums), sums)
        sizes = sizes.new_zeros(x.shape[0], remain).scatter_add(1, cluster, sizes)
    return cluster_of, sizes


EXTRACTORS: dict[str, type[Extractor]] = {
    "avg2d": Avg2d, "avg1d": Avg1d, "random": RandomTokens, "learned": Learned, "conv": FullConv,
    "dwconv": DepthwiseConv, "tome": ToMe,
}  # fmt: skip
