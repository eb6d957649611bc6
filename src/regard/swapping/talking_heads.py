"""Talking heads around a mechanism: the mixes of heads that CaiT has before and after its softmax.

The first mix takes a mechanism's logits. The operators of logits here are those of the mechanism, with its parameters,
but give (B, H, N, M) before the softmax in the place of an output. CaiT's patch layers have no extra tokens.
"""

from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Mask, MixerConfig, Operator, Site, UnsupportedError, softmax_rows
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.cska import CSKA, CSKAOperator
from regard.mixers.static_keys.cska_forms import convolved
from regard.mixers.static_keys.cska_keys import QueryKeyOperator
from regard.mixers.static_keys.ska import SKA, SKAOperator


class TalkingHeads(Operator):
    """proj_w softmax(proj_l logits) v; the maps proj_l and proj_w of the head axis are those of the host.

    logits: one of this file's operators, called as a module. The map is held whole: O(N M H) memory.
    """

    def __init__(self, logits: Operator, heads: int, bias: bool) -> None:
        super().__init__()
        self.logits = logits
        self.proj_l, self.proj_w = (nn.Linear(heads, heads, bias=bias) for _ in range(2))

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
        logits = over_heads(self.proj_l, self.logits(q, k, v, grid=grid, memory=memory))
        a = softmax_rows(logits if mask is None else mask.added(logits))
        return over_heads(self.proj_w, a) @ cast(Tensor, v)

    reference = forward


class SoftmaxLogits(Operator):
    """scale q k^T. No parameters."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

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
        return _product(cast(Tensor, q), cast(Tensor, k), self.scale)


class StaticLogits(SKAOperator):
    """scale q K^T with learned keys K (SKA)."""

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
        q = cast(Tensor, q)
        return _product(q, self.keys_on(memory or grid).to(q.dtype), self.config.scale)


class ConvolvedLogits(CSKAOperator):
    """The convolution of the query map whose output channels are the keys (CSKA)."""

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
        q = cast(Tensor, q)
        made = {name: value.to(q.dtype) for name, value in self.on(memory or grid).items()}
        if self.config.factorised:
            return _product(self._filtered(q, grid, made["kernel"]), made["keys"], self.config.scale)
        logits = convolved(q, made["weight"], made.get("bias"), grid).mT
        return logits * (self.width**-0.5 if self.config.scale is None else self.config.scale)


class QueryKeyLogits(QueryKeyOperator):
    """scale q k^T with keys that a convolution makes of the queries: CSKA(reading="key")."""

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
        return _product(*self._with_keys(cast(Tensor, q), grid, None, plain=False), self.scale)


def _product(q: Tensor, keys: Tensor, scale: float | None) -> Tensor:
    return q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def logits_of(config: HeadMixerConfig, site: Site) -> Operator:
    """The part of a mechanism before its softmax.

    Raises: UnsupportedError if it has no softmax over all keys, or static keys are to lie in windows.
    """
    if isinstance(config, Softmax):
        return SoftmaxLogits(config.scale)
    if not isinstance(config, SKA | CSKA):
        raise silent(config)
    if config.activation != "softmax" or config.resize == "window":
        said = f"activation={config.activation!r}" if config.activation != "softmax" else "resize='window'"
        raise UnsupportedError(
            f"CaiT mixes its heads before and after one softmax over all keys, which {type(config).__name__}({said}) "
            "has not; leave that out, or make the host with keep_talking=False"
        )
    if isinstance(config, SKA):
        return StaticLogits(config, site)
    if config.reading == "key":
        return QueryKeyLogits(site, config.kernel, config.bias, config.scale, config.init == "paper")
    return ConvolvedLogits(config, site)


def silent(config: MixerConfig) -> UnsupportedError:
    """The error about a mechanism that has no logits."""
    return UnsupportedError(
        f"CaiT mixes its heads before and after the softmax over all keys, which {type(config).__name__} has not; "
        "Softmax, SKA and CSKA keep that, and cait_s_32(keep_talking=False) leaves it out"
    )


def over_heads(mix: nn.Linear, a: Float[Tensor, "B H N M"]) -> Float[Tensor, "B H N M"]:
    """A linear map of the head axis."""
    return mix(a.movedim(1, -1)).movedim(-1, 1)
