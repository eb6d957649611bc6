"""Exact top-k attention: every query attends to its k best keys, softmax over those alone (Gupta et al. 2021).

What "best" means is the indexer's choice: the logits themselves ("exact"); a small learned score with one shared key
("lightning", DeepSeek-V3.2's sparse attention, DSA); or the first few channels of each head ("spark", Spark
Transformer, You et al. 2025), which then also multiply the logit. The selection is data, `TopKPlan`.
Extra tokens are queries and keys like any other.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import (
    NOTHING,
    Card,
    ConfigError,
    Contract,
    Cost,
    Grid,
    Mask,
    Operator,
    ShapeError,
    Site,
    hide,
    linear,
    softmax_rows,
)
from regard.mixers.mita.routing import check_chosen
from regard.mixers.shared.heads import HeadMixerConfig, check_qkv
from regard.mixers.shared.precision import exact_products, wide

from .topk_index import Lightning, forbid, spark_logits

__all__ = ["TopK", "topk", "topk_plan", "topk_reference"]


class TopKPlan(NamedTuple):
    """keys (B, H or 1, N, top): the keys of each query, in any order; 1 where all heads share them."""

    keys: Int[Tensor, "B H1 N top"]


def topk_plan(scores: Float[Tensor, "B H1 N M"], top: int) -> TopKPlan:
    """The `top` keys with the highest scores: always exactly `top`, whichever of equal scores come last.

    A NaN counts as the highest score, so that it is not hidden. Raises: ShapeError if top is not in 1..M.
    """
    _check_top(top, scores.shape[-1])
    return TopKPlan(scores.detach().topk(top, sorted=False).indices)


def topk_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    top: int,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    scores: Float[Tensor, "B H1 N M"] | None = None,
    plan: TopKPlan | None = None,
    rank: int = 0,
) -> Float[Tensor, "B H N e"]:
    """softmax over all keys, with those outside the selection at -inf."""
    k, v = hide(k, mask), hide(v, mask)
    logits = spark_logits(q, k, rank, scale) if rank else q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = (mask or NOTHING).added(logits)
    if plan is None and scores is None and not rank:
        plan = topk_plan(logits, top)
    elif plan is None:
        plan = topk_plan(forbid(_spark_scores(q, k, rank, scale) if scores is None else scores, mask), top)
    chosen = torch.zeros_like(logits).scatter(-1, plan.keys.expand(-1, q.shape[1], -1, -1), 1.0).bool()
    return softmax_rows(logits.masked_fill(~chosen, -torch.inf)).to(v.dtype) @ v


def topk(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    top: int,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    scores: Float[Tensor, "B H1 N M"] | None = None,
    plan: TopKPlan | None = None,
    rank: int = 0,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:
    """Softmax attention over the `top` keys of each query that rank highest.

    scale: None = d^-0.5. mask: all kinds; it acts before the selection (a bias
    on scores of another kind does not). Where a query may attend to fewer than `top`
    keys the surplus has weight exactly 0, and a query without any gives zeros. scores: what is ranked in the place of
    the logits, with one head for a selection that heads share; no gradient flows into it. plan: a selection to use
    instead. rank: Spark's predictor, the first `rank` channels (see `spark_logits`); 0 = none. execution: "dense"
    multiplies all values, "gather" copies each query's own; "auto" takes the faster. Exactly `top` keys are kept
    where scores are equal; which ones is not defined. A row with an infinite or NaN logit gives NaN, as softmax does.
    Raises: ShapeError for tensors that do not fit or top not in 1..M, also indices of a plan (read in eager mode on the
    CPU); ConfigError for an unknown execution.
    """
    check_qkv("topk", q, k, v)
    _check_top(top, k.shape[-2])
    _check_scores(q, k, scores, plan, top, rank)
    if execution not in ("auto", "dense", "gather"):
        raise ConfigError(f"execution is auto, dense or gather, not {execution!r}")
    mask = mask or NOTHING
    k, v = hide(k, mask), hide(v, mask)
    with exact_products(q.device):
        logits = _logits(q, k, rank, scale, mask)
        if plan is None and scores is None and not rank:
            best, keys = logits.topk(top, sorted=False)
        else:
            if plan is None:
                ranked = _spark_scores(wide(q), wide(k), rank, scale) if scores is None else wide(scores)
                plan = topk_plan(forbid(ranked, mask), top)
            keys = plan.keys.expand(-1, q.shape[1], -1, -1)
            best = logits.gather(-1, keys)
        a = (softmax_rows(best) if mask.kinds else best.softmax(-1)).to(v.dtype)  # (B, H, N, top)
        if execution == "gather" or (execution == "auto" and _gathers(k.shape[-2], top)):
            return _gathered(a, keys, v)
        whole = a.new_zeros(*a.shape[:-1], k.shape[-2]).scatter(-1, keys, a)
        return whole @ v


def _logits(q: Tensor, k: Tensor, rank: int, scale: float | None, mask: Mask) -> Tensor:
    """Masked logits in float32 at least."""
    q, k = wide(q), wide(k)
    if rank:
        return mask.added(spark_logits(q, k, rank, scale))
    return mask.added((q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT)


def _spark_scores(q: Tensor, k: Tensor, rank: int, scale: float | None) -> Tensor:
    """What Spark ranks: the product of the first channels; a scale below 0 turns the order."""
    sign = -1.0 if scale is not None and scale < 0 else 1.0
    return sign * q[..., :rank] @ k[..., :rank].mT


def _gathered(a: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    """Weights (B, H, N, top) times the values of each query's own keys."""
    start = v.shape[-2] * torch.arange(v.shape[0] * v.shape[1], device=v.device).view(*v.shape[:2], 1, 1)
    own = v.reshape(-1, v.shape[-1]).index_select(0, (keys + start).flatten())
    own = own.view(-1, keys.shape[-1], v.shape[-1])
    return torch.bmm(a.reshape(own.shape[0], 1, -1), own).view(*a.shape[:3], -1)


def _gathers(keys: int, top: int) -> bool:
    """Copying a query's values costs more than multiplying all of them unless few of many are kept."""
    return keys > 1024 and keys > 64 * top


def _check_top(top: int, keys: int) -> None:
    if not 1 <= top <= keys:
        raise ShapeError(f"topk: top={top}, but there are {keys} keys; choose top between 1 and {keys}")


def _check_scores(q: Tensor, k: Tensor, scores: Tensor | None, plan: TopKPlan | None, top: int, rank: int) -> None:
    if not 0 <= rank < q.shape[-1]:
        raise ShapeError(f"topk: rank={rank} of {q.shape[-1]} channels; rank is 0 or below the width")
    for label, x, last in (("scores", scores, k.shape[-2]), ("plan.keys", plan.keys if plan else None, top)):
        expected = (q.shape[0], q.shape[1], q.shape[2], last)
        if x is not None and tuple(x.shape) not in (expected, (expected[0], 1, *expected[2:])):
            raise ShapeError(
                f"topk: {label} has shape {tuple(x.shape)}; expected {expected}, or 1 in place of the heads"
            )
    if plan is not None:
        check_chosen("topk: plan.keys", plan.keys, tuple(plan.keys.shape), k.shape[-2])


@dataclass(frozen=True, kw_only=True)
class TopK(HeadMixerConfig):
    """k: keys that a query attends to. scale: factor of the logits, None = d^-0.5.

    indexer: what chooses them: "exact" the logits; "lightning" DSA's score, sum_j w_j relu(q_j . k) with `index_heads`
    small queries of `index_width` channels and one key for all heads, made from the layer's queries and keys (DSA makes
    them from its inputs). No loss of the output reaches this indexer: it learns only where a loop of the user's own
    adds `TopKOperator.index_loss` to the loss. `regard train` and studies do not, and train the rest of the network
    around an indexer that stays as it was drawn or loaded. "spark": the first `rank` channels choose, and the logit is
    their product times softplus of the product of the others; exactly k keys, not the paper's statistical threshold.
    Raises: ConfigError for numbers below 1, an unknown indexer or numbers of another one; building, if k exceeds the
    keys of the site.
    """

    k: int = 25
    scale: float | None = None
    indexer: Literal["exact", "lightning", "spark"] = "exact"
    index_heads: int = 4
    index_width: int = 32
    rank: int = 16

    card: ClassVar[Card] = Card(
        title="Exact top-k attention",
        source="Gupta et al. 2021; DSA: DeepSeek-V3.2; Spark: You et al. 2025",
        formula="softmax over the k largest q_i k_j / sqrt(d), times v",
        complexity="O(N^2 C + N k C)",
        query_content=True,
        key_content=True,
        dynamic="two-step",
        scaling=frozenset({"routing"}),
        expert_type="MLP of width k",
        expert_count="N",
        construction="light skim",
        topology="N x one-to-one",
        conditions="Q, K",
        discrete=True,
    )
    masks: ClassVar[frozenset[str]] = frozenset({"causal", "padding", "bias"})
    cross: ClassVar[bool] = True
    samples: ClassVar[tuple[str, ...]] = (
        "TopK(k=5)",
        'TopK(k=5, indexer="spark", rank=3)',
        'TopK(k=5, indexer="lightning", index_heads=2, index_width=4)',
    )

    @property
    def contract(self) -> Contract:
        skip = {"gradients": "the indexer learns from its own loss"} if self.indexer == "lightning" else {}
        positions = bool(self.dwc) or self.indexer != "exact"
        return Contract(counted={"execution": "gather"}, positions=positions, skip=skip)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = {name: getattr(self, name) for name in ("k", "index_heads", "index_width", "rank")}
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"TopK: {name} is at least 1, not {number}")
        for name, reads in (("index_heads", "lightning"), ("index_width", "lightning"), ("rank", "spark")):
            if self.indexer != reads and numbers[name] != getattr(TopK, name):
                raise ConfigError(
                    f"TopK: {name}={numbers[name]} is of indexer={reads!r}, not of {self.indexer!r}; leave it out"
                )

    def operator(self, site: Site) -> "TopKOperator":
        keys = (site.memory or site.grid).tokens
        where = f" of {site.name}" if site.name else ""
        if self.k > keys:
            raise ConfigError(f"k={self.k}, but the site{where} has {keys} keys; choose k between 1 and {keys}")
        if self.indexer == "spark" and self.rank >= site.width:
            raise ConfigError(
                f"rank={self.rank} of {site.width} channels{where}; choose between 1 and {site.width - 1}"
            )
        return TopKOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """All logits, the values of k keys a query; DSA's paper counts only the chosen logits beside its indexer."""
        n, m, inner = site.grid.tokens, (site.memory or site.grid).tokens, site.inner
        total = Cost(0, n * self.k * inner)
        if self.indexer != "lightning":
            again = n * m * self.rank * site.heads if self.indexer == "spark" else 0
            return total + Cost(0, n * m * inner + again)
        h, w = self.index_heads, self.index_width
        total += linear(n, inner, h * w, False) + linear(m, inner, w, False) + linear(n, inner, h, False)
        return total + Cost(0, n * m * h * w + (n * self.k * inner if accounting == "paper" else n * m * inner))


class TopKOperator(Operator):
    """No parameters, but those of the lightning indexer in `index`. execution: see `topk`."""

    def __init__(self, config: TopK, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        learned = config.indexer == "lightning"
        self.index = Lightning(site.inner, config.index_heads, config.index_width) if learned else None

    def plan(self, q: Tensor, k: Tensor, mask: Mask | None = None) -> TopKPlan | None:
        """The lightning indexer's selection, shared by the heads; None where the operator ranks by itself."""
        if self.index is None:
            return None
        if mask is not None and mask.bias is not None:
            mask = Mask(causal=mask.causal, keep=mask.keep)  # a bias of the heads is no matter of the shared score
        return TopKPlan(self.index.best(q, hide(k, mask), self.config.k, mask))

    def index_loss(self, q: Tensor, k: Tensor, mask: Mask | None = None) -> Tensor:
        """KL divergence from the heads' mean attention (no gradient) to the softmax of the index scores, a scalar.

        Add it to the task's loss: the selection itself passes no gradient. q (B, H, N, d), k (B, H, M, d).
        """
        if self.index is None:
            raise ConfigError(f"TopK(indexer={self.config.indexer!r}) has no indexer to train")
        return self.index.loss(q, k, self.config.scale, mask)

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
        q, k, options = self._options(q, k, mask)
        return topk(q, k, cast(Tensor, v), self.config.k, execution=self.execution, **options)

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
        q, k, options = self._options(q, k, mask)
        return topk_reference(q, k, cast(Tensor, v), self.config.k, **options)

    def _options(self, q: Tensor | None, k: Tensor | None, mask: Mask | None) -> tuple[Tensor, Tensor, dict]:
        q, k, config = cast(Tensor, q), cast(Tensor, k), self.config
        rank = config.rank if config.indexer == "spark" else 0
        plan = self.plan(q, k, mask)
        return q, k, {"scale": config.scale, "mask": mask, "plan": plan, "rank": rank}
