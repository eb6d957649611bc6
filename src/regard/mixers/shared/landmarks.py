"""Landmarks: a few queries that represent all queries, by default averages over windows of the grid.

Adaptive windows are those of `adaptive_avg_pool2d`: row i of m_h rows averages floor(i h / m_h) to
ceil((i + 1) h / m_h) - 1, so that windows overlap where m_h does not divide h. Windows of a partition end at
floor((i + 1) h / m_h) - 1 and do not overlap. Class and register tokens are not pooled.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import ConfigError, Cost, Grid, GridError, Site, only_kept, operator_function
from regard.core.validation import is_whole, plain_number, shown

from .native import runs_native
from .pool_native import pool_native

Windows = int | tuple[int, int]
POLICIES = ("adaptive", "partition")


def landmark_count(m: Windows) -> int:
    """The number of landmarks of m, a number or (rows, columns). Raises: ConfigError unless all are at least 1."""
    sides = m if isinstance(m, tuple) else (m,)
    if min(sides) < 1:
        raise ConfigError(f"m is at least 1, a number or (rows, columns), not {m}")
    return math.prod(sides)


def landmark_windows(grid: Grid, m: Windows) -> tuple[int, int]:
    """m as (rows, columns) of windows of the grid; a pair is checked, a number is factored by `Grid.factor`.

    Raises: GridError if the grid has fewer rows or columns; ConfigError for a tuple that is no pair of whole numbers.
    """
    if not isinstance(m, tuple):
        return grid.factor(m)
    sides = plain_number(m)
    if len(sides) != 2 or not all(map(is_whole, sides)):
        raise ConfigError(f"m is a whole number or (rows, columns), not {shown(m)}")
    rows, columns = sides
    if not (1 <= rows <= grid.height and 1 <= columns <= grid.width):
        h, w = min(max(rows, 1), grid.height), min(max(columns, 1), grid.width)
        raise GridError(f"{rows}x{columns} landmarks cannot be laid on {grid}; nearest possible: {h}x{w}")
    return rows, columns


def pool_matrix(
    grid: Grid,
    m: Windows,
    *,
    start: int | None = None,
    policy: str = "adaptive",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Float[Tensor, "m N"]:
    """The averages as a matrix over all tokens: rows sum to 1, columns of prefix and suffix tokens are 0.

    start: the first token of the image, None = after the prefix. policy: "adaptive" or "partition" windows.
    Raises: GridError and ConfigError as `pool_landmarks`.
    """
    first, rows, columns = _placed(grid, m, start, policy)
    vertical, horizontal = (
        _averages(size, number, policy, dtype, device) for size, number in ((grid.height, rows), (grid.width, columns))
    )
    return F.pad(torch.kron(vertical, horizontal), (first, grid.extra - first))


@dataclass(frozen=True)
class PooledQueries:
    """Landmarks that are `pool_landmarks` of the queries, as the other arguments of it: nothing is computed yet.

    Given to `mita` instead of landmarks, a compiled kernel pools them itself, with less time and memory.
    """

    grid: Grid
    m: Windows
    start: int | None = None
    policy: str = "adaptive"

    def of(self, q: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H m d"]:
        """The landmarks. Raises: GridError and ConfigError as `pool_landmarks`."""
        return pool_landmarks(q, self.grid, self.m, start=self.start, policy=self.policy)

    def windows(self) -> list[int]:
        """The windows for `pool_native`. Raises: GridError and ConfigError as `pool_landmarks`."""
        grid, (first, rows, columns) = self.grid, _placed(self.grid, self.m, self.start, self.policy)
        edges = (*_edges(grid.height, rows, self.policy), *_edges(grid.width, columns, self.policy))
        return [first, grid.width, rows, columns, *edges]


@operator_function
def pool_landmarks(
    x: Float[Tensor, "B H N d"],
    grid: Grid,
    m: Windows,
    *,
    keep: Bool[Tensor, "B N"] | None = None,
    start: int | None = None,
    policy: str = "adaptive",
) -> Float[Tensor, "B H m d"]:
    """Average the patch tokens of x over m windows, a number or (rows, columns).

    keep: tokens that count; a window without any gives zeros. start: the first token of the image, None = after the
    prefix (0 as in MiTA's published code, which takes the class token for the first patch token). policy: "adaptive"
    windows overlap where they do not divide the grid, those of a "partition" do not.
    Raises: GridError if x does not fit the grid, the grid cannot be divided into m windows (with the nearest m), or no
    image starts at this token; ConfigError for values of another kind.
    """
    grid.check(x)
    first, rows, columns = _placed(grid, m, start, policy)
    if keep is not None:
        x = only_kept(x, keep)
        matrix = pool_matrix(grid, m, start=start, policy=policy, dtype=x.dtype, device=x.device)
        matrix = matrix * keep[:, None, :].to(x.dtype)
        return (matrix / matrix.sum(-1, keepdim=True).clamp_min(1e-6))[:, None] @ x
    if runs_native("pool_landmarks", "auto", x):
        return cast(Tensor, pool_native(x, PooledQueries(grid, m, start, policy).windows()))
    cells = x[..., first : first + grid.cells, :]
    if grid.height % rows == 0 and grid.width % columns == 0:
        bands = cells.unflatten(-2, (rows, grid.height // rows, grid.width)).mean(-3)  # long rows first: faster
        return bands.unflatten(-2, (columns, grid.width // columns)).mean(-2).flatten(-3, -2)
    if policy == "partition":
        bands = _parts(cells.unflatten(-2, (grid.height, grid.width)), -3, rows)
        return _parts(bands, -2, columns).flatten(-3, -2)
    if torch.are_deterministic_algorithms_enabled():  # the backward of adaptive pooling is not, on CUDA
        return pool_matrix(grid, m, start=start, dtype=x.dtype, device=x.device) @ x
    image = cells.mT.unflatten(-1, (grid.height, grid.width)).flatten(0, 1)
    return F.adaptive_avg_pool2d(image, (rows, columns)).flatten(-2).mT.unflatten(0, x.shape[:2])


def nonempty_landmarks(
    grid: Grid, m: Windows, keep: Bool[Tensor, "B N"], start: int | None = None, policy: str = "adaptive"
) -> Bool[Tensor, "B m"]:
    """True for landmarks whose window has at least one token that is kept."""
    matrix = pool_matrix(grid, m, start=start, policy=policy, device=keep.device)
    return keep.to(matrix.dtype) @ matrix.mT > 0


def _placed(grid: Grid, m: Windows, start: int | None, policy: str) -> tuple[int, int, int]:
    """The first token of the image, and the rows and columns of windows. Raises: as `pool_landmarks`."""
    if not isinstance(grid, Grid):
        raise ConfigError(f"landmarks are pooled on a Grid, such as Grid(14, 14, prefix=1), not {shown(grid)}")
    if policy not in POLICIES:
        raise ConfigError(f'windows are "adaptive" or a "partition", not {shown(policy)}')
    rows, columns = landmark_windows(grid, m)
    if start is None:
        return grid.prefix, rows, columns
    if type(start) is not int or not 0 <= start <= grid.extra:
        raise GridError(f"the image of {grid} can start at token 0 to {grid.extra}, not {shown(start)}")
    return start, rows, columns


def _edges(size: int, windows: int, policy: str) -> list[int]:
    """Begin and end of each window of an axis, one after the other."""
    inside = 0 if policy == "partition" else windows - 1  # adaptive windows end at the next whole number
    return [edge for i in range(windows) for edge in (i * size // windows, ((i + 1) * size + inside) // windows)]


def _averages(size: int, windows: int, policy: str, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """(windows, size): row i averages floor(i size / windows) to the end of its window."""
    number = torch.arange(windows, device=device)[:, None]
    index = torch.arange(size, device=device)
    ends = (number + 1) * size // windows if policy == "partition" else -((number + 1) * size // -windows)
    inside = (index >= number * size // windows) & (index < ends)
    return inside.to(dtype) / inside.sum(-1, keepdim=True).to(dtype)


def _parts(x: Tensor, axis: int, windows: int) -> Tensor:
    """Means over parts of an axis that do not overlap."""
    size = x.shape[axis]
    edges = [i * size // windows for i in range(windows + 1)]
    lengths = [end - begin for begin, end in zip(edges, edges[1:], strict=False)]
    return torch.stack([part.mean(axis) for part in x.split(lengths, axis)], axis)


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

    def pooled(self, grid: Grid) -> PooledQueries | None:
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

    def pooled(self, grid: Grid) -> PooledQueries:
        start = 0 if self.options.preset == "official" else None
        return PooledQueries(self.surface(grid), self.options.m, start, self.options.windows)

    def forward(self, q: Tensor, grid: Grid, keep: Tensor | None = None) -> Landmarks:
        pooled = self.pooled(grid)
        if keep is None:
            return pooled.of(q), None
        surface, m, start, policy = pooled.grid, pooled.m, pooled.start, pooled.policy
        landmarks = pool_landmarks(q, surface, m, keep=keep, start=start, policy=policy)
        return landmarks, nonempty_landmarks(surface, m, keep, start, policy)


class Avg1d(Avg2d):
    """Averages over runs of patch tokens in row-major order."""

    @staticmethod
    def surface(grid: Grid) -> Grid:
        return Grid(1, grid.cells, grid.prefix, grid.suffix)


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


def _pseudo_random(number: int, device: torch.device) -> Tensor:
    """Fixed numbers in [0, 1): a hash of the index."""
    x = torch.arange(1, number + 1, device=device)
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % (1 << 32)
    return (x ^ (x >> 16)).double() / 2.0**32


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
        if grid.height != self.rows or grid.width != self.columns:
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
    """Strides and kernels (rows, columns) of a convolution whose outputs are the windows."""
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
        cluster_of, sizes = merge_tokens(cells.mean(1), self.options.number, kept)
        total = cells.new_zeros(*cells.shape[:2], self.options.number, cells.shape[-1])
        total = total.scatter_add(2, cluster_of[:, None, :, None].expand_as(cells), cells)
        landmarks = total / sizes.to(q.dtype).clamp_min(1.0)[:, None, :, None]
        return landmarks, None if keep is None else sizes > 0


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
    "avg2d": Avg2d,
    "avg1d": Avg1d,
    "random": RandomTokens,
    "learned": Learned,
    "conv": FullConv,
    "dwconv": DepthwiseConv,
    "tome": ToMe,
}
