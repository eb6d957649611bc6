"""Hashing: chunks and rounds against the plain form, what counts once, the token itself, padding."""

import pytest
import torch
from torch import Tensor

from operators import check_error, check_gradients, count_flops
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


def test_a_bucket_is_the_axis_a_token_points_along_and_its_opposite_half_the_buckets_away() -> None:
    axes = torch.eye(3, dtype=torch.float64)
    plan = lsh_plan(torch.cat([axes, -axes])[None, None], axes[None])
    assert plan.buckets.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_hashes_are_not_rounded_in_half_precision_or_under_autocast() -> None:
    torch.manual_seed(0)
    q, rotations = torch.randn(2, 2, 2000, 8).bfloat16(), torch.randn(3, 8, 4)
    expected = lsh_plan(q.float(), rotations).buckets
    assert torch.equal(lsh_plan(q, rotations).buckets, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lsh_plan(q.float(), rotations).buckets, expected)


def test_attention_is_not_rounded_under_autocast() -> None:
    q, v, plan = draw(23, 3)
    q, v = q.detach().float(), v.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert gap(reformer(q, v, plan, 4), reformer_reference(q.double(), v.double(), plan, 4).float()) < 1e-5


def test_the_scale_multiplies_the_queries() -> None:
    q, v, plan = draw(24, 2)
    keys = torch.nn.functional.normalize(q, dim=-1)
    same = torch.eye(24, dtype=torch.bool)
    expected = (3 * q @ keys.mT).masked_fill(same, -torch.inf).softmax(-1) @ v
    assert gap(reformer(q, v, LSHPlan(plan.buckets[:, :, :1]), 12, scale=3.0), expected) < 1e-12


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


@pytest.mark.parametrize("chunk", [5, 16, 17, 64])
def test_cost_is_what_the_counter_sees_also_where_one_chunk_holds_all_tokens(chunk: int) -> None:
    layer = Reformer(chunk=chunk).build(Site(16, 2, Grid(4, 4, 1)))
    assert count_flops(layer, torch.randn(1, 17, 16), Grid(4, 4, 1)) == layer.config.cost(layer.site).flops


def test_layers_differ_in_their_hashes_and_buckets_are_as_many_as_chunks_rounded_up() -> None:
    first, second = (Reformer(chunk=8).operator(Site(16, 2, Grid(8, 8), layer=i)).rotations for i in (0, 1))
    assert not torch.equal(first, second)
    assert [Reformer(chunk=chunk).buckets(Site(16, 2, Grid(4, 4, 1))) for chunk in (3, 4, 6, 9, 64)] == [6, 6, 4, 2, 2]


@pytest.mark.untyped
def test_what_is_refused() -> None:
    q, v, plan = draw(9, 2)
    check_error(ShapeError, "plan.buckets has shape", reformer, q[:, :, :8], v[:, :, :8], plan, 4)
    check_error(ConfigError, "once or every", reformer, q, v, plan, 4, duplicates="both")
    check_error(ConfigError, "at least 1", Reformer, chunk=0)


def test_a_module_made_without_memory_draws_its_rotations_when_it_gets_some() -> None:
    site = Site(32, 2, Grid(4, 4))
    with torch.device("meta"):
        empty = Reformer(chunk=4).build(site)
    made = Reformer(chunk=4).build(site)
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(made.state_dict())
    x = torch.randn(1, 16, 32)
    torch.testing.assert_close(filled(x), made(x))
