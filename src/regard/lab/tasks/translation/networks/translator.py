"""An encoder and a decoder for translation around any mechanism (Vaswani et al. 2017; layers as in Zhu et al. 2019)."""

import math
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import ConfigError, GridError, MixerConfig, ShapeError, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.mixers.convolutions.deformable import DeformableConv
from regard.mixers.factors.forms import sinusoids
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.spelling import spell

from .beam_search import beam_search
from .decoding import LayerCache
from .seq2seq import DecoderLayer, EncoderLayer, Layer, on_sequences, stack

PAD, START, END = 0, 1, 2
"""The tokens that fill a batch up, and that stand before and after a sentence."""
SPECIAL = 3
"""Number of special tokens, which are the first of a vocabulary."""
BASE = 10_000.0
"""Of the wavelengths of absolute positions."""


def translator(
    vocabulary: int = 8000,
    attention: MixerConfig | str | None = "Softmax()",
    cross: HeadMixerConfig | str = "Softmax()",
    decoder: MixerConfig | str | None = "same",
    *,
    unit: DeformableConv | str | None = None,
    dirac: bool = True,
    dim: int = 128,
    depth: int = 3,
    heads: int = 4,
    hidden: int = 256,
    drop: float = 0.1,
    norm: Literal["post", "pre"] = "pre",
    positions: Literal["sine", "none"] = "sine",
    length: int = 64,
) -> "Translator":
    """A `Translator`; the options are those of `regard.lab.tasks.translation.networks.seq2seq.Layer`, and:

    vocabulary: number of tokens, of which the first three are special. attention: of the encoder and, unless `decoder`
    names another one, of the decoder's self-attention; None removes it. depth: layers of each of the two.
    positions: "sine" adds absolute sinusoids to the embeddings, so that mechanisms without positions of their own know
    the order of words; "none" for mechanisms that have them, as in Zhu et al. 2019.
    Raises: ConfigError; UnsupportedError for a mechanism that cannot mask padding, be causal, or attend to another
    input one token after the other.
    """
    encoder_layer = Layer(
        dim=dim, heads=heads, attention=attention, cross=cross, unit=unit, dirac=dirac, hidden=hidden, drop=drop,
        length=length, norm=norm,
    )  # fmt: skip
    decoder_layer = encoder_layer if decoder == "same" else replace(encoder_layer, attention=decoder)
    return Translator(vocabulary, encoder_layer, decoder_layer, depth, positions)


class Translator(nn.Module):
    """Embeddings shared by source, target and output; stacks of layers; beam search. See `translator`."""

    def __init__(self, vocabulary: int, encoder: Layer, decoder: Layer, depth: int, positions: str = "sine") -> None:
        super().__init__()
        if positions not in ("sine", "none"):
            raise ConfigError(f'positions is "sine" or "none", not {positions!r}')
        if vocabulary <= SPECIAL:
            raise ConfigError(f"vocabulary is above {SPECIAL}, the number of special tokens, not {vocabulary}")
        if positions == "sine" and encoder.dim % 2:
            raise ConfigError(f'positions="sine" needs an even dim, not {encoder.dim}')
        _check_padding(encoder.attention, "the encoder's self-attention")
        _check_padding(decoder.cross, "cross-attention")
        self.dim, self.positions = encoder.dim, positions
        self.embedding = nn.Embedding(vocabulary, encoder.dim, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=encoder.dim**-0.5)
        self.drop = nn.Dropout(encoder.drop)
        self.encoder, self.decoder = stack(EncoderLayer, encoder, depth), stack(DecoderLayer, decoder, depth)
        self.encoder_norm = nn.LayerNorm(encoder.dim) if encoder.norm == "pre" else nn.Identity()
        self.decoder_norm = nn.LayerNorm(encoder.dim) if encoder.norm == "pre" else nn.Identity()
        check_causal(cast(DecoderLayer, self.decoder[0]))
        self.shortest = shortest_length(cast(EncoderLayer, self.encoder[0]), cast(DecoderLayer, self.decoder[0]))
        """Sources and targets with fewer tokens are filled up to so many, which are hidden."""

    def forward(
        self, source: Int[Tensor, "B M"], target: Int[Tensor, "B N"] | None = None, beam: int = 4, penalty: float = 0.6
    ) -> Float[Tensor, "B N V"] | Int[Tensor, "B L"]:
        """With a target: the scores of the token that follows each of its tokens; its first token is `START`.

        Without: translations by beam search, filled up with `END`, of at most 2 M + 10 tokens for M source tokens.
        source: each sentence ends with `END`, and is filled up with `PAD`.
        """
        source = self._filled_up(source)
        keep = source != PAD
        memory = self.encode(source, keep)
        if target is None:
            return self.translate(memory, keep, beam, penalty)
        x = self.embed(self._filled_up(target))
        for layer in self.decoder:  # padding is at the end of the target, where causal layers do not see it
            x = layer(x, memory, None, keep)
        return self.scores(x[:, : target.shape[1]])

    def _filled_up(self, tokens: Int[Tensor, "B N"]) -> Int[Tensor, "B _N"]:
        return F.pad(tokens, (0, max(self.shortest - tokens.shape[1], 0)), value=PAD)

    def embed(self, tokens: Int[Tensor, "B N"], first: int = 0) -> Float[Tensor, "B N C"]:
        """Embeddings of tokens, the first of which is number `first` of its sequence."""
        x = self.embedding(tokens) * math.sqrt(self.dim)
        if self.positions == "sine":
            steps = torch.arange(first, first + tokens.shape[1], device=x.device, dtype=torch.float32)
            x = x + sinusoids(steps, self.dim, BASE).to(x.dtype)
        return self.drop(x)

    def encode(self, source: Int[Tensor, "B M"], keep: Bool[Tensor, "B M"]) -> Float[Tensor, "B M C"]:
        """The encoder's output. keep: False where a token is padding."""
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, keep)
        return self.encoder_norm(x)

    def scores(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B N V"]:
        """The scores of each token of the vocabulary, from the last decoder layer."""
        return self.decoder_norm(x) @ self.embedding.weight.T

    def translate(
        self, memory: Float[Tensor, "B M C"], keep: Bool[Tensor, "B M"], beam: int = 4, penalty: float = 0.6
    ) -> Int[Tensor, "B L"]:
        """As `forward` without a target, from the encoder's output."""
        writer = Writer(self, memory.repeat_interleave(beam, 0), keep.repeat_interleave(beam, 0))
        longest = 2 * keep.sum(-1) + 10
        options = {"start": START, "end": END, "forbidden": (PAD, START)}
        return beam_search(writer, longest, **options, beam=beam, penalty=penalty)[0]  # type: ignore[arg-type]


class Writer:
    """A translator as `beam_search` uses it: one row for each sequence. memory, keep: of each row."""

    def __init__(self, model: Translator, memory: Float[Tensor, "R M C"], keep: Bool[Tensor, "R M"]) -> None:
        self.model, self.length = model, 0
        layers = [cast(DecoderLayer, layer) for layer in model.decoder]
        self.caches = [LayerCache(layer, memory, keep, model.shortest) for layer in layers]

    def step(self, tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        x = self.model.embed(tokens[:, None], self.length)
        for cache in self.caches:
            x = cache.step(x)
        self.length += 1
        return self.model.scores(x)[:, 0]

    def select(self, rows: Int[Tensor, " R"], same_memory: bool) -> None:
        for cache in self.caches:
            cache.select(rows, same_memory)


def _check_padding(config: Any, place: str) -> None:
    """Raises: UnsupportedError unless the mechanism can mask padding, which batches of sentences have."""
    if config is None:
        return
    masks = on_sequences(config, causal=False).masks
    if "padding" not in masks:
        can = ", ".join(sorted(masks)) or "none"
        raise UnsupportedError(f"{spell(config)} cannot mask padding (masks it can apply: {can}): not in {place}")


def shortest_length(encoder: EncoderLayer, decoder: DecoderLayer) -> int:
    """The smallest number of source and target tokens that the mechanisms take: some need a number of keys.

    Raises: the error of a mechanism that takes no sequence of up to four times the layers' `length`.
    """
    weight = next(decoder.parameters())
    with eval_mode(encoder), eval_mode(decoder), torch.random.fork_rng(devices=[]):
        for number in range(1, 4 * encoder.layer.length + 1):
            tokens = torch.zeros(1, number, encoder.layer.dim, device=weight.device, dtype=weight.dtype)
            try:
                decoder(tokens, encoder(tokens))
                return number
            except (ConfigError, GridError, ShapeError) as error:
                refusal = error
    raise refusal


def check_causal(layer: DecoderLayer) -> None:
    """Raises: UnsupportedError if the outputs for earlier tokens depend on later ones, as they do in a cross-attention
    that pools its queries."""
    with eval_mode(layer), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight = next(layer.parameters())
        x, memory = torch.randn(2, layer.layer.length, layer.layer.dim, device=weight.device, dtype=weight.dtype)[
            :, None
        ]
        later = x.clone()
        half = x.shape[1] // 2
        later[:, half:] = torch.randn_like(later[:, half:])
        change = (layer(x, memory)[:, :half] - layer(later, memory)[:, :half]).abs().max()
    if not change < 1e-3:
        names = ", ".join(spell(item) for item in (layer.layer.attention, layer.layer.cross) if item is not None)
        raise UnsupportedError(
            f"in a decoder with {names}, later tokens change the outputs for earlier ones: a translation cannot be "
            "written token by token"
        )
