"""Talking heads around a mechanism: CaiT's linear maps over the heads, before and after the softmax.

The first map needs the logits of a mechanism. The logits operators in this file have the parameters of the mechanism's
operator, but return the logits (B, H, N, M) instead of an output. CaiT's patch layers have only patch tokens.
"""

from jaxtyping import Float
from torch import Tensor, nn

from regard.core import NO_MASK, Inputs, MixerConfig, Operator, Site, UnsupportedError, softmax_rows
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.cska import CSKA, CSKAOperator
from regard.mixers.static_keys.cska_forms import convolved_logits
from regard.mixers.static_keys.cska_keys import QueryKeyOperator
from regard.mixers.static_keys.ska import SKA, SKAOperator


class TalkingHeads(Operator):
    """proj_w softmax(proj_l logits) v, with the host's linear maps proj_l and proj_w over the heads.

    logits: a logits operator of this file. The whole attention map is in memory: O(N M H).
    """

    def __init__(self, logits: Operator, heads: int, bias: bool) -> None:
        super().__init__()
        self.logits = logits
        self.proj_l, self.proj_w = (nn.Linear(heads, heads, bias=bias) for _ in range(2))

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        logits = self.logits(inputs.q, inputs.k, inputs.v, grid=inputs.grid, memory=inputs.memory)
        logits = mix_heads(self.proj_l, logits)
        a = softmax_rows((inputs.mask or NO_MASK).add_to(logits))
        return mix_heads(self.proj_w, a) @ inputs.v


class SoftmaxLogits(Operator):
    """scale q k^T. No parameters."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        return _product(inputs.q, inputs.k, self.scale)


class StaticLogits(SKAOperator):
    """scale q K^T with learned keys K (SKA)."""

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        return _product(inputs.q, self.keys_on(inputs.key_grid).to(inputs.q.dtype), self.config.scale)


class ConvolvedLogits(CSKAOperator):
    """The convolution of the query map whose output channels are the keys (CSKA)."""

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, grid = inputs.q, inputs.grid
        constants = {name: value.to(q.dtype) for name, value in self.on(inputs.key_grid).items()}
        if self.config.factorised:
            return _product(self._convolve_queries(q, grid, constants["kernel"]), constants["keys"], self.config.scale)
        logits = convolved_logits(q, constants["weight"], constants.get("bias"), grid).mT
        return logits * (self.width**-0.5 if self.config.scale is None else self.config.scale)


class QueryKeyLogits(QueryKeyOperator):
    """scale q k^T with keys that a convolution of the queries gives: CSKA(reading="key")."""

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        return _product(*self._with_keys(inputs.q, inputs.grid, None, plain), self.scale)


def _product(q: Tensor, keys: Tensor, scale: float | None) -> Tensor:
    return q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def logits_operator(config: HeadMixerConfig, site: Site) -> Operator:
    """The operator of a mechanism's logits.

    Raises: UnsupportedError if it has no softmax over all keys, or static keys with resize="window" or a stride.
    """
    if isinstance(config, Softmax):
        return SoftmaxLogits(config.scale)
    if not isinstance(config, SKA | CSKA):
        raise no_logits_error(config)
    options = ("activation", "softmax"), ("stride", 1)
    changed = [name for name, plain in options if getattr(config, name, plain) != plain]
    changed += ["resize"] if config.resize == "window" else []
    if changed:
        option = f"{changed[0]}={getattr(config, changed[0])!r}"
        raise UnsupportedError(
            "the host mixes its heads before and after one softmax over all keys, which "
            f"{type(config).__name__}({option}) does not have; leave that option out, or make the host with "
            "keep_talking=False"
        )
    if isinstance(config, SKA):
        return StaticLogits(config, site)
    if config.reading == "key":
        return QueryKeyLogits(site, config.kernel, config.bias, config.scale, config.init == "paper")
    return ConvolvedLogits(config, site)


def no_logits_error(config: MixerConfig) -> UnsupportedError:
    """The error for a mechanism without logits over all keys."""
    return UnsupportedError(
        f"the host mixes its heads before and after the softmax over all keys, which {type(config).__name__} does not "
        "have; Softmax, SKA and CSKA have it, and the host cait_s_32(keep_talking=False) has no mixing"
    )


def mix_heads(mix: nn.Module, a: Float[Tensor, "B H N M"]) -> Float[Tensor, "B H N M"]:
    """A linear map of the head axis, which is the last one for `mix`."""
    mixed: Tensor = mix(a.movedim(1, -1))
    return mixed.movedim(-1, 1)
