"""Softmax attention: special cases that are known, the fast form against the reference, and a count by hand."""

import torch
from torch.nn import functional as F

from regard import Grid, Site, Softmax
from regard.mixers.softmax import softmax, softmax_reference


def qkv(n: int = 5, m: int = 7, d: int = 4, e: int = 6) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in float64; an odd batch, and values of another width than queries."""
    stream = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 2, *shape, generator=stream, dtype=torch.float64) for shape in ((n, d), (m, d), (m, e)))


def test_equal_keys_give_the_mean_of_the_values() -> None:
    q, k, v = qkv()
    out = softmax(q, k[:, :, :1].expand_as(k), v)
    assert torch.allclose(out, v.mean(-2, keepdim=True).expand_as(out), rtol=0, atol=1e-12)


def test_a_large_scale_picks_the_best_key() -> None:
    q, k, v = qkv()
    best = (q @ k.mT).argmax(-1)
    picked = v.gather(-2, best[..., None].expand(-1, -1, -1, v.shape[-1]))
    assert torch.allclose(softmax(q, k, v, scale=1e7), picked, rtol=0, atol=1e-6)


def test_it_is_the_formula() -> None:
    q, k, v = qkv()
    by_hand = torch.einsum("bhnm,bhme->bhne", F.softmax(torch.einsum("bhnd,bhmd->bhnm", q, k) / 2.0, -1), v)  # d = 4
    for form in (softmax, softmax_reference):
        assert torch.allclose(form(q, k, v), by_hand, rtol=0, atol=1e-12)


def test_multiply_accumulates_by_hand() -> None:
    cost = Softmax().operator_cost(Site(dim=8, heads=2, grid=Grid(3, 4, prefix=1)))
    assert (cost.params, cost.macs) == (0, 2 * 13 * 13 * 8)  # 13 tokens: logits and values
