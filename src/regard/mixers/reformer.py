"""Attention within buckets of a locality-sensitive hash (Reformer, Kitaev et al. 2020, Sec. 2, Appendix A).

Queries and keys share one projection; keys are scaled to unit length. In each of r rounds tokens are sorted by their
bucket, argmax [xR, -xR], divided into chunks, and attend to their own chunk and the previous one. A token attends to
itself only if it has no other key. Rounds share one softmax in which a key counts once (Eq. 6); the published code
counts it in every round that contains it. The chunk before the first is the last of the same round (in the published
code of another round). Prefix and suffix tokens are hashed like all others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Card, ConfigError, Cost, Inputs, Operator, ShapeError, Site, operator_function
from regard.core.mask import Mask, hide, softmax_rows

from .shared.checks import padding_only
from .shared.flat_rows import flat_rows
from .shared.heads import HeadMixerConfig
from .shared.precision import upcast, upcast_dtype, without_autocast
from .shared.stable_sort import stable_sort

__all__ = ["Reformer", "lsh_plan", "reformer", "reformer_reference"]

SELF = -5e4  # the authors' logit of a token with itself: below all others, but finite, for a token without other keys


class LSHPlan(NamedTuple):
    """buckets (B, H, rounds, N): the bucket of every token in every round, any integers."""

    buckets: Int[Tensor, "B H R N"]


@operator_function
def lsh_plan(qk: Float[Tensor, "B H N d"], rotations: Float[Tensor, "R d half"]) -> LSHPlan:
    """Each token's bucket in each round: the index of the largest entry of [xR, -xR].

    Products are in float32 for half precision; ties are broken arbitrarily; no gradient.
    Raises: ShapeError unless rotations are (rounds, width, buckets / 2).
    """
    if qk.ndim != 4 or rotations.ndim != 3 or rotations.shape[1] != qk.shape[-1]:
        shapes = f"qk {tuple(qk.shape)} and rotations {tuple(rotations.shape)}"
        raise ShapeError(f"lsh_plan: {shapes}; expected (batch, heads, tokens, width) and (rounds, width, buckets / 2)")
    with torch.no_grad(), without_autocast(qk.device):
        rotated = upcast(qk)[:, :, None] @ upcast(rotations).to(upcast_dtype(qk))  # (B, H, R, N, half)
        return LSHPlan(torch.cat([rotated, -rotated], -1).max(-1).indices)


def _order(plan: LSHPlan, mask: Mask) -> Int[Tensor, "B H R N"]:
    """Tokens by bucket, then by position; padding last."""
    buckets = plan.buckets
    if mask.keep is not None:
        last = torch.iinfo(buckets.dtype).max // buckets.shape[-1] - 1
        buckets = buckets.masked_fill(~mask.keep[:, None, None], last)
    return stable_sort(buckets)[1]


def _chunks(order: Tensor, chunk: int) -> Int[Tensor, "B H R N"]:
    """The chunk of every token in every round."""
    position = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, position // chunk)


@operator_function
def reformer_reference(
    qk: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], plan: LSHPlan, chunk: int, *, duplicates: str = "once",
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys, with the logarithm of the number of rounds that contain them added to the logits."""
    _check(qk, v, plan, chunk, duplicates)
    mask = padding_only("reformer", mask)
    qk_keys, v = hide(qk, mask), hide(v, mask)
    chunks = _chunks(_order(plan, mask), chunk)
    number = -(-qk.shape[-2] // chunk)
    distance = (chunks[..., :, None] - chunks[..., None, :]) % number
    count = (distance <= 1).sum(2).to(qk.dtype)  # (B, H, N, N)
    count = count.clamp(max=1.0) if duplicates == "once" else count
    logits = qk @ F.normalize(qk_keys, dim=-1).mT * (qk.shape[-1] ** -0.5 if scale is None else scale)
    same = torch.eye(qk.shape[-2], dtype=torch.bool, device=qk.device)
    return softmax_rows(mask.add_to(logits.masked_fill(same, SELF) + count.log())).to(v.dtype) @ v


@operator_function
def reformer(
    qk: Float[Tensor, "B H N d"], v: Float[Tensor, "B H N e"], plan: LSHPlan, chunk: int, *, duplicates: str = "once",
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Attention of sorted chunks to themselves and the previous chunk, in the rounds of a plan (see `lsh_plan`).

    duplicates: a key in several rounds counts "once", as in the paper, or "every" time, as in the published code.
    scale: None = d^-0.5 (transformers' implementation has 1). mask: padding only; a query without any key gives zeros.
    The last chunk may be smaller. With one round and at most two chunks it is softmax attention, except for the token
    itself.
    Raises: ShapeError for tensors that do not fit; ConfigError for a chunk below 1 or another value of `duplicates`;
    UnsupportedError for other masks.
    """
    _check(qk, v, plan, chunk, duplicates)
    mask = padding_only("reformer", mask)
    keys, v = F.normalize(hide(qk, mask), dim=-1), hide(v, mask)
    order = _order(plan, mask)
    n = qk.shape[-2]
    chunk = min(chunk, max(1, n))  # one chunk holds all tokens; a larger one would only be padded
    number = -(-n // chunk)
    tokens = F.pad(order, (0, number * chunk - n), value=n).unflatten(-1, (number, chunk))  # (B, H, R, T, c); n: empty
    queries, chunk_keys, values = (_gather(x, tokens) for x in (qk, keys, v))
    key_tokens = tokens
    if number > 1:
        chunk_keys, values = (torch.cat([x, x.roll(1, 3)], -2) for x in (chunk_keys, values))
        key_tokens = torch.cat([tokens, tokens.roll(1, 3)], -1)  # (B, H, R, T, 2c)
    with without_autocast(qk.device):
        scale = qk.shape[-1] ** -0.5 if scale is None else scale
        logits = (upcast(queries) * scale) @ upcast(chunk_keys).mT
        logits = logits.masked_fill(tokens[..., :, None] == key_tokens[..., None, :], SELF)
        if duplicates == "once" and plan.buckets.shape[2] > 1:
            logits = logits - _rounds(order, tokens, key_tokens, chunk, number).to(logits.dtype).log()
        logits = logits.masked_fill(~_valid(key_tokens, n, mask)[..., None, :], -torch.inf)
        top = logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min / 2)
        e = (logits - top).exp()
        outputs, sums = upcast(e.to(v.dtype) @ values), e.sum(-1, keepdim=True)
    slot = torch.zeros_like(order).scatter(-1, order, torch.arange(n, device=order.device).expand_as(order))
    outputs, sums, top = (_from_chunks(x, slot) for x in (outputs, sums, top))  # (B, H, R, N, e | 1 | 1)
    weight = (top - top.amax(2, keepdim=True)).exp()
    total = (weight * sums).sum(2)
    out = (weight * outputs).sum(2) / total.masked_fill(total == 0, 1.0)
    return out.to(v.dtype)


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of x (B, H, N, c) at tokens (B, H, ...), zeros where a token is N: (B, H, ..., c)."""
    n, width = x.shape[2:]
    rows = F.pad(x, (0, 0, 0, 1)).reshape(-1, width)
    return rows.index_select(0, flat_rows(tokens, n + 1).flatten()).view(*tokens.shape, width)


def _from_chunks(x: Tensor, slot: Tensor) -> Tensor:
    """From chunks (B, H, R, T, c, e) to tokens (B, H, R, N, e)."""
    flat = x.flatten(3, 4)
    rows = flat_rows(slot.flatten(0, 1), flat.shape[3]).flatten()
    return flat.flatten(0, 3).index_select(0, rows).view(*slot.shape, x.shape[-1])


def _rounds(order: Tensor, queries: Tensor, keys: Tensor, chunk: int, number: int) -> Tensor:
    """The rounds in which a query attends to a key, at least 1, (B, H, R, T, c, 2c). queries, keys: token indices."""
    chunks = F.pad(_chunks(order, chunk), (0, 1))  # (B, H, R, N + 1)
    count = torch.zeros(*queries.shape, keys.shape[-1], dtype=torch.long, device=order.device)
    for chunk_of in chunks.unbind(2):
        a, b = (chunk_of.gather(-1, x.flatten(2)).view(x.shape) for x in (queries, keys))
        count = count + (((a[..., :, None] - b[..., None, :]) % number) <= 1)
    return count.clamp_min(1)


def _valid(keys: Tensor, n: int, mask: Mask) -> Bool[Tensor, "B H R T s"]:
    """True for indices of tokens that are not padding."""
    if mask.keep is None:
        return keys < n
    keep = F.pad(mask.keep, (0, 1), value=False)
    return keep[:, None].expand(*keys.shape[:2], -1).gather(-1, keys.flatten(2)).view(keys.shape)


def _check(qk: Tensor, v: Tensor, plan: LSHPlan, chunk: int, duplicates: str) -> None:
    if v.shape[-2] != qk.shape[-2]:
        raise ShapeError(f"reformer: qk has {qk.shape[-2]} tokens, v has {v.shape[-2]}; they must be equal")
    shape = tuple(plan.buckets.shape)
    if len(shape) != 4 or (*shape[:2], shape[3]) != tuple(qk.shape[:3]):
        expected = f"({qk.shape[0]}, {qk.shape[1]}, rounds, {qk.shape[2]})"
        raise ShapeError(f"reformer: plan.buckets has shape {shape}; expected {expected}")
    if chunk < 1 or duplicates not in ("once", "every"):
        raise ConfigError(f"chunk is at least 1 and duplicates once or every, not {chunk} and {duplicates!r}")


@dataclass(frozen=True, kw_only=True)
class Reformer(HeadMixerConfig):
    """chunk: tokens of a chunk (paper: 64). rounds: hash functions. duplicates: "once" (paper) or "every" (its code).

    seed: of the hash functions, which a layer draws once when it is built, different for each layer. The number of
    buckets is that of the chunks on the site's grid, rounded up to an even number. Keys are the queries: no key is
    projected, and a swap does not use the keys of the host.
    Raises: ConfigError for numbers below 1 or unknown values.
    """

    chunk: int = 64
    rounds: int = 4
    duplicates: Literal["once", "every"] = "once"
    scale: float | None = None
    seed: int = field(default=0, metadata={"least": -(2**53), "most": 2**53})

    card = Card(
        title="Locality-sensitive hashing attention", source="Kitaev et al. 2020 (Reformer), Sec. 2 and Appendix A",
        formula="softmax(q unit(q_P)^T / sqrt(d)) v_P,  P = tokens near in the order of hash buckets",
        complexity="O(r N c C + N log N)", query_content=True, key_content=True, dynamic="one-step",
        scaling=frozenset({"routing"}), expert_type="MLP of the width of a bucket", expert_count="buckets",
        construction="hashing", topology="buckets x many-to-one", conditions="Q, K", discrete=True,
        prefix="hashed like all tokens",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    samples = ("Reformer(chunk=5, rounds=3)", 'Reformer(chunk=3, rounds=2, duplicates="every")')

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.chunk, self.rounds) < 1:
            raise ConfigError(f"chunk and rounds are at least 1, not chunk={self.chunk}, rounds={self.rounds}")

    @property
    def uses(self) -> str:
        """Keys are queries scaled to length 1."""
        return "qv"

    def buckets(self, site: Site) -> int:
        """The number of buckets: even, at least 2."""
        return 2 * -(-site.grid.tokens // (2 * self.chunk))

    def operator(self, site: Site) -> "ReformerOperator":
        return ReformerOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The hash, and chunks of queries with two chunks of keys; "paper" does not count the hash."""
        n = site.grid.tokens
        chunk = min(self.chunk, n)
        number = -(-n // chunk)
        hashing = 0 if accounting == "paper" else n * self.rounds * (self.buckets(site) // 2) * site.inner
        attention = 2 * self.rounds * number * chunk * min(number, 2) * chunk * site.inner
        return Cost(0, hashing + attention)


class ReformerOperator(Operator):
    """rotations (rounds, d, buckets / 2): a buffer drawn from the seed and the index of the layer; not saved.

    They are drawn again where the module moves, so that they are right after `to_empty` too.
    """

    rotations: Tensor

    def __init__(self, config: Reformer, site: Site) -> None:
        super().__init__()
        self.config = config
        self.seed = config.seed * 1000 + site.layer
        shape = (config.rounds, site.width, config.buckets(site) // 2)
        self.register_buffer("rotations", torch.empty(shape), persistent=False)
        self._draw()

    def _draw(self) -> None:
        source = torch.Generator().manual_seed(self.seed)
        self.rotations.copy_(torch.randn(self.rotations.shape, generator=source, device="cpu", dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ReformerOperator":
        super()._apply(fn, recurse)
        self._draw()
        return self

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form, c, q = reformer_reference if plain else reformer, self.config, inputs.q
        arguments = (q, inputs.v, lsh_plan(q, self.rotations), c.chunk)
        return form(*arguments, duplicates=c.duplicates, scale=c.scale, mask=inputs.mask)
