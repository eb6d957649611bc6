"""Translation blocks with relative positions (Zhu et al. 2019, Figures 2b and 2c): an encoder and a decoder layer.

    x <- norm(x + drop(Self(Unit(x))))         Self: any mechanism
    x <- norm(x + drop(Cross(x, memory)))      decoder only; delta = source index - target index
    x <- norm(x + drop(W_2 ReLU(W_1 x)))

With pre-norm x <- x + drop(F(norm(x))) instead; the stack then ends with another norm, which is not part of a layer.
Self may also be a dynamic convolution (2b). Unit, optional, is a deformable convolution along the sequence, kernel 3
(2c). There are no absolute positions. The decoder's self-attention and unit are causal. Padded tokens are not used as
keys or sampling points; their own outputs are undefined.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mask, Mixer, MixerConfig, ShapeError, Site, UnsupportedError
from regard.mixers.convolutions.deformable import DeformableConv, DeformableConv1d, DeformableConvMixer
from regard.mixers.factors.factors import Factors
from regard.mixers.shared.heads import CrossMixer, HeadMixerConfig
from regard.mixers.spelling import parse_mixer, spell

FACTORS = Factors(terms="1111", axes=1)
UNIT = DeformableConv(kernel=3, axes=1)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The configuration of a translation layer; defaults are those of the base Transformer.

    attention: the mechanism of self-attention; its `axes` and `causal` are set if it has them; None: no self-attention
    and no unit. cross: the mechanism of the attention to the encoder. unit: the deformable convolution before
    self-attention, None = none. Each may be a spelling. dirac: the unit is initialised as the identity, otherwise as
    usual. hidden: width of the feed-forward net. drop: dropout of every branch. length: tokens at build time; other
    lengths may follow. norm: after each branch is added ("post"), or before each branch ("pre").
    Raises: ConfigError; UnsupportedError if cross cannot attend to another input of any length.
    """

    dim: int = 512
    heads: int = 8
    attention: MixerConfig | str | None = FACTORS
    cross: HeadMixerConfig | str = FACTORS
    unit: DeformableConv | str | None = None
    dirac: bool = True
    hidden: int = 2048
    drop: float = 0.1
    length: int = 64
    norm: Literal["post", "pre"] = "post"

    def __post_init__(self) -> None:
        if self.norm not in ("post", "pre"):
            raise ConfigError(f'norm is "post" or "pre", not {self.norm!r}')
        if min(self.hidden, self.length) < 1 or not 0 <= self.drop < 1:
            raise ConfigError(
                "hidden and length are at least 1 and drop is a fraction below 1, not "
                f"hidden={self.hidden}, length={self.length}, drop={self.drop}"
            )
        kinds = {
            "attention": (MixerConfig, FACTORS),
            "cross": (HeadMixerConfig, FACTORS),
            "unit": (DeformableConv, UNIT),
        }
        for name, (kind, example) in kinds.items():
            value = getattr(self, name)
            value = parse_mixer(value) if isinstance(value, str) else value
            if not (isinstance(value, kind) or (value is None and name != "cross")):
                raise ConfigError(f"{name} is a configuration such as {spell(example)}, not {value!r}")
            object.__setattr__(self, name, value)
        if not self.cross.cross:  # type: ignore[union-attr]
            raise UnsupportedError(f"{spell(self.cross)} cannot attend to another input; give a cross= that can")
        if self.attention is None and self.unit is not None:
            raise ConfigError("the deformable unit comes before self-attention: attention=None needs unit=None")

    def site(self, name: str) -> Site:
        """The site of an attention: dim, heads and a sequence of `length`; no biases of queries, keys and values."""
        return Site(
            dim=self.dim, heads=self.heads, grid=Grid.sequence(self.length), qkv_bias=False, name=name,
            memory=Grid.sequence(self.length) if name == "cross_attn" else None,
        )  # fmt: skip


def on_sequences(config: MixerConfig, causal: bool) -> MixerConfig:
    """The mechanism with `axes=1` and this `causal`, if it has such fields.

    Raises: UnsupportedError if it should be causal and cannot be.
    """
    names = {item.name for item in fields(config)}
    changes: dict[str, Any] = {name: value for name, value in (("axes", 1), ("causal", causal)) if name in names}
    changed = replace(config, **changes) if changes else config
    if causal and "causal" not in changed.masks:
        can = ", ".join(sorted(changed.masks)) or "none"
        raise UnsupportedError(f"{spell(config)} cannot be causal (masks it can apply: {can}): not in a decoder")
    return changed


class SelfBranch(nn.Module):
    """Attn(Unit(x)) on a sequence; both causal or both not."""

    def __init__(self, layer: Layer, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        site = layer.site("self_attn")
        self.unit: Mixer | None = None
        if layer.unit is not None:
            self.unit = on_sequences(cast(DeformableConv, layer.unit), causal).build(site)
            if layer.dirac:
                init_as_identity(cast(DeformableConvMixer, self.unit))
        self.attn = on_sequences(cast(MixerConfig, layer.attention), causal).build(site)

    def forward(self, x: Float[Tensor, "B N C"], keep: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N C"]:
        grid = Grid.sequence(x.shape[1])
        mask = Mask(causal=self.causal, keep=keep) if self.causal or keep is not None else None
        if self.unit is not None:
            x = self.unit(x, grid, mask)
        return cast(Tensor, self.attn(x, grid, mask))


class FeedForward(nn.Sequential):
    """W_2 drop(ReLU(W_1 x))."""

    def __init__(self, dim: int, hidden: int, drop: float) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(drop), nn.Linear(hidden, dim))


class ResidualLayer(nn.Module):
    """Branches that are added to their input, with post-norm or pre-norm; the first one is self-attention."""

    def __init__(self, layer: Layer, causal: bool) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn: Any = None if layer.attention is None else SelfBranch(layer, causal)
        self.norm1 = None if layer.attention is None else nn.LayerNorm(layer.dim)
        self.drop = nn.Dropout(layer.drop)

    def add(self, x: Tensor, norm: nn.Module | None, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """norm(x + drop(branch(x))), or x + drop(branch(norm(x))); x itself without a norm."""
        if norm is None:
            return x
        if self.layer.norm == "pre":
            return x + self.drop(branch(norm(x)))
        return norm(x + self.drop(branch(x)))


class EncoderLayer(ResidualLayer):
    """Self-attention and feed-forward net. Raises: ConfigError and others of the mechanisms."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer, causal=False)
        self.mlp, self.norm2 = FeedForward(layer.dim, layer.hidden, layer.drop), nn.LayerNorm(layer.dim)

    def forward(self, x: Float[Tensor, "B N C"], keep: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N C"]:
        """keep: False where a token is padding. Raises: ShapeError."""
        check_tokens(x, keep, self.layer.dim, "x")
        x = self.add(x, self.norm1, lambda y: self.self_attn(y, keep))
        return self.add(x, self.norm2, self.mlp)


class DecoderLayer(ResidualLayer):
    """Causal self-attention, attention to the encoder's output and feed-forward net."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer, causal=True)
        cross = cast(HeadMixerConfig, on_sequences(cast(HeadMixerConfig, layer.cross), causal=False))
        self.cross_attn: CrossMixer = cross.build_cross(layer.site("cross_attn"))
        self.norm2 = nn.LayerNorm(layer.dim)
        self.mlp, self.norm3 = FeedForward(layer.dim, layer.hidden, layer.drop), nn.LayerNorm(layer.dim)

    def forward(
        self,
        x: Float[Tensor, "B N C"],
        memory: Float[Tensor, "B M C"],
        keep: Bool[Tensor, "B N"] | None = None,
        memory_keep: Bool[Tensor, "B M"] | None = None,
    ) -> Float[Tensor, "B N C"]:
        """memory: the encoder's output. keep, memory_keep: False where a token is padding. Raises: ShapeError."""
        check_tokens(x, keep, self.layer.dim, "x")
        check_tokens(memory, memory_keep, self.layer.dim, "memory")
        x = self.add(x, self.norm1, lambda y: self.self_attn(y, keep))
        x = self.add(x, self.norm2, lambda y: attend(self.cross_attn, y, memory, memory_keep))
        return self.add(x, self.norm3, self.mlp)


def attend(
    cross: CrossMixer,
    x: Float[Tensor, "B N C"],
    memory: Float[Tensor, "B M C"],
    memory_keep: Bool[Tensor, "B M"] | None = None,
) -> Float[Tensor, "B N C"]:
    """Attention of one sequence to another. memory_keep: False where a token of the memory is padding."""
    mask = None if memory_keep is None else Mask(keep=memory_keep)
    grid, memory_grid = Grid.sequence(x.shape[1]), Grid.sequence(memory.shape[1])
    return cast(Tensor, cross(x, grid, mask, memory=memory, memory_grid=memory_grid))


def stack(make: Callable[[Layer], nn.Module], layer: Layer, depth: int = 6) -> nn.ModuleList:
    """`depth` layers of a class: stack(EncoderLayer, Layer()) is the base Transformer's encoder without embeddings."""
    if depth < 1:
        raise ConfigError(f"depth is at least 1, not {depth}")
    return nn.ModuleList(make(layer) for _ in range(depth))


@torch.no_grad()
def init_as_identity(unit: DeformableConvMixer) -> None:
    """Set the weights of a unit to the identity, in place: 1 at the sampling point of the query; offsets are 0 already.

    Raises: UnsupportedError for a unit on maps, or one that scales its samples.
    """
    conv, config = unit.conv, unit.config
    if not isinstance(conv, DeformableConv1d) or (config.version == 2 and config.mask_init != 1):
        raise UnsupportedError(f"{spell(config)} cannot be initialised as the identity: give axes=1 and mask_init=1.0")
    conv.weight.zero_()
    query_index = config.kernel - 1 if config.causal else config.kernel // 2
    conv.weight[:, :, 0, query_index] = torch.eye(
        conv.weight.shape[0], dtype=conv.weight.dtype, device=conv.weight.device
    )
    if conv.bias is not None:
        conv.bias.zero_()


def check_tokens(x: Tensor, keep: Tensor | None, dim: int, name: str) -> None:
    """Raises: ShapeError unless x is (batch, tokens, dim) and keep is None or a boolean (batch, tokens)."""
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected (batch, tokens, {dim})")
    if keep is not None and (keep.shape != x.shape[:2] or keep.dtype != torch.bool):
        actual = f"{keep.dtype} {tuple(keep.shape)}"
        raise ShapeError(
            f"the padding mask of {name} is {actual}; expected bool {tuple(x.shape[:2])}, True for real tokens"
        )
