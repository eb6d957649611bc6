"""sequence_encoder: the host of long sequences, the Transformer encoder of the Long Range Arena in MiTA's Table 5.

Two pre-norm layers of 64 channels, two heads and a feed-forward net of 128, learned positions, mean pooling over the
tokens, and a head 64 -> 128 -> classes. It is the model of Nystroemformer (Xiong et al. 2021), whose code MiTA uses.
Id 0 is padding. A mechanism that can apply a padding mask gets it, so that padding is no key; for the others padded
tokens are part of the input, as in the published setting.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from timm.layers import Mlp
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mask, ShapeError
from regard.swapping.layer import Port

SIZES = ("dim", "depth", "heads", "ffn", "length", "grams", "merge", "hidden")
GRAM_ROWS, GRAM_FACTOR, GRAM_PRIME = 2**13, 1_000_003, 2**31 - 1
POOLS = ("masked_mean", "padded_mean")


class SequencePort(Port):
    """Tokens of a sequence, a grid of one row, with the padding mask if the mechanism can apply one."""

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return Grid.sequence(module.length)

    def forward(self, x: Float[Tensor, "B N C"], keep: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N C"]:
        masked = keep is not None and "padding" in self.mixer.config.masks
        return self.mixer(x, Grid.sequence(x.shape[1]), Mask(keep=keep) if masked else None)  # type: ignore[no-any-return]


class SequenceAttention(nn.Module):
    """The host's own attention, softmax over all tokens that are no padding."""

    port = SequencePort

    def __init__(self, dim: int, heads: int, length: int, attn_drop: float, drop: float) -> None:
        super().__init__()
        self.num_heads, self.length, self.attn_drop = heads, length, attn_drop
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x: Float[Tensor, "B N C"], keep: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N C"]:
        """keep: False where a token is padding; a sequence of padding alone gives the projection's bias."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if keep is None else keep[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.attn_drop if self.training else 0.0)
        if mask is not None:
            y = y.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        projected: Tensor = self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))
        return projected


class SequenceBlock(nn.Module):
    """x + Attn(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, dim: int, heads: int, ffn: int, length: int, attn_drop: float, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SequenceAttention(dim, heads, length, attn_drop, drop)
        self.mlp = Mlp(dim, ffn, act_layer=nn.GELU, drop=drop)

    def forward(self, x: Float[Tensor, "B N C"], keep: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N C"]:
        x = x + self.attn(self.norm1(x), keep)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Grams(nn.Module):
    """Embeddings of the last 2, 3, ... `longest` symbols at every place, hashed into `GRAM_ROWS` rows each.

    The hash n-gram embeddings of the Byte Latent Transformer (Pagnoni et al. 2024, Section 3.2.1).
    """

    def __init__(self, dim: int, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.embed = nn.Embedding((longest - 1) * GRAM_ROWS, dim)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: Int[Tensor, "B N"]) -> Float[Tensor, "B N C"]:
        """The sum over the lengths; symbols before the first one count as padding."""
        rows, hashed = [], ids
        for back in range(1, self.longest):
            hashed = (hashed * GRAM_FACTOR + F.pad(ids, (back, 0))[:, : ids.shape[1]]) % GRAM_PRIME
            rows.append(hashed % GRAM_ROWS + (back - 1) * GRAM_ROWS)
        return self.embed(torch.stack(rows)).sum(0)  # type: ignore[no-any-return]


class Merge(nn.Module):
    """`merge` symbols become a token: GELU of a convolution of width 2 merge, stride merge, over normed embeddings."""

    def __init__(self, dim: int, merge: int) -> None:
        super().__init__()
        self.merge = merge
        self.norm, self.conv = nn.LayerNorm(dim), nn.Conv1d(dim, dim, 2 * merge, merge)

    def forward(self, x: Float[Tensor, "B N C"], keep: Bool[Tensor, "B N"]) -> tuple[Tensor, Tensor]:
        """Tokens (B, N / merge rounded up, C), and which have a symbol that is no padding."""
        end = -x.shape[1] % self.merge
        before = self.merge // 2
        x = F.pad((self.norm(x) * keep[..., None]).mT, (before, self.merge - before + end))
        return F.gelu(self.conv(x)).mT, F.pad(keep, (0, end)).unflatten(1, (-1, self.merge)).any(-1)


class SequenceClassifier(nn.Module):
    """Ids (B, N) -> class scores (B, classes); with `pairs` ids (B, 2, N), both encoded with the same weights.

    See `sequence_encoder` for the options.
    """

    def __init__(
        self, dim: int, depth: int, heads: int, ffn: int, length: int, vocabulary: int, grams: int, merge: int,
        pool: str, num_classes: int, pairs: bool, mask: bool, hidden: int, drop: float, attn_drop: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.length, self.vocabulary, self.pool, self.pairs, self.mask = length, vocabulary, pool, pairs, mask
        tokens = -(-length // merge)
        self.embed, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(tokens, dim)
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.grams = None if grams == 1 else Grams(dim, grams)
        self.merge = None if merge == 1 else Merge(dim, merge)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(SequenceBlock(dim, heads, ffn, tokens, attn_drop, drop) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(nn.Linear((1 + 3 * pairs) * dim, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def example_input(self) -> Int[Tensor, "1 ..."]:
        """One input of the model, all symbols in turn and no padding: (1, length), with `pairs` (1, 2, length)."""
        ids = (torch.arange(self.length) % (self.vocabulary - 1) + 1)[None]
        return torch.stack([ids, ids], 1) if self.pairs else ids

    def encode(self, ids: Int[Tensor, "B N"]) -> Float[Tensor, "B C"]:
        """The mean of the tokens after the last layer, padding zeroed: over the real ones, or over all N."""
        keep = ids != 0
        x = self.embed(ids)
        if self.grams is not None:
            x = (x + self.grams(ids)) / self.grams.longest
        if self.merge is not None:
            x, keep = self.merge(x, keep)
        x = self.drop(x + self.positions.weight[: x.shape[1]])
        for block in self.blocks:
            x = block(x, keep if self.mask else None)
        total = (self.norm(x) * keep[..., None]).sum(1)
        if self.pool == "padded_mean":
            return total / x.shape[1]
        return total / keep.sum(1, keepdim=True).clamp(min=1)

    def forward(self, ids: Int[Tensor, "B ..."]) -> Float[Tensor, "B classes"]:
        """ids: whole numbers from 0 (padding) to vocabulary - 1; at most `length` in a row. Raises: ShapeError."""
        if ids.ndim != 2 + self.pairs or ids.shape[-1] > self.length or (self.pairs and ids.shape[1] != 2):
            middle = "2, " if self.pairs else ""
            raise ShapeError(
                f"ids have shape {tuple(ids.shape)}; expected (batch, {middle}tokens) with at most {self.length} tokens"
            )
        if not self.pairs:
            return self.head(self.encode(ids))  # type: ignore[no-any-return]
        a, b = self.encode(ids.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([a, b, a * b, a - b], -1))  # type: ignore[no-any-return]


def sequence_encoder(
    *, dim: int = 64, depth: int = 2, heads: int = 2, ffn: int = 128, length: int = 96, vocabulary: int = 257,
    grams: int = 1, merge: int = 1, pool: str = "masked_mean", num_classes: int = 10, pairs: bool = False,
    mask: bool = True, hidden: int = 128, drop: float = 0.1, attn_drop: float = 0.0,
) -> SequenceClassifier:  # fmt: skip
    """The encoder of the Long Range Arena (see the module); defaults are those of MiTA's Table 5 but for two.

    ffn: width of the feed-forward net. length: symbols of a padded sequence. vocabulary: number of ids, with padding.
    grams: embeddings of the last 1 .. grams symbols at every place; 1 = of the symbol alone, as published. merge:
    symbols that become one token, by a convolution before the first layer; 1 = none, as published. pool:
    "masked_mean", over real tokens, so that the number of padded ones has no effect where a mechanism masks them;
    "padded_mean", the published one, over all tokens. pairs: two sequences a and b are compared, and the head gets
    [a, b, a * b, a - b]. mask: the padding mask, for mechanisms that can apply one; the published models have it.
    hidden: width of the head. drop: of embeddings and branches. attn_drop: of the host's own attention weights, 0.1 in
    the published models; mechanisms have none. Raises: ConfigError.
    """
    for name, value in zip(SIZES, (dim, depth, heads, ffn, length, grams, merge, hidden), strict=True):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"sequence_encoder: {name} is a whole number from 1, not {value!r}")
    if dim % heads:
        raise ConfigError(f"sequence_encoder: dim {dim} is not a multiple of {heads} heads")
    if vocabulary < 2 or num_classes < 1:
        raise ConfigError(
            f"sequence_encoder: vocabulary counts padding and a symbol and there is a class; not {vocabulary} ids "
            f"and {num_classes} classes"
        )
    if pool not in POOLS:
        raise ConfigError(f"sequence_encoder: pool is one of {', '.join(POOLS)}, not {pool!r}")
    if not 0 <= drop < 1 or not 0 <= attn_drop < 1:
        raise ConfigError(f"sequence_encoder: drop and attn_drop are fractions below 1, not {drop} and {attn_drop}")
    return SequenceClassifier(
        dim, depth, heads, ffn, length, vocabulary, grams, merge, pool, num_classes, pairs, mask, hidden, drop,
        attn_drop,
    )  # fmt: skip
