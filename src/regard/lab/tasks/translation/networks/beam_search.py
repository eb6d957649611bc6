"""Beam search for a batch of sentences: length penalty of Wu et al. 2016 (Eq. 14), exact early stopping."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core import ConfigError


@runtime_checkable
class Decoder(Protocol):
    """A model that writes sequences token by token; it keeps what it needs of the tokens before."""

    def step(self, tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Append a token to each sequence; the scores (logits) of the next one."""
        ...

    def select(self, rows: Int[Tensor, " R"], same_memory: bool) -> None:
        """Keep these sequences. same_memory: each belongs to the same sentence as the one in its place before."""
        ...


def length_penalty(length: Tensor, penalty: float) -> Tensor:
    """((5 + length) / 6)^penalty, by which a sum of log-probabilities is divided."""
    return ((5.0 + length) / 6.0) ** penalty


@torch.no_grad()
def beam_search(
    decoder: Decoder,
    longest: Int[Tensor, " B"],
    *,
    start: int,
    end: int,
    forbidden: tuple[int, ...] = (),
    beam: int = 4,
    penalty: float = 0.6,
) -> tuple[Int[Tensor, "B L"], Float[Tensor, " B"]]:
    """The best sequence of each sentence, without `start`, filled up with `end`, and its penalised log-probability.

    decoder: holds `beam` sequences for each sentence, sentence by sentence. longest: number of tokens at which a
    sequence of the sentence ends at the latest, with `end`. forbidden: tokens that are never chosen.
    A sentence is finished when `beam` of its sequences have ended, when no other can become better (its
    log-probability only falls, and the penalty is largest at `longest`), or at its longest length. Finished sentences
    leave the batch. With beam=1 it is greedy search: the most probable token, until it is `end`.
    Raises: ConfigError.
    """
    if beam < 1 or penalty < 0:
        raise ConfigError(f"beam is at least 1 and penalty at least 0, not beam={beam}, penalty={penalty}")
    device, number, limit = longest.device, len(longest), int(longest.max())
    best = torch.full((number,), -torch.inf, device=device)
    output = torch.full((number, limit), end, dtype=torch.long, device=device)
    active = torch.arange(number, device=device)  # sentences in the batch
    scores = torch.full((number, beam), -torch.inf, device=device)
    scores[:, 0] = 0.0  # at first all sequences of a sentence are the same one
    tokens = torch.empty(number, beam, 0, dtype=torch.long, device=device)
    last = torch.full((number * beam,), start, dtype=torch.long, device=device)
    ended = torch.zeros(number, dtype=torch.long, device=device)
    done = torch.zeros(number, dtype=torch.bool, device=device)
    for length in range(1, limit + 1):
        log_p = decoder.step(last).float().log_softmax(-1).unflatten(0, (-1, beam))
        vocabulary = log_p.shape[-1]
        log_p[..., list(forbidden)] = -torch.inf
        final = length >= longest[active]
        others = torch.arange(vocabulary, device=device) != end
        log_p = log_p.masked_fill(final[:, None, None] & others, -torch.inf)
        total = (scores[..., None] + log_p).flatten(1)
        values, indices = total.topk(min(2 * beam, total.shape[1]), -1)
        origin, token = indices // vocabulary, indices % vocabulary
        is_end = token == end
        # sequences that end now, among the `beam` best; the best of them may be the sentence's best so far
        closed = (is_end & values.isfinite())[:, :beam] & ~done[:, None]
        at = torch.full_like(values[:, :1], length)
        normed, which = (values[:, :beam] / length_penalty(at, penalty)).masked_fill(~closed, -torch.inf).max(-1)
        better = normed > best[active]
        rows = better.nonzero().flatten()
        best[active[rows]] = normed[rows]
        output[active[rows]] = end
        output[active[rows], : length - 1] = tokens[rows, origin[rows, which[rows]]]
        ended += closed.sum(-1)
        # the `beam` best that go on
        order = is_end.int().argsort(dim=-1, stable=True)[:, :beam]
        scores = values.masked_fill(is_end, -torch.inf).gather(1, order)
        origin, token = origin.gather(1, order), token.gather(1, order)
        bound = scores[:, 0] / length_penalty(longest[active].float(), penalty)
        done = done | (ended >= beam) | (best[active] >= bound) | final
        remaining = int((~done).sum())
        if remaining == 0:
            break
        tokens = torch.cat([tokens.gather(1, origin[..., None].expand_as(tokens)), token[..., None]], -1)
        rows = torch.arange(len(active), device=device)[:, None] * beam + origin
        shrink = remaining <= 0.8 * len(active)
        if shrink:
            left = (~done).nonzero().flatten()
            rows, tokens, token, scores = rows[left], tokens[left], token[left], scores[left]
            active, ended, done = active[left], ended[left], done[left]
        if shrink or beam > 1:
            decoder.select(rows.flatten(), not shrink)
        last = token.flatten()
    return output[:, : max(length - 1, 1)], best
