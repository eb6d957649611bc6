"""Exact top-k attention: what its selection implies, ties, masks, the other indexers."""

import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from operators import check_error
from regard import ConfigError, Grid, Mask, Site, TopK
from regard.core import ShapeError, UnsupportedError
from regard.mixers.topk.index import Lightning, spark_logits, threshold_logits
from regard.mixers.topk.topk import TopKPlan
from regard.ops import softmax_reference, topk, topk_plan, topk_reference
from regard.testing.subject import gap

FORMS = ("dense", "gather")


def draw(n: int = 11, m: int = 13, e: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    sizes = ((n, 8), (m, 8), (m, e))
    q, k, v = (torch.randn(3, 2, *size, dtype=torch.float64, requires_grad=True) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("form", FORMS)
def test_one_key_gives_the_value_of_the_best_key(form: str) -> None:
    q, k, v = draw()
    best = (q @ k.mT).argmax(-1)
    expected = v.gather(2, best[..., None].expand(-1, -1, -1, v.shape[-1]))
    assert gap(topk(q, k, v, 1, execution=form), expected) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_ties_keep_exactly_k_keys(form: str) -> None:
    """All logits are equal: whichever keys are kept, there are k of them with weight 1/k."""
    q, k, _ = draw()
    eye = torch.eye(13, dtype=torch.float64).expand(3, 2, -1, -1)
    a = topk(q, k[:, :, :1].expand_as(k), eye, 4, execution=form)
    assert ((a > 0).sum(-1) == 4).all()
    assert gap(a[a > 0], torch.tensor(0.25, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_fewer_keys_than_k_after_masking_get_all_the_weight(form: str) -> None:
    q, k, v = draw()
    keep = torch.ones(3, 13, dtype=torch.bool)
    keep[0, 3:], keep[1, ::2], keep[2] = False, False, False
    out = topk(q, k, v, 9, mask=Mask(keep=keep), execution=form)
    assert gap(out[:2], softmax_reference(q, k, v, mask=Mask(keep=keep))[:2]) < 1e-12
    assert (out[2] == 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_an_infinite_query_spoils_its_own_row_only() -> None:
    q, k, v = (x.detach() for x in draw())
    q[1, 0, 4, 2] = torch.inf
    out = topk(q, k, v, 5)
    assert out[1, 0, 4].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 1


def test_a_bias_of_minus_infinity_forbids_and_others_rank() -> None:
    q, k, v = draw(11, 11)
    bias = torch.randn(2, 11, 11, dtype=torch.float64)
    bias[:, 2, 3:] = -torch.inf
    for mask in (Mask(bias=bias), Mask(causal=True), Mask(causal=True, bias=bias)):
        for form in FORMS:
            assert gap(topk(q, k, v, 4, mask=mask, execution=form), topk_reference(q, k, v, 4, mask=mask)) < 1e-12
        assert gap(topk(q, k, v, 11, mask=mask), softmax_reference(q, k, v, mask=mask)) < 1e-12


def test_gradients_reach_chosen_keys_only() -> None:
    q, k, v = draw()
    plan = topk_plan(q @ k.mT, 3)
    grads = torch.autograd.grad(topk(q[:, :, :2], k, v, 3).square().sum(), (k, v))
    chosen = torch.zeros(3, 2, 13, dtype=torch.bool).scatter(-1, plan.keys[:, :, :2].flatten(2), True)
    for grad in grads:
        assert torch.equal(grad.abs().sum(-1) > 0, chosen)


def test_scores_of_one_head_choose_for_all() -> None:
    q, k, v = draw()
    scores = torch.randn(3, 1, 11, 13, dtype=torch.float64)
    plan = topk_plan(scores, 4)
    for form in FORMS:
        out = topk(q, k, v, 4, scores=scores, execution=form)
        assert gap(out, topk(q, k, v, 4, plan=plan, execution=form)) < 1e-12
        assert gap(out, topk_reference(q, k, v, 4, scores=scores)) < 1e-12


def test_spark_without_selection_is_softmax_of_its_products() -> None:
    """Fact 4.15: k = N is the unmasked product form."""
    q, k, v = draw()
    first, second = q[..., :3] @ k[..., :3].mT, q[..., 3:] @ k[..., 3:].mT
    expected = (8**-0.5 * first * torch.log1p(second.exp())).softmax(-1) @ v
    assert gap(topk(q, k, v, 13, rank=3), expected) < 1e-12
    assert gap(spark_logits(q, k, 3, 1.0), first * torch.log1p(second.exp())) < 1e-12


def test_spark_ranks_by_its_predictor() -> None:
    q, k, v = draw()
    plan = topk_plan(q[..., :3] @ k[..., :3].mT, 4)
    assert gap(topk(q, k, v, 4, rank=3), topk(q, k, v, 4, rank=3, plan=plan)) < 1e-12


@pytest.mark.slow  # the import
def test_the_statistical_threshold_is_that_of_gemma() -> None:
    """Gemma 3n has Spark's feed-forward layer: relu(x - t) of the same threshold, without the best key's exception."""
    gemma = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n").Gemma3nTextMLP
    q, k, _ = (x.detach() for x in draw(40, 48))
    x = q[..., :3] @ k[..., :3].mT * 8**-0.5
    expected = gemma._gaussian_topk(SimpleNamespace(activation_sparsity=0.875), x)  # exact in float32
    logits = threshold_logits(q, k, 6, 3)
    found = logits / F.softplus(q[..., 3:] @ k[..., 3:].mT)
    assert (found.isfinite() & (found > 0)).equal(expected > 0)
    assert gap(found.relu().nan_to_num(0.0, neginf=0.0), expected) < 1e-6
    best = x.argmax(-1, keepdim=True)
    assert logits.gather(-1, best).isfinite().all()
    assert (logits.isfinite().sum(-1) >= 1).all()


def test_the_statistical_threshold_row_by_row_with_masks() -> None:
    q, k, v = draw(13)
    keep = torch.arange(13).expand(3, -1) < torch.tensor([13, 9, 4])[:, None]
    for mask in (Mask(keep=keep), Mask(causal=True), Mask(causal=True, keep=keep)):
        out = topk(q, k, v, 4, rank=3, statistical=True, mask=mask)
        assert gap(out, topk_reference(q, k, v, 4, rank=3, statistical=True, mask=mask)) < 1e-12
        for b, h, i in ((0, 1, 12), (1, 0, 8), (1, 1, 2), (2, 0, 9)):
            seen = [j for j in range(13) if (not mask.causal or j <= i) and (mask.keep is None or keep[b, j])]
            x = [(q[b, h, i, :3] @ k[b, h, j, :3]).item() * 8**-0.5 for j in seen]
            t = 0.0
            if len(seen) > 4:
                t = statistics.fmean(x) + statistics.pstdev(x) * statistics.NormalDist().inv_cdf(1 - 4 / len(seen))
            kept = [(j, y - t) for j, y in zip(seen, x, strict=True) if len(seen) <= 4 or y >= t or y == max(x)]
            logits = torch.stack([m * F.softplus(q[b, h, i, 3:] @ k[b, h, j, 3:]) for j, m in kept])
            assert gap(out[b, h, i], logits.softmax(-1) @ v[b, h, [j for j, _ in kept]]) < 1e-12
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_the_statistical_threshold_takes_half_precision() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8).bfloat16().unbind()
    y = topk_reference(q, k, v, 3, rank=4, statistical=True)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, topk(q, k, v, 3, rank=4, statistical=True))


def test_the_statistical_threshold_keeps_about_k_keys_and_passes_gradients() -> None:
    """Fact 4.15: 18 to 33 of 196 normal scores for k = 25, 25 in the mean."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 400, 64, dtype=torch.float64), torch.randn(1, 1, 196, 64, dtype=torch.float64)
    number = threshold_logits(q, k, 25, 32).isfinite().sum(-1).double()
    assert 23 < number.mean() < 27
    assert 10 < number.min() < number.max() < 45
    q, k, v = draw()
    whole = topk(q, k, v, 13, rank=3, statistical=True)
    assert gap(whole, topk(q, k, v, 13, rank=3)) < 1e-12
    same = topk(q, k[:, :, :1].expand_as(k), v, 4, rank=3, statistical=True)
    assert all(x.isfinite().all() for x in (same, *torch.autograd.grad(same.sum(), (q, k, v))))


def test_lightning_scores_and_their_ties() -> None:
    """Fact 4.15: the ReLU makes exact ties; they are ranked without it, and what then is equal by position."""
    torch.manual_seed(0)
    index = Lightning(16, 2, 4).double()
    q, k, _ = (x.detach() for x in draw())
    x, y = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)
    queries = (x @ index.query.weight.mT).unflatten(-1, (2, 4))
    products = torch.einsum("bnjd,bmd->bnjm", queries, y @ index.key.weight.mT)
    score, plain = index.parts(q, k)
    weights = x @ index.weight.weight.mT
    assert gap(score, torch.einsum("bnjm,bnj->bnm", products.relu(), weights)) < 1e-12
    order = [[sorted(range(13), key=lambda j: (-s[j], -p[j], j)) for s, p in zip(a, b, strict=True)]
             for a, b in zip(score.tolist(), plain.tolist(), strict=True)]  # fmt: skip
    assert (score == 0).float().mean() > 0.1
    assert torch.equal(index.best(q, k, 6)[:, 0], torch.tensor(order)[..., :6])
    same = torch.zeros_like(k)  # other equal keys may differ in rounding by their place in the product
    assert torch.equal(index.best(q, same, 4), torch.arange(4).expand(3, 1, 11, -1))


def test_the_indexer_learns_the_attention_from_its_own_loss() -> None:
    torch.manual_seed(0)
    grid = Grid(3, 4, 1)
    operator = TopK(k=3, indexer="lightning", index_heads=2, index_width=8).operator(Site(16, 2, grid)).double()
    q, k = (
        torch.randn(4, 2, 13, 8, dtype=torch.float64),
        torch.randn(4, 2, 13, 8, dtype=torch.float64, requires_grad=True),
    )
    keep = torch.arange(13).expand(4, -1) < 11
    first = loss = operator.index_loss(q, k, Mask(keep=keep))
    assert torch.autograd.grad(first, k, allow_unused=True, retain_graph=True) == (None,)
    for _ in range(8):
        with torch.no_grad():
            for p, grad in zip(
                operator.parameters(), torch.autograd.grad(loss, list(operator.parameters())), strict=True
            ):
                p -= 0.5 * grad
        loss = operator.index_loss(q, k, Mask(keep=keep))
    assert 0 <= loss.item() < 0.9 * first.item()
    check_error(ConfigError, "no indexer to train", TopK(k=3).operator(Site(16, 2, grid)).index_loss, q, k)


@pytest.mark.untyped
def test_what_is_refused() -> None:
    q, k, v = draw()
    check_error(ShapeError, "choose top between 1 and 13", topk, q, k, v, 14)
    check_error(ShapeError, "top=0", topk_plan, q @ k.mT, 0)
    with pytest.raises(ShapeError, match="plan.keys has shape"):
        topk(q, k, v, 3, plan=TopKPlan(torch.zeros(3, 2, 11, 4, dtype=torch.long)))
    for wrong in (-1, 13):
        plan = topk_plan(q @ k.mT, 3)
        plan.keys[0, 0, 0, 0] = wrong
        for form in FORMS:
            with pytest.raises(ShapeError, match="plan.keys has indices from .*; expected 0 to 12"):
                topk(q, k, v, 3, plan=plan, execution=form)
    check_error(ShapeError, "rank=8 of 8 channels", topk, q, k, v, 3, rank=8)
    check_error(ConfigError, "auto, native, dense or gather", topk, q, k, v, 3, execution="fast")
    check_error(ConfigError, "k=25, but the site of a.b has 12 keys", TopK().build, Site(16, 2, Grid(3, 4), name="a.b"))


@pytest.mark.untyped
def test_what_a_statistical_threshold_refuses() -> None:
    q, k, v = draw()
    check_error(ConfigError, "no scores, no plan", topk, q, k, v, 3, statistical=True)
    check_error(ConfigError, "no plan", topk, q, k, v, 3, rank=3, statistical=True, plan=topk_plan(q @ k.mT, 3))
    refused = {"rank": 3, "statistical": True, "execution": "gather"}
    check_error(UnsupportedError, "the same number of keys", topk, q, k, v, 3, **refused)
    check_error(ConfigError, "statistical=True belongs to indexer='spark'", TopK, statistical=True)


@pytest.mark.untyped
def test_an_unknown_indexer_is_refused() -> None:
    check_error(ConfigError, "did you mean lightning", TopK, indexer="lightnin")


def test_fields_of_another_indexer_are_refused() -> None:
    check_error(ConfigError, "rank=4 belongs to indexer='spark', not 'exact'", TopK, rank=4)
    check_error(ConfigError, "rank=4", TopK, indexer="lightning", rank=4)
    for name in ("index_heads", "index_width"):
        for indexer in ("exact", "spark"):
            with pytest.raises(ConfigError, match=f"{name}=2 belongs to indexer='lightning', not '{indexer}'"):
                TopK(indexer=indexer, **{name: 2})


def test_cost_of_deit_tiny() -> None:
    """Fact 4.15: N^2 C + N k C; DSA C H D + C D + C H parameters."""
    site = Site(192, 3, Grid(14, 14, 1))
    assert TopK(k=25).operator_cost(site).macs == 197 * 197 * 192 + 197 * 25 * 192
    cost = TopK(k=25, indexer="lightning", index_heads=4, index_width=32).operator_cost(site, "paper")
    assert cost.params == 192 * (4 * 32 + 32 + 4)
    assert cost.macs == 197 * 197 * 4 * 32 + 2 * 197 * 25 * 192 + 197 * cost.params
