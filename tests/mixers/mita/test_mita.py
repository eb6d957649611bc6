"""MiTA: its executions against the plain form, and what its equations imply in degenerate cases."""

import math
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from operators import check_error, check_heads_apart, check_layer_transforms, check_same, check_transforms
from published_layers import mita_by_query, one_query
from regard import ConfigError, Grid, Mask, MiTA, Site
from regard.core import GridError, ShapeError, UnsupportedError, merge
from regard.mixers.mita.routing import MitaPlan, largest
from regard.mixers.shared.expert_blocks import block_size, lay_out
from regard.ops import PooledQueries, mita, mita_plan, mita_reference, pool_landmarks, softmax_reference
from regard.testing.subject import gap

FORMS = ("dense", "gather", "grouped")


def draw(grid: Grid, seed: int = 0, width: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(3, 2, grid.tokens, width, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_may_have_no_queries_or_all(form: str) -> None:
    grid = Grid(4, 6)
    q, k, v = draw(grid)
    landmarks = pool_landmarks(q, grid, 4).detach()
    plan = mita_plan(q, k, landmarks, 5)
    plan = MitaPlan(plan.keys, torch.full_like(plan.experts, 2))
    out = mita(q, k, v, landmarks, 5, plan=plan, execution=form)
    assert gap(out, mita_reference(q, k, v, landmarks, 5, plan=plan)) < 1e-12
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.isfinite().all()


@pytest.mark.parametrize("bounded", [False, True])
def test_blocks_hold_every_pair_once_with_its_expert(bounded: bool) -> None:
    torch.manual_seed(1)
    plan = MitaPlan(torch.zeros(2, 3, 5, 4, dtype=torch.long), torch.randint(0, 4, (2, 3, 37, 2)))  # expert 4: none
    blocks = lay_out(plan.experts, plan.keys.shape[-2], 8, bounded)
    own = (plan.experts.flatten(0, 1) + 5 * torch.arange(6)[:, None, None]).flatten()
    assert blocks.source[blocks.slot].tolist() == list(range(own.numel()))
    assert torch.equal(blocks.expert[blocks.slot // 8], own)
    assert int(blocks.real.sum()) == own.numel()
    assert blocks.source.numel() == 8 * blocks.expert.numel()
    owner, expert = own[blocks.source].view(-1, 8), blocks.expert[:, None].expand(-1, 8)
    filled = blocks.real.view(-1, 8).any(-1)
    assert torch.equal(owner[filled], expert[filled])  # rows without a pair too
    assert torch.equal(owner // 5, expert // 5)  # and a block without any takes its rows from its own head
    if not bounded:
        assert blocks.expert.numel() == sum(-(-int(n) // 8) for n in own.bincount())


def test_block_size_is_near_the_mean_load() -> None:
    assert [block_size(196, 25), block_size(1024, 64), block_size(4096, 128), block_size(16384, 128)] == [8, 16, 32, 64]


# Degenerate cases: known mathematics


@pytest.mark.parametrize("m", [1, 6, 24])
@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_route_only_with_all_keys_is_softmax(m: int, form: str) -> None:
    """Of another input too."""
    q, _, _ = draw(Grid(4, 6))
    _, k, v = draw(Grid(3, 5), seed=1)
    landmarks = pool_landmarks(q, Grid(4, 6), m)
    for experts in {1, min(m, 6)}:  # every key as often: the same weights
        out = mita(q, k, v, landmarks, 15, experts=experts, branches="route", scale=0.9, execution=form)
        assert gap(out, softmax_reference(q, k, v, scale=0.9)) < 1e-12


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_one_softmax_is_over_landmarks_and_the_keys_of_every_expert(experts: int) -> None:
    grid = Grid(7, 8)
    q, k, v = draw(grid)
    landmarks = pool_landmarks(q, grid, 6)
    plan = mita_plan(q, k, landmarks, 9, experts=experts)
    out = torch.empty_like(q)
    for b, h, n in product(range(3), range(2), range(56)):
        own = plan.keys[b, h, plan.experts[b, h, n]].flatten()
        keys = torch.cat([landmarks[b, h], k[b, h, own]])
        values = torch.cat([softmax_reference(landmarks, k, v)[b, h], v[b, h, own]])
        out[b, h, n] = one_query(q[b, h, n], keys, values)
    assert gap(mita_reference(q, k, v, landmarks, 9, experts=experts), out) < 1e-12
    for form in FORMS:
        assert gap(mita(q, k, v, landmarks, 9, experts=experts, execution=form), out) < 1e-12


def test_what_is_kept_for_the_backward_grows_with_the_tokens() -> None:
    """Nothing of N x N and no gathered keys: inputs, plan, layout."""
    kept = []
    for side in (24, 34, 48):
        q, k, v = (torch.randn(1, 2, side * side, 32, requires_grad=True) for _ in range(3))
        landmarks = pool_landmarks(q, Grid(side, side), 25).detach()
        total = 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            mita(q, k, v, landmarks, 40, execution="native")
        kept.append(total / (3 * q.numel() * q.element_size()))
    assert max(kept) < 1.2  # times q, k and v
    assert max(kept) < 1.1 * min(kept)


def test_a_bias_can_be_trained_and_plain_forms_differentiated_twice() -> None:
    q, k, v = draw(Grid(4, 6))
    landmarks = pool_landmarks(q, Grid(4, 6), 4)
    bias = torch.randn(1, 24, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(mita(q, k, v, landmarks, 5, mask=Mask(bias=bias)).sum(), bias)
    assert grad.any()
    (once,) = torch.autograd.grad(mita(q, k, v, landmarks, 5, execution="dense").sum(), q, create_graph=True)
    assert torch.autograd.grad(once.pow(2).sum(), q)[0].any()


# Bad input


@pytest.mark.parametrize("form", FORMS)
def test_ties_keep_exactly_k_keys(form: str) -> None:
    """Which of equal keys is chosen is open; equal keys with equal values make the output the same for any choice."""
    q, k, v = (x.detach() for x in draw(Grid(4, 6)))
    k, v = k[:, :, :1].expand(-1, -1, 24, -1), v[:, :, :1].expand(-1, -1, 24, -1)
    landmarks = pool_landmarks(q, Grid(4, 6), 6)
    assert gap(mita(q, k, v, landmarks, 5, execution=form), v) < 1e-12
    assert all(len(set(row)) == 5 for row in mita_plan(q, k, landmarks, 5).keys.flatten(0, 2).tolist())


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("experts", [1, 2])
def test_what_is_not_finite_stays_in_its_head(form: str, experts: int) -> None:
    grid = Grid(4, 6)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mita(q, k, v, pool_landmarks(q, grid, 6), 5, experts=experts, execution=form)

    check_heads_apart(run, draw(grid))


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_any_key_are_zero_and_others_untouched(form: str) -> None:
    q, k, v = draw(Grid(4, 6))
    landmarks = pool_landmarks(q, Grid(4, 6), 6)
    keep = torch.ones(3, 24, dtype=torch.bool)
    keep[1] = False
    for branches in ("route", "both"):
        used = keep.any(-1, keepdim=True).expand(-1, 6)
        out = mita(q, k, v, landmarks, 5, mask=Mask(keep=keep), landmark_keep=used, branches=branches, execution=form)
        assert not out[1].any()
        assert gap(out[::2], mita(q[::2], k[::2], v[::2], landmarks[::2], 5, branches=branches)) < 1e-12
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True))


def test_more_landmarks_than_queries_are_refused_with_the_nearest_number() -> None:
    site = Site(16, 2, Grid(2, 3), memory=Grid(4, 6))
    check_error(GridError, "nearest possible: .*6", MiTA(m=9, k=5).build_cross, site)
    layer = MiTA(m=6, k=5).build_cross(site)  # every query is a landmark
    x, y = torch.randn(2, 6, 16), torch.randn(2, 24, 16)
    assert layer(x, site.grid, memory=y, memory_grid=Grid(4, 6)).isfinite().all()


def test_largest_takes_the_largest_with_nan_first() -> None:
    torch.manual_seed(0)
    for scores in (torch.randn(2, 3, 40), torch.randn(5, 7).double(), torch.randn(4, 9).bfloat16()):
        for top in (1, 3, scores.shape[-1]):
            found = scores.gather(-1, largest(scores, top)).sort(descending=True).values
            assert torch.equal(found, scores.topk(top).values)
    scores[1, 4] = math.nan
    assert 4 in largest(scores.float(), 2)[1]


def test_two_equal_landmarks() -> None:
    q, k, v = draw(Grid(4, 6))
    one = pool_landmarks(q, Grid(4, 6), 1)
    two = one.expand(-1, -1, 2, -1).contiguous()
    plan = MitaPlan(
        mita_plan(q, k, one, 5).keys.expand(-1, -1, 2, -1).contiguous(), torch.tensor([0, 1]).expand(3, 2, 24, 2)
    )
    single = MitaPlan(plan.keys, plan.experts[..., :1])
    union = mita(q, k, v, two, 5, experts=2, duplicates="union", plan=plan)
    assert gap(union, mita(q, k, v, two, 5, plan=single)) < 1e-12
    route = mita(q, k, v, two, 5, experts=2, branches="route", plan=plan)
    assert gap(route, mita(q, k, v, one, 5, branches="route")) < 1e-12
    assert gap(mita(q, k, v, two, 5, experts=2, plan=plan), union) > 1e-3  # counted twice, they weigh more


def test_union_with_all_keys_does_not_depend_on_the_number_of_experts() -> None:
    q, k, v = draw(Grid(4, 6))
    landmarks = pool_landmarks(q, Grid(4, 6), 4)
    outs = [mita(q, k, v, landmarks, 24, experts=s, duplicates="union") for s in (1, 2, 4)]
    assert max(gap(outs[0], out) for out in outs[1:]) < 1e-12
    joint = F.scaled_dot_product_attention(
        q, torch.cat([landmarks, k], -2), torch.cat([softmax_reference(landmarks, k, v), v], -2)
    )
    assert gap(outs[0], joint) < 1e-12


def test_union_equals_the_concatenation_without_repetitions() -> None:
    q, k, v = draw(Grid(4, 6))
    landmarks = pool_landmarks(q, Grid(4, 6), 4)
    plan = mita_plan(q, k, landmarks, 9, experts=3)
    out = mita(q, k, v, landmarks, 9, experts=3, duplicates="union", branches="route")
    for b, h, n in product(range(3), range(2), (0, 11, 23)):
        ids = plan.keys[b, h, plan.experts[b, h, n]].flatten().unique()
        assert ids.numel() < 27  # some are shared, else this tests nothing
        assert gap(out[b, h, n], ((k[b, h, ids] @ q[b, h, n]) * 8**-0.5).softmax(-1) @ v[b, h, ids]) < 1e-12


@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_compress_only_is_two_softmax_attentions(m: int, form: str) -> None:
    q, k, v = draw(Grid(4, 6, 1))
    landmarks = pool_landmarks(q, Grid(4, 6, 1), m)
    agent = softmax_reference(q, landmarks, softmax_reference(landmarks, k, v, scale=0.9), scale=0.9)
    options = {"branches": "compress", "scale": 0.9}
    assert gap(mita(q, k, v, landmarks, 1, execution=form, **options), agent) < 1e-12
    assert gap(mita_reference(q, k, v, landmarks, 1, **options), agent) < 1e-12


# Masks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top", [4, 20])  # 20: more than there are keys left
def test_padded_keys_change_nothing(form: str, top: int) -> None:
    q, k, v = draw(Grid(4, 6))
    landmarks = pool_landmarks(q, Grid(4, 6), 6)
    more = [torch.cat([x, 9 * torch.randn(3, 2, 7, 8, dtype=x.dtype)], -2) for x in (k[:, :, :13], v[:, :, :13])]
    keep = torch.arange(20).expand(3, -1) < 13
    out = mita(q, *more, landmarks, top, mask=Mask(keep=keep), execution=form)
    assert gap(out, mita(q, k[:, :, :13], v[:, :, :13], landmarks, min(top, 13))) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_a_key_bias_is_added_to_every_logit_of_the_key(form: str) -> None:
    q, k, v = draw(Grid(4, 6))
    landmarks = pool_landmarks(q, Grid(4, 6), 6)
    bias = torch.randn(2, 1, 24, dtype=torch.float64)
    for experts in (1, 2):
        options = {"experts": experts, "mask": Mask(bias=bias)}
        out = mita(q, k, v, landmarks, 5, execution=form, **options)
        assert gap(out, mita_reference(q, k, v, landmarks, 5, **options)) < 1e-12
        assert gap(out, mita(q, k, v, landmarks, 5, experts=experts)) > 1e-2
    all_keys = mita(q, k, v, landmarks, 24, branches="route", mask=Mask(bias=bias), execution=form)
    assert gap(all_keys, softmax_reference(q, k, v, mask=Mask(bias=bias))) < 1e-12
    assert torch.equal(mita_plan(q, k, landmarks, 5, mask=Mask(bias=bias)).keys.sort(-1).values,
                       ((landmarks @ k.mT) * 8**-0.5 + bias).topk(5).indices.sort(-1).values)  # fmt: skip


def test_padding_leaves_windows_and_queries_out() -> None:
    grid = Grid(4, 6, 1)
    q, k, v = draw(grid)
    operator = MiTA(m=(2, 3), k=5).operator(Site(16, 2, grid))
    keep = torch.ones(3, 25, dtype=torch.bool)
    keep[:, [1, 2, 7, 8]] = False  # the first window
    pooled, used = operator.pool(q, grid, keep)
    assert used is not None
    assert used.tolist() == [[False, True, True, True, True, True]] * 3
    assert gap(pooled[:, :, 1:], pool_landmarks(q, grid, (2, 3))[:, :, 1:]) < 1e-12
    out = operator(q, k, v, grid=grid, mask=Mask(keep=keep))
    fewer = mita(q, k[:, :, keep[0]], v[:, :, keep[0]], pooled[:, :, 1:], 5)
    assert gap(out, fewer) < 1e-12


@pytest.mark.parametrize("experts", [1, 2])
def test_a_plan_has_no_landmark_that_must_not_be_used(experts: int) -> None:
    q, k, _ = draw(Grid(4, 6))
    used = torch.tensor([[True, False, True, True, False, True]]).expand(3, -1)
    plan = mita_plan(q, k, pool_landmarks(q, Grid(4, 6), 6), 5, experts=experts, landmark_keep=used)
    assert set(plan.experts.flatten().tolist()) == {0, 2, 3, 5}


# Gradients, precision, compilation, cost


def published(q: Tensor, k: Tensor, v: Tensor, rows: int, top: int) -> Tensor:
    """The published layer between its projections: the first token is the first pixel, landmark keys scaled twice."""
    heads, (q, k, v) = q.shape[1], (merge(x) for x in (q, k, v))
    pooled = F.adaptive_avg_pool2d(q[:, :-1].mT.unflatten(-1, (math.isqrt(k.shape[1] - 1), -1)), rows).flatten(2).mT
    return mita_by_query(q, k, v, pooled, heads, top, twice=True).unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_the_official_preset_is_the_published_layer_with_its_gradients(form: str) -> None:
    grid = Grid(6, 6, 1)
    q, k, v = draw(grid)
    for rows, top in ((3, 7), (4, 5)):  # windows side by side, and windows that overlap
        operator = MiTA(m=rows**2, k=top, preset="official").operator(Site(16, 2, grid))
        operator.execution = form
        out, expected = operator(q, k, v, grid=grid), published(q, k, v, rows, top)
        check_same(out, expected, (q, k, v))
        assert gap(mita(q, k, v, pool_landmarks(q, grid, (rows, rows)), top), expected) > 1e-2


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("experts", [1, 2])
def test_function_transforms(form: str, experts: int) -> None:
    grid = Grid(12, 14, 1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mita(q, k, v, pool_landmarks(q, grid, 12), 9, experts=experts, execution=form)

    check_transforms(run, draw(grid))


def test_gradients_of_a_layer_for_every_image() -> None:
    grid = Grid(12, 14, 1)
    layer = MiTA(m=12, k=9).build(Site(16, 2, grid)).double()
    check_layer_transforms(layer, torch.randn(3, 169, 16, dtype=torch.float64), grid)


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_as_exact_as_the_plain_form(form: str) -> None:
    grid = Grid(7, 8, 1)
    q, k, v = (x.detach() for x in draw(grid, width=16))
    landmarks = pool_landmarks(q, grid, 6)
    plan = mita_plan(q, k, landmarks, 9)
    exact = mita_reference(q, k, v, landmarks, 9, plan=plan)
    single = [x.float() for x in (q, k, v, landmarks)]
    own = gap(mita_reference(*single, 9, plan=plan).double(), exact)
    assert gap(mita(*single, 9, plan=plan, execution=form).double(), exact) <= 4 * own + 1e-7


def test_selection_is_not_rounded_under_autocast() -> None:
    grid = Grid(7, 8)
    q, k, v = (x.detach().bfloat16() for x in draw(grid, width=16))
    landmarks = pool_landmarks(q, grid, 6)
    with torch.autocast("cpu", torch.bfloat16):
        plan = mita_plan(q, k, landmarks, 9)
        out = mita(q, k, v, landmarks, 9)
    scores = landmarks.float() @ k.float().mT
    assert torch.equal(plan.keys.sort(-1).values, scores.topk(9).indices.sort(-1).values)
    assert gap(out, mita(q, k, v, landmarks, 9, plan=plan)) == 0.0


@pytest.mark.untyped
@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_compiles_in_one_graph(form: str) -> None:
    grid = Grid(4, 6, 1)
    q, k, v = draw(grid)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mita(q, k, v, pool_landmarks(q, grid, (3, 4)), 5, experts=2, execution=form)

    torch.compiler.reset()
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    check_same(out, run(q, k, v), (q, k, v))


def test_model_totals_of_the_paper() -> None:
    for heads, dim, head, macs, gate in (
        (3, 192, 192, 1.143e9, False),
        (6, 384, 384, 4.377e9, False),
        (6, 384, 384, 4.73e9, True),
    ):
        site = Site(dim, heads, Grid(14, 14, prefix=1))
        layer = MiTA(m=25, k=25, gate=gate).cost(site).macs
        total = 196 * 768 * dim + 12 * (layer + 8 * 197 * dim * dim) + head * 1000
        assert abs(total - macs) < 0.006e9


# Layers and input checks


def test_queries_of_another_input() -> None:
    config, grid, memory = MiTA(m=6, k=7), Grid(4, 6), Grid(3, 5, 1)
    site = Site(16, 2, grid, memory=memory)
    layer = config.build_cross(site).double()
    x, y = torch.randn(3, 24, 16, dtype=torch.float64), torch.randn(3, 16, 16, dtype=torch.float64)
    keep = torch.arange(16).expand(3, -1) < 12
    out = layer(x, grid, Mask(keep=keep), memory=y, memory_grid=memory)
    changed = torch.where(keep[..., None], y, y + 1)
    assert gap(out, layer(x, grid, Mask(keep=keep), memory=changed, memory_grid=memory)) < 1e-12
    assert config.operator_cost(site).macs == 2 * 6 * 16 * (16 + 24) + 2 * 24 * 7 * 16


@pytest.mark.parametrize(
    ("error", "words", "run"),
    [
        (GridError, "nearest possible: 14, 15, 16, 18", lambda: MiTA(m=17, k=5).build(Site(16, 2, Grid(14, 14)))),
        (GridError, "nearest possible: 4x6", lambda: MiTA(m=(5, 9), k=5).build(Site(16, 2, Grid(4, 6)))),
        (ConfigError, "choose k between 1 and 24", lambda: MiTA(m=4, k=25).build(Site(16, 2, Grid(4, 6)))),
        (GridError, "nearest possible: 14, 15, 16, 18", lambda: MiTA(m=17, k=5).cost(Site(16, 2, Grid(14, 14)))),
        (GridError, "at most 24", lambda: MiTA(m=25, k=5, landmarks="tome").cost(Site(16, 2, Grid(4, 6)))),
        (ConfigError, "choose k between 1 and 24", lambda: MiTA(m=4, k=25).cost(Site(16, 2, Grid(4, 6)))),
        (ConfigError, "at least 1", lambda: MiTA(m=0)),
        (ConfigError, "at least 1", lambda: MiTA(m=(2, -1))),
        (ConfigError, "experts is at most m", lambda: MiTA(m=2, experts=3)),
    ],
    ids=["17 on 14x14", "5x9 on 4x6", "k", "cost of 17", "cost of 25", "cost of k", "m", "pair", "experts"],
)
def test_impossible_numbers_are_refused_when_built_and_in_costs(error: type, words: str, run: object) -> None:
    check_error(error, words, run)


@pytest.mark.parametrize("form", ["auto", "native", *FORMS])
def test_a_plan_beyond_the_keys_or_landmarks_is_refused(form: str) -> None:
    """Of the first head alone: a flat index would read the next one's."""
    q, k, v = (x.detach() for x in draw(Grid(4, 6)))
    landmarks = pool_landmarks(q, Grid(4, 6), 4)
    for label, change in (("keys", 20), ("keys", -24), ("experts", 4), ("experts", -1)):
        plan = mita_plan(q, k, landmarks, 5)
        getattr(plan, label)[0, 0] += change
        said = f"plan.{label} has indices from .*; expected 0 to"
        check_error(ShapeError, said, mita, q, k, v, landmarks, 5, plan=plan, execution=form)


def test_strips_are_warned_of_unless_a_pair_asks_for_them() -> None:
    with pytest.warns(UserWarning, match=r"7x1 landmarks, averages over strips of 2 x 14 cells"):
        MiTA(m=7, k=5).build(Site(16, 2, Grid(14, 14)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        square = Grid(14, 14)
        for m, grid in (((7, 1), square), (2, square), (25, square), (7, Grid(1, 21)), (4, Grid(7, 28))):
            MiTA(m=m, k=5).build(Site(16, 2, grid))
        MiTA(m=7, k=5, landmarks="avg1d").build(Site(16, 2, Grid(14, 14)))
        MiTA(m=7, k=5).cost(Site(16, 2, Grid(14, 14)))  # only a build warns


def test_a_cost_draws_nothing() -> None:
    before = torch.get_rng_state()
    MiTA(m=4, k=5, landmarks="learned").cost(Site(16, 2, Grid(4, 6)))
    assert torch.equal(torch.get_rng_state(), before)


def test_operators_refuse_what_does_not_fit() -> None:
    q, k, v = (x.detach() for x in draw(Grid(4, 6)))
    landmarks = pool_landmarks(q, Grid(4, 6), 4)
    check_error(ShapeError, "choose between 1 and 24", mita, q, k, v, landmarks, 25)
    check_error(ShapeError, "5 experts per query and there are 4", mita, q, k, v, landmarks, 5, experts=5)
    rows = Mask(bias=torch.zeros(24, 24))
    check_error(UnsupportedError, "key bias, which has one row", mita, q, k, v, landmarks, 5, mask=rows)
    check_error(ConfigError, "branches is one of both, route, compress", mita, q, k, v, landmarks, 5, branches="routes")
    for form in ("grouped", "gather"):
        union = {"experts": 2, "duplicates": "union", "execution": form}
        check_error(UnsupportedError, "shared keys once", mita, q, k, v, landmarks, 5, **union)
    check_error(ConfigError, "execution is auto, native", mita, q, k, v, landmarks, 5, execution="lean")
    unknown = {"branches": "compress", "execution": "nonsense"}
    check_error(ConfigError, "execution is auto, .*not 'nonsense'", mita, q, k, v, landmarks, 5, **unknown)
    plan = mita_plan(q, k, landmarks, 5)
    check_error(ShapeError, "plan.keys has shape", mita, q, k, v, landmarks, 6, plan=plan)
    layer = MiTA(m=4, k=5).build(Site(16, 2, Grid(4, 6)))
    check_error(UnsupportedError, "causal", layer, torch.randn(2, 24, 16), Grid(4, 6), Mask(causal=True))
    check_error(GridError, "do not fit", layer, torch.randn(2, 25, 16), Grid(4, 6))


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_every_execution_takes_pooled_landmarks(form: str) -> None:
    q, k, v = draw(Grid(4, 6))
    out = mita(q, k, v, PooledQueries(Grid(4, 6), 6), 5, execution=form)
    assert gap(out, mita_reference(q, k, v, pool_landmarks(q, Grid(4, 6), 6), 5)) < 1e-13


@pytest.mark.untyped
def test_pooled_landmarks_that_do_not_fit() -> None:
    q, k, v = torch.randn(3, 1, 1, 24, 8)
    check_error(GridError, "24 tokens do not fit", mita, q, k, v, PooledQueries(Grid(4, 5), 4), 3)
    check_error(GridError, "nearest", mita, q, k, v, PooledQueries(Grid(4, 6), 23), 3)
    check_error(ShapeError, "landmarks is a list", mita, q, k, v, [1.0], 3)


@pytest.mark.untyped
def test_landmarks_of_another_width_are_refused() -> None:
    q, k, v = (x.detach() for x in draw(Grid(4, 6)))
    check_error(ShapeError, "landmarks has width 7", mita, q, k, v, pool_landmarks(q, Grid(4, 6), 4)[..., :7], 5)


def test_merged_landmarks_of_many_cells_in_half_precision_are_finite() -> None:
    """The sum of a cluster exceeds the largest number of float16."""
    grid = Grid(64, 64)
    layer = MiTA(m=1, k=5, landmarks="tome").build(Site(dim=8, heads=1, grid=grid)).eval()
    queries = torch.full((1, 1, grid.tokens, 8), 20.0, dtype=torch.float16)
    with torch.no_grad():
        landmarks, _ = layer.operator.pool(queries, grid)
    assert landmarks.dtype == torch.float16
    assert torch.equal(landmarks, torch.full_like(landmarks, 20.0))
