"""Seeds added until a study's claims are decided: interim analyses, their error levels, and which claims go on.

A claim is tested at fixed numbers of paired seeds, and each of these interim analyses has a fixed share of the level.
The smallest p over share of a claim is then a valid p by Bonferroni's inequality, whatever decides which analyses are
carried out; Holm's correction combines the claims. The gate comes first: no claim is judged before it is passed at the
same level, so that it costs the claims nothing. Together at most 5 % of studies have a false verdict.

Arrays of several studies are allowed everywhere, (..., m, n) for m claims and n paired seeds. Needs no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core import ConfigError
from regard.core.validation import check_fields
from regard.measure.intervals import FEWEST, LEVEL, ROUNDING, Interval, holm, powers, quantiles, seed_pairs

from .verdicts import Verdict, claim_p, numbers_of

MOST = 1000
"""Pairs of the last analysis, at most."""
HOPE = 0.2
"""A claim goes on while the chance that its last reachable analysis decides it is at least this."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Looks:
    """The interim analyses of a study, fixed before its first run.

    pairs: numbers of paired seeds at which claims are tested, rising from at least 3 to at most `MOST`. shares: of the
    level, for each analysis; they sum up to 1. level: of the whole study.
    Raises: ConfigError.
    """

    pairs: tuple[int, ...] = (3, 5, 8, 12, 18)
    shares: tuple[float, ...] = (0.05, 0.15, 0.25, 0.25, 0.3)
    level: float = 1 - LEVEL

    def __post_init__(self) -> None:
        check_fields(self)
        rising = all(earlier < later for earlier, later in pairwise((FEWEST - 1, *self.pairs, MOST + 1)))
        if not self.pairs or not rising:
            raise ConfigError(f"interim analyses are rising numbers of pairs from {FEWEST} to {MOST}, not {self.pairs}")
        if len(self.shares) != len(self.pairs) or min(self.shares) <= 0 or not math.isclose(sum(self.shares), 1):
            raise ConfigError(f"shares are positive and sum up to 1, one for each of {self.pairs}, not {self.shares}")
        if not 0 < self.level < 1:
            raise ConfigError(f"the level is between 0 and 1, such as 0.05, not {self.level}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a snapshot."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Looks":
        """The analyses of a snapshot. Raises: ConfigError if they are impossible."""
        return cls(pairs=tuple(value["pairs"]), shares=tuple(value["shares"]), level=value["level"])


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The paired differences of claims, (..., m, n), by seed, NaN where a seed is missing; missing ones come last.

    at: the value that a claim says they are above, for each claim. within: instead the margin of an equivalence, NaN
    for the other claims.
    """

    differences: Floats
    at: Floats
    within: Floats

    @classmethod
    def against_zero(cls, differences: Floats) -> "Differences":
        """Claims that the differences are above zero."""
        claims = differences.shape[-2]
        return cls(differences=differences, at=np.zeros(claims), within=np.full(claims, np.nan))

    @property
    def pairs(self) -> NDArray[np.int64]:
        """The number of paired seeds of each claim, (..., m)."""
        return np.asarray(np.isfinite(self.differences).sum(-1))

    def moments(self, pairs: int) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the first `pairs` differences, NaN where there are fewer."""
        first = self.differences[..., :pairs]
        if first.shape[-1] < pairs:
            return np.full(first.shape[:-1], np.nan), np.full(first.shape[:-1], np.nan)
        equal = np.ptp(first, -1) <= ROUNDING * np.abs(first).max(-1)
        return first.mean(-1), np.where(equal, 0.0, first.std(-1, ddof=1))

    def p(self, pairs: int) -> tuple[Floats, NDArray[np.int64]]:
        """(two-sided p, side) of each claim from its first `pairs` differences, p NaN where there are fewer."""
        mean, sd = self.moments(pairs)
        error, equal = sd / math.sqrt(pairs), np.isfinite(self.within)
        p, side = claim_p(mean, error, pairs - 1, at=self.at)
        p_within, side_within = claim_p(mean, error, pairs - 1, within=np.where(equal, self.within, 1.0))
        return np.where(equal, p_within, p), np.where(equal, side_within, side)


@dataclass(frozen=True)
class Analysis:
    """p: of each claim, combined over its analyses, (..., m), 1 before the first. side: 1 for the claim, -1 against it.
    at: the number of pairs of the analysis with this p, 0 before the first."""

    p: Floats
    side: NDArray[np.int64]
    at: NDArray[np.int64]


def analyse(looks: Looks, values: Differences) -> Analysis:
    """All interim analyses for which there are enough seeds, each from its own first seeds."""
    results = [values.p(pairs) for pairs in looks.pairs]
    shares = np.asarray(looks.shares)
    p = np.nan_to_num(np.stack([p for p, _ in results], -1) / shares, nan=np.inf)
    best = p.argmin(-1)[..., None]
    side = np.take_along_axis(np.stack([side for _, side in results], -1), best, -1)[..., 0]
    smallest = np.take_along_axis(p, best, -1)[..., 0]
    at = np.where(np.isinf(smallest), 0, np.asarray(looks.pairs)[best[..., 0]])
    return Analysis(np.minimum(smallest, 1.0), side, at)


def gate_passed(looks: Looks, gate: Differences) -> NDArray[np.bool_]:
    """Whether the baseline is above every control, (...); without controls there is nothing to pass."""
    found = analyse(looks, gate)
    return np.asarray(((found.p <= looks.level) & (found.side > 0)).all(-1))


def is_decided(looks: Looks, claims: Differences) -> NDArray[np.bool_]:
    """Whether each claim is decided after correction over analyses and claims, (..., m), if the gate is passed."""
    return holm(analyse(looks, claims).p, looks.level)


def next_pairs(
    looks: Looks, claims: Differences, gate: Differences, most: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The number of paired seeds that each claim, (..., m), and each comparison of the gate, (..., c), needs next.

    0: no further ones, since it is decided, has had its last analysis, or has hardly any chance in the analyses that
    are left. First the gate goes on until it is passed; without it no claim gets any. most: the largest number of pairs
    that each claim can reach in the time left, by default that of the last analysis; its first one is always asked for.
    """
    passed, closed = gate_passed(looks, gate), is_decided(looks, claims)
    open_claims = np.maximum((~closed).sum(-1, keepdims=True), 1)
    for_claims = _next(looks, claims, looks.level / open_claims, most)
    found = analyse(looks, gate)
    for_gate = np.where(found.p <= looks.level, 0, _next(looks, gate, np.asarray(looks.level), None, upwards=True))
    lost = ((found.p <= looks.level) & (found.side < 0)).any(-1, keepdims=True)
    hopeless = ((found.p > looks.level) & (for_gate == 0)).any(-1, keepdims=True) | lost
    for_claims = np.where(passed[..., None] & ~closed, for_claims, 0)
    return for_claims, np.where(passed[..., None] | hopeless, 0, for_gate)


def _next(
    looks: Looks, values: Differences, level: Floats, most: NDArray[np.int64] | None, upwards: bool = False
) -> NDArray[np.int64]:
    """The pairs of the next analysis, 0 after the last one, beyond `most`, and without hope; see `_chance`."""
    pairs, edges = values.pairs, np.asarray(looks.pairs)
    done = (pairs[..., None] >= edges).sum(-1)
    following = np.append(edges, 0)[done]
    limit = np.full(pairs.shape, edges[-1]) if most is None else np.maximum(most, edges[0])
    last = np.maximum((limit[..., None] >= edges).sum(-1) - 1, 0)
    asked = (following > 0) & (following <= limit)
    result = np.zeros(pairs.shape, np.int64)
    hopeful = _chance(looks, values, np.maximum(done - 1, 0), last, level, asked, upwards) >= HOPE
    result[asked] = np.where((done[asked] == 0) | hopeful, following[asked], 0)
    return result


def _chance(
    looks: Looks, values: Differences, now: NDArray[np.int64], last: NDArray[np.int64], level: Floats,
    asked: NDArray[np.bool_], upwards: bool,
) -> Floats:  # fmt: skip
    """The chances, for the claims that are asked for, (number,), that analysis `last` decides what `now` has not, seen
    with hope: the true difference is at the better end of its one-sided 80 % interval. upwards: only that it is above
    counts, as at the gate; otherwise also that it is below."""
    moments = zip(*(values.moments(pairs) for pairs in looks.pairs), strict=True)
    mean, sd = (np.take_along_axis(np.stack(part, -1), now[..., None], -1)[..., 0] for part in moments)
    pairs, edges, shares = np.asarray(looks.pairs)[now], np.asarray(looks.pairs), np.asarray(looks.shares)
    hope = quantiles(0.8, pairs - 1) * sd / np.sqrt(pairs)
    above = (mean - values.at if upwards else np.abs(mean - values.at)) + hope
    smallest = np.maximum(np.abs(mean) - hope, 0.0)
    inside, outside = values.within - smallest, np.abs(mean) + hope - values.within
    target = np.where(np.isfinite(values.within), np.maximum(inside, outside), above)
    other = np.where(np.isfinite(values.within) & (inside >= outside), values.within + smallest, np.inf)
    level = np.broadcast_to(level, pairs.shape) * shares[last]
    return powers(edges[last[asked]], target[asked], sd[asked], level[asked], other=other[asked])


def judge_analyses(
    looks: Looks, difference: Interval, p: float, side: int, at: int, sampling: float | None, late: int = 0
) -> Verdict:
    """What the interim analyses of one claim say by themselves: suggested, undecided, or not judged before the first.

    difference: of all paired seeds. p, side, at: of the claim, as in `Analysis`. sampling: the `sampling_error`. p of a
    claim before its first analysis is 1 and not None: the correction is over all claims from the beginning. late: pairs
    that no analysis takes yet, since an earlier seed is missing.
    """
    first, last = looks.pairs[0], looks.pairs[-1]
    behind = f" ({late} behind a seed that is missing)" if late else ""
    if at == 0 or difference.low is None or difference.high is None:
        reason = f"{seed_pairs(difference.n)}{behind}, the first interim analysis is at {first}"
        return Verdict("not judged", reason, difference, 1.0, sampling=sampling, reason=reason)
    numbers = numbers_of(difference)
    if p > looks.level:
        return Verdict("undecided", f"{numbers}{behind}, of at most {last}", difference, p, sampling=sampling)
    facts = f"{numbers}; by the interim analysis at {at}, p {p:.2g} over all analyses"
    return Verdict("suggested", facts, difference, p, side, sampling=sampling)
