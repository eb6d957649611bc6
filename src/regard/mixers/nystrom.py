"""Nystrom attention: softmax attention through landmarks and a pseudo-inverse (Xiong et al. 2021, Eq. 13-14).

softmax(q b^T) pinv(softmax(a b^T)) softmax(a k^T) v, a and b means of queries and of keys; logits are scaled by d^-0.5.
The pseudo-inverse is iterated, Z <- Z (13 - AZ (15 - AZ (7 - AZ))) / 4, from A^T / (|A|_1 |A|_inf) of each matrix by
itself; published code takes the norms' maximum over the batch, so that an image's output depends on its neighbours.
Extra tokens are queries and keys like any other; segments hold them, windows of the grid leave them out.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Contract,
    Cost,
    Grid,
    Mask,
    Operator,
    ShapeError,
    Site,
    attend,
    only_kept,
    softmax_rows,
)
from regard.mixers.shared.heads import CrossMixer, HeadMixer, HeadMixerConfig, check_heads
from regard.mixers.shared.kernel_features import LocalMixer, check_kernel, check_kernel_size, refuse_cross
from regard.mixers.shared.landmarks import number_of, pool_landmarks, seen, windows_of
from regard.mixers.shared.low_rank import read
from regard.mixers.shared.precision import exact_products, wide

__all__ = ["Nystrom", "nystrom", "nystrom_reference"]

STARTS = ("matrix", "batch")


def nystrom_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    landmarks_q: Float[Tensor, "B H m d"],
    landmarks_k: Float[Tensor, "B H m d"],
    *,
    iterations: int | None = 6,
    scale: float | None = None,
    start: str = "matrix",
    mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
) -> Float[Tensor, "B H N e"]:
    """softmax(q b^T) pinv(softmax(a b^T)) softmax(a k^T), an N x M matrix, times v."""
    keep = check_kernel("nystrom", q, k, v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def weights(rows: Tensor, columns: Tensor, shown: Tensor | None) -> Tensor:
        logits = rows @ columns.mT * scale
        return softmax_rows(logits if shown is None else logits.masked_fill(~shown[:, None, None, :], -torch.inf))

    middle = weights(landmarks_q, landmarks_k, landmark_keep)
    middle = inverse(only_kept(middle, landmark_keep), iterations, start)
    first, last = weights(q, landmarks_k, landmark_keep), weights(landmarks_q, only_kept(k, keep), keep)
    return first @ (middle @ last) @ only_kept(v, keep)


def nystrom(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    landmarks_q: Float[Tensor, "B H m d"],
    landmarks_k: Float[Tensor, "B H m d"],
    *,
    iterations: int | None = 6,
    scale: float | None = None,
    start: str = "matrix",
    mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
) -> Float[Tensor, "B H N e"]:
    """The same, from right to left in linear time.

    iterations: of the pseudo-inverse; None computes it exactly (slow). Only then do rows sum to 1. scale: None =
    d^-0.5. start: "matrix", or "batch" as published code does. mask: padding only. landmark_keep: False for landmarks
    that must not be used. The pseudo-inverse is in float32 for half precision.
    Raises: ShapeError for tensors that do not fit, UnsupportedError for other masks, ConfigError for an unknown start.
    """
    keep = check_kernel("nystrom", q, k, v, mask)
    check_heads("nystrom", q=q, landmarks_q=landmarks_q, landmarks_k=landmarks_k)
    _check_iterations(iterations, start)
    if landmarks_q.shape != landmarks_k.shape or landmarks_q.shape[-1] != q.shape[-1]:
        shapes = f"{tuple(landmarks_q.shape)} and {tuple(landmarks_k.shape)}"
        raise ShapeError(f"nystrom: landmarks have shapes {shapes}; expected two (batch, heads, m, {q.shape[-1]})")
    with exact_products(q.device):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        added = None if landmark_keep is None else _forbidden(landmark_keep)
        logits = wide(landmarks_q) @ wide(landmarks_k).mT * scale
        middle = logits.softmax(-1) if added is None else softmax_rows(logits + added)
        middle = inverse(only_kept(middle, landmark_keep), iterations, start)
        bias = None if keep is None else _forbidden(keep)
        values = read(landmarks_q, only_kept(k, keep), only_kept(v, keep), scale=scale, bias=bias)
        values = (middle @ wide(values)).to(v.dtype)
        return read(q, landmarks_k, values, scale=scale, bias=added)


def _forbidden(keep: Bool[Tensor, "B M"]) -> Float[Tensor, "B 1 1 M"]:
    """0 for what is kept, -inf for the rest."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, -torch.inf)[:, None, None, :]


def inverse(a: Float[Tensor, "B H m m"], iterations: int | None, start: str = "matrix") -> Float[Tensor, "B H m m"]:
    """The pseudo-inverse of matrices that are not negative, iterated or (None) exact; 0 of a matrix of zeros."""
    if iterations is None:
        return torch.linalg.pinv(a)
    columns, rows = a.sum(-2).amax(-1), a.sum(-1).amax(-1)  # |A|_1 and |A|_inf
    if start == "batch":
        columns, rows = columns.amax(), rows.amax()
    norms = columns * rows
    z = a.mT / norms.masked_fill(norms == 0, 1.0)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def segment_means(
    x: Float[Tensor, "B H N d"], m: int, keep: Bool[Tensor, "B N"] | None = None
) -> tuple[Float[Tensor, "B H m d"], Bool[Tensor, "B m"] | None]:
    """Means of m segments of the sequence, the first ones shorter by a token where m does not divide N.

    keep: tokens that count. The second result says which segments have any; None without `keep`.
    Raises: ShapeError if there are more segments than tokens.
    """
    tokens = x.shape[-2]
    if not 1 <= m <= tokens:
        raise ShapeError(f"{m} segments of {tokens} tokens; choose between 1 and {tokens}")
    short, longer = tokens // m, tokens % m
    cut = (m - longer) * short
    if keep is None:
        parts = [x[..., :cut, :].unflatten(-2, (m - longer, short)).mean(-2)]
        if longer:
            parts.append(x[..., cut:, :].unflatten(-2, (longer, short + 1)).mean(-2))
        return torch.cat(parts, -2), None
    place = torch.arange(tokens, device=x.device)
    segment = torch.where(place < cut, place // short, m - longer + (place - cut) // (short + 1))
    member = (segment == torch.arange(m, device=x.device)[:, None]) & keep[:, None, :]  # (B, m, N)
    count = member.sum(-1)
    means = member.to(x.dtype)[:, None] @ only_kept(x, keep) / count.clamp_min(1).to(x.dtype)[:, None, :, None]
    return means, count > 0


@dataclass(frozen=True, kw_only=True)
class Nystrom(HeadMixerConfig):
    """m: landmarks; a number, or (rows, columns) of windows. landmarks: "segments" are means of stretches of the whole
    sequence, as in the paper; "avg2d" averages windows of the grid.

    iterations: of the pseudo-inverse, the paper's 6; None computes it exactly. start: "matrix", or "batch" as published
    code does (an image's output then depends on its neighbours). kernel: of the paper's convolution of the values along
    the sequence, one for each head, 33 there; 0 = none.
    """

    m: int | tuple[int, int] = 64
    landmarks: Literal["segments", "avg2d"] = "segments"
    iterations: int | None = 6
    start: Literal["matrix", "batch"] = "matrix"
    kernel: int = 0

    card: ClassVar[Card] = Card(
        title="Nystrom attention",
        source="Xiong et al. 2021 (Nystromformer), Eq. 13-14",
        formula="softmax(q b^T) pinv(softmax(a b^T)) softmax(a k^T) v,  a, b = means of q, k",
        complexity="O(N m C + m^3)",
        query_content=True,
        key_content=True,
        dynamic="two-step",
        scaling=frozenset({"compression"}),
        expert_type="MLP of width m + inverse",
        expert_count="1",
        construction="landmark probing",
        topology="all-to-one",
        conditions="Q, K, V",
        prefix="like any other token; in the landmarks of segments, not in those of windows",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"padding"})
    cross: ClassVar[bool] = True
    samples: ClassVar[tuple[str, ...]] = (
        "Nystrom(m=4)",
        'Nystrom(m=(1, 3), landmarks="avg2d", iterations=4, kernel=5)',
    )

    @property
    def contract(self) -> Contract:
        skip = {"cross": "the convolution needs one sequence"} if self.kernel else {}
        if self.start == "matrix":
            reason = "the inverse of an image begins with the largest sum of the batch"
            skip |= {"batch": reason, "images": reason}
        return Contract(skip=skip)

    def __post_init__(self) -> None:
        super().__post_init__()
        number_of(self.m)  # refuses what is below 1
        if self.landmarks == "segments" and isinstance(self.m, tuple):
            raise ConfigError(f"segments are a number, not {self.m}; windows need landmarks='avg2d'")
        _check_iterations(self.iterations, self.start)
        check_kernel_size("Nystrom", "kernel", self.kernel)

    @property
    def number(self) -> int:
        """How many landmarks."""
        return number_of(self.m)

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        if self.kernel:
            return LocalMixer(self, site, shared, SequenceConv(site.heads, self.kernel))
        return super().build(site, shared)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> CrossMixer:
        if self.kernel:
            raise refuse_cross("Nystrom", "kernel")
        return super().build_cross(site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        local = Cost(site.heads * self.kernel, site.grid.tokens * site.inner * self.kernel)
        return super().cost(site, accounting) + local

    def operator(self, site: Site) -> "NystromOperator":
        for grid in {site.grid, site.memory or site.grid}:
            if self.landmarks == "avg2d":
                windows_of(grid, self.m)
            elif self.number > grid.tokens:
                where = f" of {site.name}" if site.name else ""
                raise ConfigError(
                    f"m={self.m}, but the site{where} has {grid.tokens} tokens; choose m between 1 and {grid.tokens}"
                )
        return NystromOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The iterations' 4 products of m x m matrices each; the exact pseudo-inverse is not counted."""
        n, keys, m = site.grid.tokens, (site.memory or site.grid).tokens, self.number
        total = attend(n, m, site.inner) + attend(m, keys, site.inner) + attend(m, m, site.inner)
        return total + Cost(0, 4 * (self.iterations or 0) * m**3 * site.heads)


class SequenceConv(nn.Conv2d):
    """A convolution of the values along the tokens, one kernel for each head, without bias."""

    def __init__(self, heads: int, kernel: int) -> None:
        super().__init__(heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False)

    def forward(self, v: Float[Tensor, "B H N d"], grid: Grid) -> Float[Tensor, "B H N d"]:  # type: ignore[override]
        """All tokens, in their order."""
        return super().forward(v)


class NystromOperator(Operator):
    """No parameters."""

    def __init__(self, config: Nystrom) -> None:
        super().__init__()
        self.config = config

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
        options = self._options(q, k, grid, memory, mask)
        return nystrom(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v), mask=mask, **options)

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
        options = self._options(q, k, grid, memory, mask)
        return nystrom_reference(cast(Tensor, q), cast(Tensor, k), cast(Tensor, v), mask=mask, **options)

    def _options(self, q: Tensor | None, k: Tensor | None, grid: Grid, memory: Grid | None, mask: Mask | None) -> dict:
        """Padding is of the keys; it concerns the queries' landmarks only if queries are the same tokens."""
        keep = mask.keep if mask is not None else None
        a, a_keep = self._pooled(cast(Tensor, q), grid, keep if memory is None else None)
        b, b_keep = self._pooled(cast(Tensor, k), memory or grid, keep)
        both = b_keep if a_keep is None or b_keep is None else a_keep & b_keep
        config = self.config
        return {
            "landmarks_q": a,
            "landmarks_k": b,
            "iterations": config.iterations,
            "start": config.start,
            "landmark_keep": both,
        }

    def _pooled(
        self, x: Tensor, grid: Grid, keep: Bool[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B H m d"], Bool[Tensor, "B m"] | None]:
        m = self.config.m
        if self.config.landmarks == "segments":
            return segment_means(x, self.config.number, keep)
        return pool_landmarks(x, grid, m, keep=keep), None if keep is None else seen(grid, m, keep)


def _check_iterations(iterations: int | None, start: str) -> None:
    if iterations is not None and iterations < 1:
        raise ConfigError(f"iterations is at least 1, or None for the exact pseudo-inverse, not {iterations}")
    if start not in STARTS:
        raise ConfigError(f"start is matrix or batch, not {start!r}")
