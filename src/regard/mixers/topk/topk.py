"""Exact top-k attention: every query attends to its k best keys in one softmax (Gupta et al. 2021).

The indexer ranks the keys: by the logits themselves ("exact"); by a small learned score with one shared key
("lightning", DeepSeek-V3.2's sparse attention, DSA); or by the first few channels of each head ("spark", Spark
Transformer, You et al. 2025), which then also multiply the logit. The selection is data, `TopKPlan`. Spark's paper has
a statistical threshold in its place, which keeps about k keys without sorting (`statistical`).
Prefix and suffix tokens are queries and keys like all others.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import Card, Contract, Cost, Inputs, Operator, Site, attention_cost, linear_cost, operator_function
from regard.core.errors import ConfigError, ShapeError, UnsupportedError
from regard.core.mask import NO_MASK, Mask, hide, join_product, softmax_rows
from regard.mixers.shared.checks import check_chosen, check_site, check_top
from regard.mixers.shared.executions import Situation, check_execution, choose, trains
from regard.mixers.shared.flat_rows import flat_rows
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.shared.native import runs_native
from regard.mixers.shared.precision import upcast, without_autocast

from .index import Lightning, forbid, spark_logits, threshold_logits
from .native import topk_native

__all__ = ["TopK", "topk", "topk_plan", "topk_reference"]


class TopKPlan(NamedTuple):
    """keys (B, H or 1, N, top): the keys of each query, in any order; 1 where all heads share them."""

    keys: Int[Tensor, "B H1 N top"]


@operator_function
def topk_plan(scores: Float[Tensor, "B H1 N M"], top: int) -> TopKPlan:
    """The `top` keys with the highest scores: always exactly `top`; ties are broken arbitrarily.

    A NaN counts as the highest score, so that it is not hidden. Raises: ShapeError if top is not in 1..M.
    """
    check_top("topk", top, scores.shape[-1], "keys")
    return TopKPlan(scores.detach().topk(top, sorted=False).indices)


@operator_function
def topk_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], top: int, *,
    scale: float | None = None, mask: Mask | None = None, scores: Float[Tensor, "B H1 N M"] | None = None,
    plan: TopKPlan | None = None, rank: int = 0, statistical: bool = False,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """softmax over all keys, with those outside the selection at -inf."""
    _check_scores(q, k, scores, plan, top, rank, statistical)
    k, v = hide(k, mask), hide(v, mask)
    if statistical:
        chosen = threshold_logits(upcast(q), upcast(k), top, rank, scale, mask)  # the quantile needs float32
        return softmax_rows((mask or NO_MASK).add_to(chosen)).to(v.dtype) @ v
    logits = spark_logits(q, k, rank, scale) if rank else q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = (mask or NO_MASK).add_to(logits)
    if plan is None and scores is None and not rank:
        plan = topk_plan(logits, top)
    elif plan is None:
        plan = topk_plan(forbid(_spark_scores(q, k, rank, scale) if scores is None else scores, mask), top)
    chosen = torch.zeros_like(logits).scatter(-1, plan.keys.expand(-1, q.shape[1], -1, -1), 1.0).bool()
    return softmax_rows(logits.masked_fill(~chosen, -torch.inf)).to(v.dtype) @ v


@operator_function
def topk(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], top: int, *,
    scale: float | None = None, mask: Mask | None = None, scores: Float[Tensor, "B H1 N M"] | None = None,
    plan: TopKPlan | None = None, rank: int = 0, statistical: bool = False, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Softmax attention over the `top` keys of each query that rank highest.

    scale: None = d^-0.5. mask: all kinds, applied before the selection (a bias does not change `scores`). Where a query
    may attend to fewer than `top` keys the others have weight exactly 0, and a query without any key gives zeros.
    scores: ranked instead of the logits, with one head for a selection that all heads share; without gradient. plan: a
    selection to use instead. rank: Spark's predictor, the first `rank` channels (see `spark_logits`); 0 = none.
    statistical: with a rank, its threshold instead of exactly `top` keys (see `threshold_logits`), which passes
    gradients; executed "dense".
    execution: "native" is a compiled kernel for rank 0 without masks, "dense" multiplies all values, "gather" copies
    those of each query; "auto" follows the table in docs/mechanisms.md. Exactly `top` keys are
    kept; ties are broken arbitrarily. A row with an infinite or NaN logit gives NaN, as softmax does.
    Raises: ShapeError for tensors that do not fit or top not in 1..M, also indices of a plan (read in eager mode on the
    CPU); ConfigError for an unknown execution, or statistical without a rank or with scores or a plan;
    UnsupportedError for "native" or "gather" where it cannot run.
    """
    check_top("topk", top, k.shape[-2], "keys")
    _check_scores(q, k, scores, plan, top, rank, statistical)
    check_execution(execution, ("native", "dense", "gather"))
    mask = mask or NO_MASK
    if statistical and execution == "gather":
        raise UnsupportedError('topk: execution="gather" needs the same number of keys for all queries; use "dense"')
    execution = _execution(execution, q, k, v, top, mask, rank)
    k, v = hide(k, mask), hide(v, mask)
    with without_autocast(q.device):
        if statistical:
            chosen = mask.add_to(threshold_logits(upcast(q), upcast(k), top, rank, scale, mask))
            return softmax_rows(chosen).to(v.dtype) @ v
        if plan is None and (rank or scores is not None):
            ranked = _spark_scores(upcast(q), upcast(k), rank, scale) if scores is None else upcast(scores)
            plan = topk_plan(forbid(ranked, mask), top)
        if execution == "native":
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            return topk_native(q, k, v, top, factor, None if plan is None else plan.keys)
        logits = _logits(q, k, rank, scale, mask)
        if plan is None:
            best, keys = logits.topk(top, sorted=False)
        else:
            keys = plan.keys.expand(-1, q.shape[1], -1, -1)
            best = logits.gather(-1, keys)
        a = (softmax_rows(best) if mask.kinds else best.softmax(-1)).to(v.dtype)  # (B, H, N, top)
        if execution == "gather":
            return _gather_values(a, keys, v)
        return a.new_zeros(*a.shape[:-1], k.shape[-2]).scatter(-1, keys, a) @ v


def _execution(execution: str, q: Tensor, k: Tensor, v: Tensor, top: int, mask: Mask, rank: int) -> str:
    """What runs. Raises: UnsupportedError if the compiled kernel is requested and cannot."""
    if execution == "native" and (rank or mask.kinds):
        reason = "masks" if mask.kinds else "Spark's indexer"
        raise UnsupportedError(f'topk: execution="native" has no {reason}; use "auto"')
    native = not rank and not mask.kinds and runs_native("topk", execution, q)
    situation = Situation(
        device=q.device, dtype=q.dtype, tokens=q.shape[-2], keys=k.shape[-2], top=top, trains=trains(q, k, v),
        facts=frozenset(["native"] * native),
    )  # fmt: skip
    return choose("TopK", execution, situation)


def _logits(q: Tensor, k: Tensor, rank: int, scale: float | None, mask: Mask) -> Tensor:
    """Masked logits in float32 at least."""
    q, k = upcast(q), upcast(k)
    if rank:
        return mask.add_to(spark_logits(q, k, rank, scale))
    return mask.add_to((q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT)


def _spark_scores(q: Tensor, k: Tensor, rank: int, scale: float | None) -> Tensor:
    """Spark's scores: the product of the first channels; a negative scale reverses the order."""
    sign = -1.0 if scale is not None and scale < 0 else 1.0
    return sign * q[..., :rank] @ k[..., :rank].mT


def _gather_values(a: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """Weights (B, H, N, top) times the values of each query's keys."""
    width, top, number = v.shape[-1], keys.shape[-1], a.shape[:3].numel()
    values = v.reshape(-1, width).index_select(0, flat_rows(keys, v.shape[-2]).flatten()).view(number, top, width)
    return torch.bmm(a.reshape(number, 1, top), values).view(*a.shape[:3], width)


def _check_scores(
    q: Tensor, k: Tensor, scores: Tensor | None, plan: TopKPlan | None, top: int, rank: int, statistical: bool
) -> None:
    if statistical and (not rank or scores is not None or plan is not None):
        raise ConfigError("topk: statistical=True is a threshold on the first `rank` channels: no scores, no plan")
    if not 0 <= rank < q.shape[-1]:
        raise ShapeError(f"topk: rank={rank} of {q.shape[-1]} channels; rank is 0 or below the width")
    for label, x, width in (("scores", scores, k.shape[-2]), ("plan.keys", plan.keys if plan else None, top)):
        expected = (q.shape[0], q.shape[1], q.shape[2], width)
        if x is not None and tuple(x.shape) not in (expected, (expected[0], 1, *expected[2:])):
            raise ShapeError(f"topk: {label} has shape {tuple(x.shape)}; expected {expected}, or 1 for the heads")
    if plan is not None:
        check_chosen("topk: plan.keys", plan.keys, tuple(plan.keys.shape), k.shape[-2])


@dataclass(frozen=True, kw_only=True)
class TopK(HeadMixerConfig):
    """k: keys that a query attends to. scale: factor of the logits, None = d^-0.5.

    indexer: how keys are ranked. "exact": by the logits. "lightning": by DSA's score, sum_j w_j relu(q_j . k), with
    `index_heads` small queries of `index_width` channels and one key for all heads, projected from the layer's queries
    and keys (in DSA from its inputs). The loss of the output gives this indexer no gradient: it learns from
    `TopKOperator.index_loss`, which `regard train` and studies add to the loss of the task, and which a training loop
    of the user's own must add. "spark": by the first `rank` channels; the logit is their product times
    softplus of the product of the other channels. statistical: with "spark", the paper's threshold instead of exactly
    k keys: mean + std times a normal quantile of each query's products, which is also subtracted (`threshold_logits`).
    Raises: ConfigError for numbers below 1, an unknown indexer or fields of another indexer; building, if k exceeds the
    keys of the site.
    """

    k: int = 25
    scale: float | None = None
    indexer: Literal["exact", "lightning", "spark"] = "exact"
    index_heads: int = 4
    index_width: int = 32
    rank: int = 16
    statistical: bool = False

    card = Card(
        title="Exact top-k attention", source="Gupta et al. 2021; DSA: DeepSeek-V3.2; Spark: You et al. 2025",
        formula="softmax over the k largest q_i k_j / sqrt(d), times v", complexity="O(N^2 C + N k C)",
        query_content=True, key_content=True, dynamic="two-step", scaling=frozenset({"routing"}),
        expert_type="MLP of width k", expert_count="N", construction="light skim", topology="N x one-to-one",
        conditions="Q, K", discrete=True,
    )  # fmt: skip
    masks = frozenset({"causal", "padding", "bias", "product"})
    depth = True
    cross = True
    samples = (
        "TopK(k=5)", 'TopK(k=5, indexer="spark", rank=3)', 'TopK(k=5, indexer="spark", rank=3, statistical=True)',
        'TopK(k=5, indexer="lightning", index_heads=2, index_width=4)',
    )  # fmt: skip

    @property
    def contract(self) -> Contract:
        skip = {"gradients": "the indexer learns from a separate loss"} if self.indexer == "lightning" else {}
        positions = bool(self.dwc) or self.indexer != "exact"
        counted = {"execution": "auto" if self.statistical else "gather"}
        return Contract(counted=counted, positions=positions, skip=skip)

    @property
    def revision(self) -> int:  # type: ignore[override]
        """2 for the lightning indexer, which `regard train` did not train in 1."""
        return 2 if self.indexer == "lightning" else 1

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = {name: getattr(self, name) for name in ("k", "index_heads", "index_width", "rank")}
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"TopK: {name} is at least 1, not {number}")
        for name, indexer in (("index_heads", "lightning"), ("index_width", "lightning"), ("rank", "spark")):
            if self.indexer != indexer and numbers[name] != getattr(TopK, name):
                raise ConfigError(
                    f"TopK: {name}={numbers[name]} belongs to indexer={indexer!r}, not {self.indexer!r}; remove it"
                )
        if self.statistical and self.indexer != "spark":
            raise ConfigError(f"TopK: statistical=True belongs to indexer='spark', not {self.indexer!r}; remove it")

    def operator(self, site: Site) -> "TopKOperator":
        check_site("k", self.k, site, site.tokens("k"), "keys")
        if self.indexer == "spark":
            check_site("rank", self.rank, site, site.width - 1, "channels to choose from")
        return TopKOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """All logits and the values of k keys per query; DSA's paper counts the indexer and only the chosen logits.

        With a statistical threshold, which leaves the number of keys open: all values.
        """
        n, m, inner = site.tokens("q"), site.tokens("k"), site.inner
        if self.statistical:
            return attention_cost(n, m, inner)
        total = Cost(0, n * self.k * inner)
        if self.indexer != "lightning":
            ranking = n * m * self.rank * site.heads if self.indexer == "spark" else 0
            return total + Cost(0, n * m * inner + ranking)
        h, w = self.index_heads, self.index_width
        total += linear_cost(n, inner, h * w, False) + linear_cost(m, inner, w, False) + linear_cost(n, inner, h, False)
        return total + Cost(0, n * m * h * w + (n * self.k * inner if accounting == "paper" else n * m * inner))


class TopKOperator(Operator):
    """index: the lightning indexer, or None; no other parameters. execution: see `topk`."""

    def __init__(self, config: TopK, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        learned = config.indexer == "lightning"
        self.index = Lightning(site.inner, config.index_heads, config.index_width) if learned else None

    def plan(self, q: Tensor, k: Tensor, mask: Mask | None = None) -> TopKPlan | None:
        """The lightning indexer's selection, shared by the heads; None for other indexers."""
        if self.index is None:
            return None
        mask = mask and mask.without_bias()  # a bias of the heads does not apply to the shared score
        return TopKPlan(self.index.best(q, hide(k, mask), self.config.k, mask))

    def index_loss(self, q: Tensor, k: Tensor, mask: Mask | None = None) -> Tensor:
        """KL divergence from the heads' mean attention (no gradient) to the softmax of the index scores, a scalar.

        Over all keys, as in the dense stage of DeepSeek-V3.2 (Eq. 3). Add it to the task's loss, as `regard train`
        does: the selection itself passes no gradient. q (B, H, N, d), k (B, H, M, d).
        """
        if self.index is None:
            raise ConfigError(f"TopK(indexer={self.config.indexer!r}) has no indexer to train")
        return self.index.loss(q, hide(k, mask), self.config.scale, mask)

    def own_loss(self, inputs: Inputs) -> Tensor | None:
        return None if self.index is None else self.index_loss(inputs.q, inputs.k, inputs.mask)

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, k, mask, config = inputs.q, inputs.k, inputs.mask, self.config
        form = topk_reference if plain else partial(topk, execution=self.execution)
        rank = config.rank if config.indexer == "spark" else 0
        plan, rough, scale = self.plan(q, k, mask), config.statistical, config.scale
        if rank:  # the first channels rank keys
            mask = mask and mask.with_bias()
        else:
            q, k, mask, scale = join_product(q, k, mask, scale)
        return form(q, k, inputs.v, config.k, scale=scale, mask=mask, plan=plan, rank=rank, statistical=rough)
