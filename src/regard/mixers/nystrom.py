"""Nystrom attention: softmax attention through landmarks and a pseudo-inverse (Xiong et al. 2021, Eq. 13-14).

softmax(q b^T) pinv(softmax(a b^T)) softmax(a k^T) v, a and b means of queries and of keys; logits are scaled by d^-0.5.
The pseudo-inverse is iterated, Z <- Z (13 - AZ (15 - AZ (7 - AZ))) / 4, from A^T / (|A|_1 |A|_inf) of each matrix
alone; published code takes the maximum of the norms over the batch, so that the output of an image depends on the rest
of its batch.
Prefix and suffix tokens are queries and keys like all others; segments contain them, windows of the grid do not.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Contract, Grid, Inputs, Operator, ShapeError, Site, operator_function
from regard.core.cost import Cost, attention_cost
from regard.core.mask import Mask, only_kept, softmax_rows

from .shared.checks import check_odd_kernel, check_site, padding_only, refuse_unused
from .shared.heads import HeadMixer, HeadMixerConfig
from .shared.kernel_features import LocalMixer
from .shared.landmarks import landmark_count, landmark_windows, nonempty_landmarks, pool_landmarks
from .shared.low_rank import low_rank_attention
from .shared.precision import upcast, without_autocast

__all__ = ["Nystrom", "nystrom", "nystrom_reference"]

STARTS = ("matrix", "batch")


@operator_function
def nystrom_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    landmarks_q: Float[Tensor, "B H m d"], landmarks_k: Float[Tensor, "B H m d"], *, iterations: int | None = 6,
    scale: float | None = None, start: str = "matrix", mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax(q b^T) pinv(softmax(a b^T)) softmax(a k^T), an N x M matrix, times v."""
    keep = padding_only("nystrom", mask).keep
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def weights(rows: Tensor, columns: Tensor, kept: Tensor | None) -> Tensor:
        logits = rows @ columns.mT * scale
        return softmax_rows(logits if kept is None else logits.masked_fill(~kept[:, None, None, :], -torch.inf))

    middle = weights(landmarks_q, landmarks_k, landmark_keep)
    middle = inverse(only_kept(middle, landmark_keep), iterations, start)
    first, last = weights(q, landmarks_k, landmark_keep), weights(landmarks_q, only_kept(k, keep), keep)
    return first @ (middle @ last) @ only_kept(v, keep)


@operator_function
def nystrom(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    landmarks_q: Float[Tensor, "B H m d"], landmarks_k: Float[Tensor, "B H m d"], *, iterations: int | None = 6,
    scale: float | None = None, start: str = "matrix", mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same in linear time, multiplied from right to left.

    iterations: of the pseudo-inverse; None computes it exactly (slow), and only then do rows sum to 1. scale: None =
    d^-0.5. start: "matrix", or "batch" as published code does. mask: padding only. landmark_keep: False for landmarks
    that must not be used. The pseudo-inverse is in float32 for half precision.
    Raises: ShapeError for tensors that do not fit, UnsupportedError for other masks, ConfigError for an unknown start.
    """
    keep = padding_only("nystrom", mask).keep
    _check_iterations(iterations, start)
    if landmarks_q.shape != landmarks_k.shape or landmarks_q.shape[-1] != q.shape[-1]:
        shapes = f"{tuple(landmarks_q.shape)} and {tuple(landmarks_k.shape)}"
        raise ShapeError(f"nystrom: landmarks have shapes {shapes}; expected two (batch, heads, m, {q.shape[-1]})")
    with without_autocast(q.device):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        bias = None if landmark_keep is None else _padding_bias(landmark_keep)
        logits = upcast(landmarks_q) @ upcast(landmarks_k).mT * scale
        middle = logits.softmax(-1) if bias is None else softmax_rows(logits + bias)
        middle = inverse(only_kept(middle, landmark_keep), iterations, start)
        key_bias = None if keep is None else _padding_bias(keep)
        values = low_rank_attention(landmarks_q, only_kept(k, keep), only_kept(v, keep), scale=scale, bias=key_bias)
        values = (middle @ upcast(values)).to(v.dtype)
        return low_rank_attention(q, landmarks_k, values, scale=scale, bias=bias)


def _padding_bias(keep: Bool[Tensor, "B M"]) -> Float[Tensor, "B 1 1 M"]:
    """0 for tokens that are kept, -inf for the others."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, -torch.inf)[:, None, None, :]


def inverse(a: Float[Tensor, "B H m m"], iterations: int | None, start: str = "matrix") -> Float[Tensor, "B H m m"]:
    """The pseudo-inverse of matrices without negative entries, iterated or (None) exact; 0 for a zero matrix."""
    if iterations is None:
        return torch.linalg.pinv(a)
    columns, rows = a.sum(-2).amax(-1), a.sum(-1).amax(-1)  # |A|_1 and |A|_inf
    if start == "batch" and a.numel():
        columns, rows = columns.amax(), rows.amax()
    norms = columns * rows
    z = (a.mT / norms.masked_fill(norms == 0, 1.0)[..., None, None]).flatten(0, 1)
    matrices = a.flatten(0, 1)
    for _ in range(iterations):  # z (13 - az (15 - az (7 - az))) / 4
        az = matrices @ z
        inner = torch.baddbmm(az, az, az, beta=7, alpha=-1)
        inner = torch.baddbmm(az, az, inner, beta=15, alpha=-1)
        z = torch.baddbmm(z, z, inner, beta=3.25, alpha=-0.25)
    return z.view(a.shape)


def segment_means(
    x: Float[Tensor, "B H N d"], m: int, keep: Bool[Tensor, "B N"] | None = None
) -> tuple[Float[Tensor, "B H m d"], Bool[Tensor, "B m"] | None]:
    """Means of m segments of the sequence, the first ones shorter by a token where m does not divide N.

    keep: tokens that count. The second result is True for segments that have any; None without `keep`.
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
    index = torch.arange(tokens, device=x.device)
    segment = torch.where(index < cut, index // short, m - longer + (index - cut) // (short + 1))
    member = (segment == torch.arange(m, device=x.device)[:, None]) & keep[:, None, :]  # (B, m, N)
    count = member.sum(-1)
    means = member.to(x.dtype)[:, None] @ only_kept(x, keep) / count.clamp_min(1).to(x.dtype)[:, None, :, None]
    return means, count > 0


@dataclass(frozen=True, kw_only=True)
class Nystrom(HeadMixerConfig):
    """m: landmarks; a number, or (rows, columns) of windows. landmarks: "segments" are means of runs of the whole
    sequence, as in the paper; "avg2d" averages windows of the grid.

    iterations: of the pseudo-inverse, the paper's 6; None computes it exactly. start: "matrix", or "batch" as in the
    published code (the output of an image then depends on its batch). kernel: of the paper's convolution of the values
    along the sequence, one for each head (33 in the paper); 0 = none.
    """

    m: int | tuple[int, int] | tuple[int, int, int] = 64
    landmarks: Literal["segments", "avg2d"] = "segments"
    iterations: int | None = 6
    start: Literal["matrix", "batch"] = "matrix"
    kernel: int = 0

    card = Card(
        title="Nystrom attention", source="Xiong et al. 2021 (Nystromformer), Eq. 13-14",
        formula="softmax(q b^T) pinv(softmax(a b^T)) softmax(a k^T) v,  a, b = means of q, k",
        complexity="O(N m C + m^3)", query_content=True, key_content=True, dynamic="two-step",
        scaling=frozenset({"compression"}), expert_type="MLP of width m + inverse", expert_count="1",
        construction="landmark probing", topology="all-to-one", conditions="Q, K, V",
        prefix="like all tokens; in the landmarks of segments, not in those of windows",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    cross = True
    samples = (
        "Nystrom(m=4)", 'Nystrom(m=(1, 3), landmarks="avg2d", iterations=4, kernel=5)', 'Nystrom(m=4, start="batch")',
    )  # fmt: skip

    @property
    def contract(self) -> Contract:
        common = super().contract
        if self.start != "batch":
            return common
        reason = "the pseudo-inverse starts from the largest sums of the whole batch"
        return replace(common, skip={**common.skip, "batch": reason, "images": reason})

    def __post_init__(self) -> None:
        super().__post_init__()
        landmark_count(self.m)  # refuses numbers below 1
        if self.landmarks == "segments" and isinstance(self.m, tuple):
            raise ConfigError(f"segments are a number, not {self.m}; windows need landmarks='avg2d'")
        _check_iterations(self.iterations, self.start)
        if self.iterations is None:
            refuse_unused(self, ["start"], "iterations, not to the exact pseudo-inverse")
        check_odd_kernel("Nystrom", "kernel", self.kernel)

    @property
    def number(self) -> int:
        """The number of landmarks."""
        return landmark_count(self.m)

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        if self.kernel:
            return LocalMixer(self, site, shared, SequenceConv(site.heads, self.kernel))
        return super().build(site, shared)

    @property
    def refuses_cross(self) -> str:
        return "its convolution needs one sequence; give kernel=0" if self.kernel else ""

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        local = Cost(site.heads * self.kernel, site.grid.tokens * site.inner * self.kernel)
        return super().cost(site, accounting) + local

    def operator(self, site: Site) -> "NystromOperator":
        for grid in {site.grid, site.memory or site.grid}:
            if self.landmarks == "avg2d":
                landmark_windows(grid, self.m)
            else:
                check_site("m", self.number, site, grid.tokens, "tokens")
        return NystromOperator(self)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Every iteration has 4 products of m x m matrices; the exact pseudo-inverse is not counted."""
        n, keys, m, inner = site.tokens("q"), site.tokens("k"), self.number, site.inner
        total = attention_cost(n, m, inner) + attention_cost(m, keys, inner) + attention_cost(m, m, inner)
        return total + Cost(0, 4 * (self.iterations or 0) * m**3 * site.heads)


class SequenceConv(nn.Conv2d):
    """A convolution of the values along the tokens, one kernel for each head, without bias."""

    def __init__(self, heads: int, kernel: int) -> None:
        super().__init__(heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False)

    def forward(self, v: Float[Tensor, "B H N d"], grid: Grid) -> Float[Tensor, "B H N d"]:  # type: ignore[override]
        """v convolved along all tokens."""
        return super().forward(v)


class NystromOperator(Operator):
    """No parameters."""

    def __init__(self, config: Nystrom) -> None:
        super().__init__()
        self.config = config

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        """A padding mask belongs to the keys: it applies to the queries' landmarks only in self-attention."""
        form, config, mask = nystrom_reference if plain else nystrom, self.config, inputs.mask
        keep = mask.keep if mask is not None else None
        landmarks_q, keep_q = self._pool(inputs.q, inputs.grid, keep if inputs.memory is None else None)
        landmarks_k, keep_k = self._pool(inputs.k, inputs.key_grid, keep)
        landmark_keep = keep_k if keep_q is None or keep_k is None else keep_q & keep_k
        return form(
            *(inputs.q, inputs.k, inputs.v, landmarks_q, landmarks_k), iterations=config.iterations, start=config.start,
            mask=mask, landmark_keep=landmark_keep,
        )  # fmt: skip

    def _pool(
        self, x: Tensor, grid: Grid, keep: Bool[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B H m d"], Bool[Tensor, "B m"] | None]:
        m = self.config.m
        if self.config.landmarks == "segments":
            return segment_means(x, self.config.number, keep)
        return pool_landmarks(x, grid, m, keep=keep), None if keep is None else nonempty_landmarks(grid, m, keep)


def _check_iterations(iterations: int | None, start: str) -> None:
    if iterations is not None and iterations < 1:
        raise ConfigError(f"iterations is at least 1, or None for the exact pseudo-inverse, not {iterations}")
    if start not in STARTS:
        raise ConfigError(f"start is matrix or batch, not {start!r}")
