"""Step by step decoding: what a decoder layer keeps of the tokens before, for any mechanism.

Mechanisms whose operator computes one query at a time (`Operator.one_query`) keep keys and values. All others keep
their inputs and are computed again for the whole sequence; a causal mechanism gives the same outputs either way.
"""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Grid, Mask, merge, only_kept
from regard.mixers.shared.heads import CrossMixer, HeadLayer, HeadMixer

from .seq2seq import DecoderLayer, SelfBranch, attend

ONE = Grid.sequence(1)
MULTIPLE = 8
"""Of tokens in a sequence that is computed again."""


class SelfCache:
    """The keys and values of a causal self-attention, or its inputs; one row for each sequence.

    shortest: number of tokens that the mechanism needs.
    """

    def __init__(self, branch: SelfBranch, shortest: int = 1) -> None:
        self.branch, self.shortest = branch, shortest
        attn = branch.attn
        self.by_heads = branch.unit is None and isinstance(attn, HeadMixer) and decodes(attn)
        self.kept: list[Tensor | None] = []

    def step(self, x: Float[Tensor, "B 1 C"]) -> Float[Tensor, "B 1 C"]:
        """The output of the next token."""
        if not self.by_heads:
            self.kept = _append(self.kept, [x], 1)
            inputs = cast(Tensor, self.kept[0])
            length = inputs.shape[1]
            missing = max(-length % MULTIPLE, self.shortest - length)  # zeros follow, which change nothing
            return self.branch(F.pad(inputs, (0, 0, 0, missing)))[:, length - 1 : length]
        attn = cast(HeadMixer, self.branch.attn)
        q, *keys_and_values = attn.project_heads(x, ONE).values()
        self.kept = _append(self.kept, keys_and_values, 2)
        k, v = self.kept[0], cast(Tensor, self.kept[1])
        out = attn.operator.one_query(v.shape[2] - 1, q, k, v)
        return attn.project_output(x, merge(out))

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these sequences, in this order; a sequence may be taken several times."""
        self.kept = _select(self.kept, rows)


class CrossCache:
    """The keys and values of a memory, or the memory itself and the queries' inputs."""

    def __init__(self, cross: CrossMixer, memory: Float[Tensor, "B M C"], keep: Bool[Tensor, "B M"]) -> None:
        self.cross, self.keep, self.index = cross, keep, 0
        self.by_heads = decodes(cross)
        self.inputs: list[Tensor | None] = []
        self.memory: list[Tensor | None] = [memory]
        self.hidden = keep
        """What is added to the logits: -inf for padding, whose keys and values are 0. Faster than to mask each step."""
        if self.by_heads:
            roles = [role for role in cross.config.roles if role in "kv"]
            grid = Grid.sequence(memory.shape[1])
            projected = dict(zip(roles, cross.project(memory, "".join(roles)), strict=True))
            self.memory = [
                only_kept(cross.normalise_and_rotate(role, projected[role], grid, None), keep)
                if role in projected
                else None
                for role in "kv"
            ]
            self.hidden = torch.zeros_like(memory[:, None, None, :, 0]).masked_fill(~keep[:, None, None], -torch.inf)

    def step(self, x: Float[Tensor, "B 1 C"]) -> Float[Tensor, "B 1 C"]:
        """The output of the next token."""
        if not self.by_heads:
            self.inputs = _append(self.inputs, [x], 1)
            return attend(self.cross, cast(Tensor, self.inputs[0]), cast(Tensor, self.memory[0]), self.keep)[:, -1:]
        q = None
        if "q" in self.cross.config.roles:
            q = self.cross.normalise_and_rotate("q", self.cross.project(x, "q")[0], ONE, None)
        k, v = self.memory[0], cast(Tensor, self.memory[1])
        out = self.cross.operator.one_query(self.index, q, k, v, mask=Mask(bias=self.hidden))
        self.index += 1
        return self.cross.project_output(x, merge(out))

    def select(self, rows: Int[Tensor, " R"], same_memory: bool) -> None:
        """As in `SelfCache`. same_memory: the memories in these rows are the old ones in their old order."""
        self.inputs = _select(self.inputs, rows)
        if not same_memory:
            self.memory = _select(self.memory, rows)
            self.keep, self.hidden = self.keep[rows], self.hidden[rows]


class LayerCache:
    """A decoder layer, token by token, with what it keeps. shortest: as for `SelfCache`."""

    def __init__(
        self, layer: DecoderLayer, memory: Float[Tensor, "B M C"], keep: Bool[Tensor, "B M"], shortest: int = 1
    ) -> None:
        self.layer = layer
        self.attention = None if layer.self_attn is None else SelfCache(layer.self_attn, shortest)
        self.cross = CrossCache(layer.cross_attn, memory, keep)

    def step(self, x: Float[Tensor, "B 1 C"]) -> Float[Tensor, "B 1 C"]:
        """The layer's output for the next token of each sequence."""
        layer = self.layer
        if self.attention is not None:
            x = layer.add(x, layer.norm1, self.attention.step)
        x = layer.add(x, layer.norm2, self.cross.step)
        return layer.add(x, layer.norm3, layer.mlp)

    def select(self, rows: Int[Tensor, " R"], same_memory: bool) -> None:
        """As in `CrossCache`."""
        if self.attention is not None:
            self.attention.select(rows)
        self.cross.select(rows, same_memory)


def decodes(layer: HeadLayer) -> bool:
    """Whether a layer can compute one query at a time: its operator can, and no convolution needs the neighbours."""
    return layer.operator.one_by_one and layer.dwc is None


def _append(kept: list[Tensor | None], new: list[Tensor | None], axis: int) -> list[Tensor | None]:
    if not kept:
        return new
    return [b if a is None or b is None else torch.cat([a, b], axis) for a, b in zip(kept, new, strict=True)]


def _select(kept: list[Tensor | None], rows: Tensor) -> list[Tensor | None]:
    return [None if item is None else item.index_select(0, rows) for item in kept]
