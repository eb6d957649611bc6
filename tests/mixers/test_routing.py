"""Routing by k-means: Algorithm 1 cluster by cluster, equal clusters, the moving average of the centroids, padding."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from operators import check_error, check_gradients, check_transforms, draw_qkv
from regard import ConfigError, Grid, Mask, Routing, Site
from regard.core import ShapeError, UnsupportedError
from regard.mixers.routing import RoutingPlan
from regard.ops import routing, routing_plan, routing_reference, softmax_reference
from regard.testing.subject import gap, perturb

F64 = torch.float64


def drawn(clusters: int, n: int = 13, m: int = 9) -> tuple[list[torch.Tensor], RoutingPlan]:
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in draw_qkv(n, m)]
    return inputs, routing_plan(*inputs[:2], torch.randn(2, clusters, 8, dtype=F64))


@pytest.mark.parametrize("clusters", [1, 3, 4, 9])
def test_clusters_one_after_the_other(clusters: int) -> None:
    """Algorithm 1 with loops: the best queries and keys of a centroid, softmax, the mean of a query's clusters."""
    (q, k, v), plan = drawn(clusters)
    out, plain = routing(q, k, v, plan), routing_reference(q, k, v, plan)
    assert gap(out, plain) < 1e-12
    check_gradients(out, plain, (q, k, v))
    torch.manual_seed(0)
    draw_qkv(13, 9)
    centroids = torch.randn(2, clusters, 8, dtype=F64)
    for b, h in ((0, 0), (2, 1)):
        found: list[list[torch.Tensor]] = [[] for _ in range(13)]
        for centroid in centroids[h]:
            queries = (q[b, h] @ centroid).argsort(descending=True)[: -(-13 // clusters)]
            keys = (k[b, h] @ centroid).argsort(descending=True)[: -(-9 // clusters)]
            for i in queries.tolist():
                found[i].append((k[b, h, keys] @ q[b, h, i] / 8**0.5).softmax(0) @ v[b, h, keys])
        expected = [torch.stack(each).mean(0) if each else torch.zeros(5, dtype=F64) for each in found]
        assert gap(out[b, h], torch.stack(expected)) < 1e-12


def test_one_cluster_is_softmax_attention() -> None:
    (q, k, v), plan = drawn(1)
    assert gap(routing(q, k, v, plan), softmax_reference(q, k, v)) < 1e-12
    keep = torch.arange(9).expand(3, -1) < torch.tensor([9, 4, 0])[:, None]
    expected = softmax_reference(q, k, v, mask=Mask(keep=keep))
    assert gap(routing(q, k, v, plan, mask=Mask(keep=keep)), expected) < 1e-12


def test_transforms_with_a_fixed_plan() -> None:
    (q, k, v), _ = drawn(3)
    q, k, v = (x[:, :, :9] for x in (q, k, v))
    one = RoutingPlan(*(x[:1] for x in routing_plan(q, k, torch.randn(2, 3, 8, dtype=F64))))
    check_transforms(lambda *x: routing(*x, RoutingPlan(*(y.expand(len(x[0]), -1, -1, -1) for y in one))), (q, k, v))


def test_padding_is_taken_last() -> None:
    (q, k, _), _ = drawn(3)
    keep = torch.arange(9).expand(3, -1) < 6
    plan = routing_plan(q[:, :, :9], k, torch.randn(2, 3, 8, dtype=F64), mask=Mask(keep=keep), keep=keep)
    assert plan.queries.shape == plan.keys.shape == (3, 2, 3, 3)
    assert max(plan.queries.max(), plan.keys.max()) < 6


def test_centroids_follow_the_mean_of_their_tokens_in_training_only() -> None:
    torch.manual_seed(0)
    grid = Grid(4, 6, 1)
    operator = perturb(Routing(clusters=2, decay=0.75).build(Site(16, 2, grid))).operator
    assert gap(operator.centroids.square().mean(-1), torch.ones(2, 2, dtype=F64)) < 1e-3  # drawn in float32
    start = operator.centroids.clone()
    x = torch.nn.functional.layer_norm(torch.randn(2, 3, 2, 25, 8, dtype=F64), (8,))  # q, k
    q, k, v = x[0], x[1], torch.randn(3, 2, 25, 8, dtype=F64)
    operator(q, k, v, grid=grid)
    assert gap(operator.centroids, start) == 0
    operator.train()
    with torch.no_grad():
        operator(q, k, v, grid=grid)
    assert gap(operator.centroids, start) == 0
    operator(q, k, v, grid=grid)
    for h in range(2):
        tokens = torch.cat([q[:, h], k[:, h]]).flatten(0, 1)
        nearest = (tokens @ start[h].mT).argmax(1)
        for c in range(2):
            mean = torch.nn.functional.layer_norm(tokens[nearest == c].mean(0), (8,))
            assert gap(operator.centroids[h, c], 0.75 * start[h, c] + 0.25 * mean) < 1e-4
    assert "centroids" in operator.state_dict()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_changes_neither_gradients_nor_centroids(reentrant: bool) -> None:
    """In two steps, and with two passes before one backward pass, where reentrant checkpoints move them later."""
    torch.manual_seed(0)
    grid, passes = Grid(4, 6, 1), [1, 1] if reentrant else [1, 2]
    first = perturb(Routing(clusters=3, decay=0.25).build(Site(16, 2, grid))).train()
    second = copy.deepcopy(first)
    for number in passes:
        x = torch.randn(number, 3, 25, 16, dtype=F64, requires_grad=True)
        sum(first(each, grid).square().sum() for each in x).backward()
        sum(checkpoint(second, each, grid, use_reentrant=reentrant).square().sum() for each in x).backward()
    assert gap(first.operator.centroids, second.operator.centroids) == 0
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert gap(a.grad, b.grad) < 1e-12


def test_cost() -> None:
    """2 N c products with centroids, and c clusters of N / c queries and keys."""
    cost = Routing(clusters=14).operator_cost(Site(192, 3, Grid(14, 14)))
    assert (cost.params, cost.macs) == (0, (2 * 196 * 14 + 2 * 14 * 14 * 14) * 192)


@pytest.mark.untyped
def test_what_is_refused() -> None:
    (q, k, v), plan = drawn(3)
    check_error(ShapeError, "as many clusters", routing, q, k, v, RoutingPlan(plan.queries, plan.keys[:, :, :2]))
    check_error(ShapeError, "plan.keys has indices", routing, q, k, v, RoutingPlan(plan.queries, plan.keys + 9))
    check_error(UnsupportedError, "cannot apply a causal mask", routing, q, k, v, plan, mask=Mask(causal=True))
    check_error(ConfigError, "decay from 0 to 1, not clusters=3, decay=2", Routing, clusters=3, decay=2.0)
    check_error(ConfigError, "clusters=14, but the site has 12", Routing().build, Site(16, 2, Grid(3, 4)))
