"""Attention within clusters of tokens (Routing Transformer, Roy et al. 2021, Algorithm 1).

Queries and keys are normalised to one length (LayerNorm without parameters). Each of c centroids takes the N / c
queries and the M / c keys with the largest product with it, so that clusters are equally large, and these queries
attend to these keys. A token may be in several clusters, whose outputs are averaged, or in none: its output is zero.
In training, centroids follow the mean of the queries and keys that are nearest to them (k-means with a moving average).
Prefix and suffix tokens are routed like all others.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Card, ConfigError, Cost, Inputs, Operator, ShapeError, Site, operator_function
from regard.core.mask import Mask, hide, softmax_rows

from .shared.checks import check_chosen, check_site, padding_only
from .shared.heads import HeadMixerConfig
from .shared.precision import upcast, without_autocast
from .shared.sdpa import sdpa

__all__ = ["Routing", "routing", "routing_plan", "routing_reference"]


class RoutingPlan(NamedTuple):
    """queries (B, H, c, n), keys (B, H, c, m): the different tokens of each cluster, in any order."""

    queries: Int[Tensor, "B H c n"]
    keys: Int[Tensor, "B H c m"]


@operator_function
def routing_plan(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], centroids: Float[Tensor, "H c d"], *,
    mask: Mask | None = None, keep: Bool[Tensor, "B N"] | None = None,
) -> RoutingPlan:  # fmt: skip
    """Each centroid takes the queries and the keys with the largest products, N / c and M / c of them, rounded up.

    mask: padding of the keys, which is taken last; keep: of the queries, False for padding. Products are in float32 for
    half precision; ties are broken arbitrarily; no gradient.
    Raises: ShapeError for tensors that do not fit; UnsupportedError for other masks.
    """
    mask = padding_only("routing_plan", mask)
    with torch.no_grad(), without_autocast(q.device):
        means = upcast(centroids)
        scores = []
        for x, real in ((q, keep), (k, mask.keep)):
            products = means @ upcast(hide(x, None if real is None else Mask(keep=real))).mT  # (B, H, c, N | M)
            scores.append(products if real is None else products.masked_fill(~real[:, None, None], -torch.inf))
        return RoutingPlan(*(x.topk(-(-x.shape[-1] // len(means[0])), sorted=False).indices for x in scores))


@operator_function
def routing_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], plan: RoutingPlan, *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The mean, over the clusters of a query, of softmax attention to the keys of the cluster."""
    _check_plan(q, k, plan)
    mask = padding_only("routing", mask)
    k, v = hide(k, mask), hide(v, mask)
    logits = mask.add_to(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale))
    total, count = torch.zeros_like(q[..., :1]) * v[..., :1, :], torch.zeros_like(q[..., :1])
    for queries, keys in zip(plan.queries.unbind(2), plan.keys.unbind(2), strict=True):
        inside = torch.zeros_like(logits[..., 0, :]).scatter(-1, keys, 1.0).bool()[..., None, :]
        member = torch.zeros_like(q[..., 0]).scatter(-1, queries, 1.0)[..., None]
        total = total + member * (softmax_rows(logits.masked_fill(~inside, -torch.inf)).to(v.dtype) @ v)
        count = count + member
    return total / count.clamp_min(1)


@operator_function
def routing(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], plan: RoutingPlan, *,
    scale: float | None = None, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same on the tokens of each cluster, with memory N M / c.

    plan: see `routing_plan`. scale: None = d^-0.5. mask: padding only; a query without any key gives zeros.
    Raises: ShapeError for tensors that do not fit, also indices of the plan (read in eager mode on the CPU);
    UnsupportedError for other masks.
    """
    _check_plan(q, k, plan)
    mask = padding_only("routing", mask)
    keep = None
    if mask.keep is not None:
        keep = mask.keep[:, None].expand(-1, q.shape[1], -1).gather(-1, plan.keys.flatten(2))
        keep = keep.view(plan.keys.shape).flatten(0, 1)[:, :, None]  # (B H, c, 1, m)
    tokens = (plan.queries, plan.keys, plan.keys)
    parts = (_take(x, index).flatten(0, 1) for x, index in zip((q, hide(k, mask), hide(v, mask)), tokens, strict=True))
    out = upcast(sdpa(*parts, attn_mask=keep, scale=scale)).flatten(1, 2).unflatten(0, q.shape[:2])  # (B, H, c n, e)
    index = plan.queries.flatten(2)[..., None]
    total = out.new_zeros(*q.shape[:3], v.shape[-1]).scatter_add(2, index.expand_as(out), out)
    count = out.new_zeros(*q.shape[:3], 1).scatter_add(2, index, torch.ones_like(out[..., :1]))
    return (total / count.clamp_min(1)).to(v.dtype)


def _take(x: Float[Tensor, "B H N d"], tokens: Int[Tensor, "B H c n"]) -> Float[Tensor, "B H c n d"]:
    rows = x.gather(2, tokens.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1]))
    return rows.unflatten(2, tokens.shape[2:])


def _check_plan(q: Tensor, k: Tensor, plan: RoutingPlan) -> None:
    if plan.queries.shape[:3] != plan.keys.shape[:3]:
        shapes = f"{tuple(plan.queries.shape)} and {tuple(plan.keys.shape)}"
        raise ShapeError(f"routing: plan.queries and plan.keys have shapes {shapes}; expected as many clusters")
    for name, x, tokens in (("queries", plan.queries, q), ("keys", plan.keys, k)):
        check_chosen(f"routing: plan.{name}", x, (*q.shape[:2], *x.shape[2:]), tokens.shape[-2])


@dataclass(frozen=True, kw_only=True)
class Routing(HeadMixerConfig):
    """clusters: centroids of each head; the paper has about the square root of the number of tokens.

    decay: of the moving average, in which the centroids keep this share at each training step. scale: factor of the
    logits, None = d^-0.5.
    Raises: ConfigError for clusters below 1 or a decay outside 0 to 1; building, if there are more clusters than
    tokens.
    """

    clusters: int = 14
    decay: float = 0.999
    scale: float | None = None

    card = Card(
        title="Routing by k-means", source="Roy et al. 2021 (Routing Transformer), Algorithm 1",
        formula="softmax(q_i k_c^T / sqrt(d)) v_c,  c = keys of the centroids that chose q_i",
        complexity="O(N c C + N^2 C / c)", query_content=True, key_content=True, dynamic="two-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width N / c", expert_count="c", construction="k-means",
        topology="c x N/c-to-one", conditions="Q, K", discrete=True, prefix="routed like all tokens",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    cross = True
    ordered = False
    samples = ("Routing(clusters=3)", "Routing(clusters=5, scale=0.7, dwc=3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1 or not 0 <= self.decay <= 1:
            given = f"clusters={self.clusters}, decay={self.decay}"
            raise ConfigError(f"Routing: clusters is at least 1 and decay from 0 to 1, not {given}")

    def operator(self, site: Site) -> "RoutingOperator":
        for role, what in (("q", "queries"), ("k", "keys")):
            check_site("clusters", self.clusters, site, site.tokens(role), what)
        return RoutingOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Products of queries and keys with the centroids; logits and values of the clusters."""
        n, m, c = site.tokens("q"), site.tokens("k"), self.clusters
        return Cost(0, ((n + m) * c + 2 * c * -(-n // c) * -(-m // c)) * site.inner)


class RoutingOperator(Operator):
    """centroids (H, c, d): a buffer, of length sqrt(d).

    A layer that a checkpoint runs again in the backward pass takes the centroids of its forward pass, the last first,
    and does not move them again.
    """

    centroids: Tensor

    def __init__(self, config: Routing, site: Site) -> None:
        super().__init__()
        self.config = config
        start = torch.randn(site.heads, config.clusters, site.width)
        self.register_buffer("centroids", F.layer_norm(start, (site.width,)))
        self._of_passes: deque[Tensor] = deque(maxlen=16)  # centroids of forward passes, before they moved

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        mask, own = padding_only("Routing", inputs.mask), inputs.memory is None
        keep = mask.keep if own else None  # of the queries, where they are the tokens that the mask speaks of
        q, k = hide(inputs.q, mask) if own else inputs.q, hide(inputs.k, mask)
        q, k = (F.layer_norm(x, x.shape[-1:]).to(inputs.v.dtype) for x in (q, k))
        learns = self.training and torch.is_grad_enabled()
        again = learns and _runs_again()
        centroids = self._of_passes.pop() if again and self._of_passes else self.centroids
        plan = routing_plan(q, k, centroids, mask=mask, keep=keep)
        if learns and not again:
            if not torch.compiler.is_compiling():
                self._of_passes.append(self.centroids.clone())
            real = None
            if mask.keep is not None:
                real = torch.cat(
                    [torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if keep is None else keep, mask.keep], 1
                )
            self.follow(torch.cat([q, k], 2), real)
        form = routing_reference if plain else routing
        return form(q, k, inputs.v, plan, scale=self.config.scale, mask=mask)

    @torch.no_grad()
    def follow(self, x: Float[Tensor, "B H N d"], keep: Bool[Tensor, "B N"] | None) -> None:
        """Move each centroid towards the mean of the tokens whose product with it is their largest; others stay."""
        x = upcast(x).to(self.centroids.dtype)
        nearest = F.one_hot((x @ self.centroids.mT).argmax(-1), self.config.clusters).to(x.dtype)  # (B, H, N, c)
        nearest = nearest if keep is None else nearest * keep[:, None, :, None]
        number = nearest.sum((0, 2))[..., None]  # (H, c, 1)
        mean = F.layer_norm((nearest.mT @ x).sum(0) / number.clamp_min(1), x.shape[-1:])
        moved = self.config.decay * self.centroids + (1 - self.config.decay) * mean
        self.centroids.copy_(torch.where(number > 0, moved, self.centroids))


def _runs_again() -> bool:
    """Whether a checkpoint repeats a pass that has moved the centroids; the first one of a reentrant checkpoint has no
    gradient, so that its second one moves them."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    return torch._C._current_autograd_node().name() != "CheckpointFunctionBackward"
