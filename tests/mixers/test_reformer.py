"""Hashing: chunks and rounds against the plain form, what counts once, the token itself, padding."""

import pytest
import torch
from torch import Tensor

from operators import check_gradients
from regard import ConfigError, Grid, Mask, Reformer, Site
from regard.core import ShapeError
from regard.mixers.reformer import LSHPlan
from regard.ops import lsh_plan, reformer, reformer_reference
from regard.testing.subject import gap


def draw(n: int, rounds: int, seed: int = 0) -> tuple[Tensor, Tensor, LSHPlan]:
    torch.manual_seed(seed)
    q, v = (torch.randn(3, 2, n, c, dtype=torch.float64, requires_grad=True) for c in (8, 6))
    return q, v, lsh_plan(q, torch.randn(rounds, 8, 2, dtype=torch.float64))


@pytest.mark.parametrize(("n", "chunk"), [(23, 4), (24, 4), (9, 5), (7, 8), (12, 1), (1, 3)])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("duplicates", ["once", "every"])
def test_fast_and_plain_form_agree(n: int, chunk: int, rounds: int, duplicates: str) -> None:
    q, v, plan = draw(n, rounds)
    keep = torch.ones(3, n, dtype=torch.bool)
    keep[0, -n // 2 :], keep[1, ::3], keep[2] = False, False, False
    for mask in (None, Mask(keep=keep)):
        plain = reformer_reference(q, v, plan, chunk, duplicates=duplicates, mask=mask)
        fast = reformer(q, v, plan, chunk, duplicates=duplicates, mask=mask)
        assert gap(fast, plain) < 1e-12
        check_gradients(fast, plain, (q, v))


def test_chunks_by_hand() -> None:
    """Buckets 1 0 1 0 2 2 and chunks of two: order 1 3 | 0 2 | 4 5; each attends to its chunk and the previous one."""
    q, _, _ = draw(6, 1)
    plan = LSHPlan(torch.tensor([1, 0, 1, 0, 2, 2]).expand(3, 2, 1, -1))
    a = reformer(q, torch.eye(6, dtype=torch.float64).expand(3, 2, -1, -1), plan, 2)
    attended = [set(row.nonzero().flatten().tolist()) for row in a[0, 0] > 0]
    assert attended == [{2, 1, 3}, {3, 4, 5}, {0, 1, 3}, {1, 4, 5}, {5, 0, 2}, {4, 0, 2}]
    assert gap(a.sum(-1), torch.ones(3, 2, 6, dtype=torch.float64)) < 1e-12


def test_equal_rounds_give_the_result_of_one_round() -> None:
    q, v, plan = draw(24, 1)
    twice = LSHPlan(plan.buckets.expand(-1, -1, 2, -1))
    expected = reformer(q, v, plan, 4)
    assert gap(reformer(q, v, twice, 4), expected) < 1e-12
    assert gap(reformer(q, v, twice, 4, duplicates="every"), expected) < 1e-12
    different = LSHPlan(torch.cat([plan.buckets, plan.buckets.flip(-1)], 2))
    assert gap(reformer(q, v, different, 4), reformer(q, v, different, 4, duplicates="every")) > 1e-3


def test_a_token_alone_attends_to_itself() -> None:
    q, v, plan = draw(1, 2)
    assert gap(reformer(q, v, plan, 4), v) < 1e-12
    q, v, plan = draw(9, 2)
    keep = torch.zeros(3, 9, dtype=torch.bool)
    keep[:, 4] = True
    assert gap(reformer(q, v, plan, 3, mask=Mask(keep=keep))[:, :, 4], v[:, :, 4]) < 1e-12


def test_near_tokens_share_a_bucket_and_hashes_depend_on_the_seed() -> None:
    site = Site(16, 2, Grid(8, 8), layer=3)
    first, same, different = (Reformer(chunk=8, seed=seed).operator(site).rotations for seed in (5, 5, 6))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    assert first.shape == (4, 8, 4)
    q = torch.randn(2, 2, 64, 8)
    near = lsh_plan(q, first).buckets == lsh_plan(q + 0.01 * torch.randn_like(q), first).buckets
    assert near.float().mean() > 0.95
    assert (lsh_plan(q, first).buckets == lsh_plan(3 * q, first).buckets).all()


def test_half_precision_with_a_frozen_plan() -> None:
    q, v, plan = draw(40, 2)
    q, v = q.detach().float(), v.detach().float()
    exact = reformer(q, v, plan, 6)
    low = reformer(q.bfloat16(), v.bfloat16(), plan, 6)
    assert low.dtype == torch.bfloat16
    assert gap(low.float(), exact) < 3e-2 * exact.abs().max().item()


def test_no_key_is_projected() -> None:
    """Fact 4.11: C^2 + C parameters fewer."""
    site = Site(16, 2, Grid(4, 4))
    layer = Reformer(chunk=4).build(site)
    assert layer.qkv.weight.shape == (32, 16)
    assert Reformer(chunk=4).operator_cost(site, "paper").macs == 4 * 16 * 8 * 2 * 16


@pytest.mark.untyped
def test_what_is_refused() -> None:
    q, v, plan = draw(9, 2)
    with pytest.raises(ShapeError, match="plan.buckets has shape"):
        reformer(q[:, :, :8], v[:, :, :8], plan, 4)
    with pytest.raises(ConfigError, match="once or every"):
        reformer(q, v, plan, 4, duplicates="both")
    with pytest.raises(ConfigError, match="at least 1"):
        Reformer(chunk=0)
