"""Sparse attention whose mask is predicted from a skim of low rank (Sparsifiner, Wei et al. 2023, Sec. 3).

    skim = softmax(W_q q (E W_k k)^T / sqrt(c)) U,   y = softmax(q k^T / sqrt(d)) v over the k keys of the largest skim

W_q and W_k make c channels of a head's d, alike for all heads; E (m, M) projects keys to m rows, and U (m, M) is a
basis of m rows of connections. The mask passes no gradient: these parameters learn from the distance of the skim to the
attention, which `regard train` adds to the loss of the task (the published code also trains them in a stage before).
The published code can also hide small entries of U and of its coefficients, which only makes products sparse, and shows
all keys to its class token; here prefix and suffix tokens are queries and keys like all others.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Contract, Cost, Grid, Inputs, Operator, Site, linear_cost
from regard.core.mask import NO_MASK, Mask, hide, softmax_rows

from .linformer import Linformer, TokenProjection
from .shared.checks import check_site
from .shared.heads import HeadMixerConfig
from .shared.precision import upcast, upcast_dtype, without_autocast
from .topk.topk import topk, topk_reference

__all__ = ["Sparsifiner"]


@dataclass(frozen=True, kw_only=True)
class Sparsifiner(HeadMixerConfig):
    """k: keys that a query attends to (published: a quarter of the tokens). m: rows of the basis (an eighth of them).

    channels: of a head in the skim (half of them). scale: factor of the logits, None = d^-0.5. Parameters belong to one
    grid; on another grid E and U are resampled.
    Raises: ConfigError for numbers below 1; building, if k or m exceeds the keys of the site.
    """

    k: int = 49
    m: int = 24
    channels: int = 32
    scale: float | None = None

    card = Card(
        title="Sparse attention with a predicted mask", source="Wei et al. 2023 (Sparsifiner), Sec. 3",
        formula="softmax over the k largest of softmax(W_q q (E W_k k)^T) U of q k^T / sqrt(d), times v",
        complexity="O(N^2 m H + N k C)", query_content=True, key_content=True, dynamic="two-step",
        scaling=frozenset({"routing"}), expert_type="MLP of width k", expert_count="N",
        construction="learned low-rank mask", topology="N x one-to-one", conditions="Q, K", discrete=True,
    )  # fmt: skip
    masks = frozenset({"padding", "bias"})
    depth = True
    cross = True
    samples = ("Sparsifiner(k=5, m=3, channels=4)", "Sparsifiner(k=6, m=2, channels=3, scale=0.7)")

    @property
    def contract(self) -> Contract:
        return Contract(
            counted={"execution": "gather"}, skip={"gradients": "the predictor of the mask learns from a separate loss"}
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.k, self.m, self.channels) < 1:
            given = f"k={self.k}, m={self.m}, channels={self.channels}"
            raise ConfigError(f"Sparsifiner: k, m and channels are at least 1, not {given}")

    def operator(self, site: Site) -> "SparsifinerOperator":
        for name in ("k", "m"):
            check_site(name, getattr(self, name), site, site.tokens("k"), "keys")
        return SparsifinerOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The skim, all logits and the values of k keys per query; the paper counts the chosen logits only."""
        n, keys, heads, c = site.tokens("q"), site.tokens("k"), site.heads, self.channels
        skim = self.m * heads * (keys * c + n * c + n * keys)
        logits = n * (self.k if accounting == "paper" else keys) * site.inner
        linear = [linear_cost(tokens * heads, site.width, c) for tokens in (n, keys)]
        return linear[0] + linear[1] + Cost(2 * self.m * keys, skim + logits + n * self.k * site.inner)


class SparsifinerOperator(Operator):
    """query, key (c, d): W_q and W_k; project: E; basis: U. execution: see `topk`."""

    def __init__(self, config: Sparsifiner, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.query, self.key = (nn.Linear(site.width, config.channels) for _ in range(2))
        self.project, self.basis = (TokenProjection(Linformer(m=config.m, init="normal"), site) for _ in range(2))

    def skim(
        self, q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], grid: Grid, mask: Mask | None = None
    ) -> Float[Tensor, "B H N M"]:
        """The approximate attention, in float32 at least. grid: of the keys; padding counts as 0."""
        with without_autocast(q.device):
            wide = upcast_dtype(q)
            x, y = (
                nn.functional.linear(z.to(wide), layer.weight.to(wide), layer.bias.to(wide))
                for z, layer in ((q, self.query), (hide(k, mask), self.key))
            )
            rows = self.project(grid).to(wide) @ hide(y, mask)  # (B, H, m, c)
            return (x @ rows.mT * self.config.channels**-0.5).softmax(-1) @ self.basis(grid).to(wide)

    def own_loss(self, inputs: Inputs) -> Float[Tensor, ""]:
        """Mean over queries and heads of the squared distance of the skim to the attention; q and k get no gradient."""
        q, k, mask = inputs.q.detach(), hide(inputs.k.detach(), inputs.mask), inputs.mask
        scale = q.shape[-1] ** -0.5 if self.config.scale is None else self.config.scale
        with without_autocast(q.device):
            attention = softmax_rows((mask or NO_MASK).add_to(upcast(q) @ upcast(k).mT * scale))
        return (self.skim(q, k, inputs.key_grid, mask) - attention).square().sum(-1).mean()

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        with torch.no_grad():
            scores = self.skim(inputs.q, inputs.k, inputs.key_grid, inputs.mask)
        form = topk_reference if plain else partial(topk, execution=self.execution)
        q, k, v, config = inputs.q, inputs.k, inputs.v, self.config
        out: Tensor = form(q, k, v, config.k, scale=config.scale, mask=inputs.mask, scores=scores)
        return out
