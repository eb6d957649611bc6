"""Landmarks: pooling against torch's, every extractor by what it must give in cases that are known."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from operators import check_error, check_hidden
from regard import ConfigError, Grid, Mask, MiTA, RegardError, Site, parse
from regard.core import GridError
from regard.mixers.mita.extractors import EXTRACTORS, merge_tokens
from regard.mixers.shared.landmarks import PooledQueries, pool_matrix
from regard.ops import mita, pool_landmarks
from regard.testing.subject import gap

GRIDS = (Grid(4, 6, 2), Grid(6, 4, 1), Grid(3, 5, 1, 2), Grid(7, 8), Grid(1, 12))


def draw(grid: Grid, seed: int = 0, width: int = 8) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(3, 2, grid.tokens, width, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def extracted(text: str, grid: Grid, q: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return parse(text).operator(Site(16, 2, grid)).double().eval().pool(q, grid, keep)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_pooling_equals_adaptive_pooling_of_the_cells(grid: Grid) -> None:
    x = draw(grid)[0]
    for m in {(1, 1), (min(3, grid.height), 4), (grid.height, grid.width)}:
        cells = grid.to_map(x.flatten(0, 1))[1]
        expected = F.adaptive_avg_pool2d(cells, m).flatten(-2).mT.unflatten(0, (3, 2))
        assert gap(pool_landmarks(x, grid, m), expected) < 1e-12
        matrix = pool_matrix(grid, m, dtype=torch.float64)
        assert gap(matrix @ x, expected) < 1e-12
        assert gap(matrix.sum(-1), torch.ones(m[0] * m[1], dtype=torch.float64)) < 1e-12
        outside = torch.ones(grid.tokens, dtype=torch.bool)
        outside[grid.span] = False
        assert not matrix[:, outside].any()
    number = grid.height * grid.width
    assert gap(pool_landmarks(x, grid, number), pool_landmarks(x, grid, grid.factor(number))) == 0


def test_landmarks_of_stretches_ignore_rows() -> None:
    grid = Grid(4, 6, 1)
    q = draw(grid)[0]
    pooled, _ = MiTA(m=5, k=3, landmarks="avg1d").operator(Site(16, 2, grid)).pool(q, grid)
    assert gap(pooled, F.adaptive_avg_pool1d(q[:, :, 1:].mT.flatten(0, 1), 5).mT.unflatten(0, (3, 2))) < 1e-12


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_windows_of_a_partition_hold_every_cell_once(grid: Grid) -> None:
    x = draw(grid)[0]
    for m in {(1, 1), (min(3, grid.height), 4), (grid.height, grid.width)}:
        matrix = pool_matrix(grid, m, policy="partition", dtype=torch.float64)
        assert ((matrix > 0).sum(0)[grid.span] == 1).all()
        assert gap(matrix.sum(-1), torch.ones(len(matrix), dtype=torch.float64)) < 1e-12
        assert gap(pool_landmarks(x, grid, m, policy="partition"), matrix @ x) < 1e-12
    rows = pool_matrix(Grid(1, 14), (1, 5), policy="partition")
    assert (rows > 0).sum(-1).tolist() == [2, 3, 3, 3, 3]


def test_both_policies_agree_where_windows_divide_the_grid() -> None:
    q = draw(Grid(4, 6, 1))[0]
    spellings = (f"MiTA(m=6, k=3, windows='{policy}')" for policy in ("adaptive", "partition"))
    assert gap(*(extracted(text, Grid(4, 6, 1), q)[0] for text in spellings)) < 1e-12


@pytest.mark.parametrize("kind", ["conv", "dwconv"])
@pytest.mark.parametrize(("grid", "m"), [(Grid(14, 14, 1), 25), (Grid(7, 10), (3, 4))], ids=["14x14", "7x10"])
def test_convolved_landmarks_start_as_the_mean_of_their_window(kind: str, grid: Grid, m: int | tuple[int, int]) -> None:
    """14 to 5 has the kernel 6 and the stride 2."""
    q = draw(grid)[0]
    operator = MiTA(m=m, k=3, landmarks=kind).operator(Site(16, 2, grid)).double()
    if m == 25:
        assert operator.extract.stride == (2, 2)
        assert operator.extract.kernel == (6, 6)
    cells = grid.to_map(q.flatten(0, 1))[1]
    means = F.avg_pool2d(cells, operator.extract.kernel, operator.extract.stride).flatten(-2).mT.unflatten(0, (3, 2))
    landmarks, _ = operator.pool(q, grid)
    assert landmarks.shape == (3, 2, operator.config.number, 8)
    assert gap(landmarks, means) < 1e-6  # the start is rounded to float32


def test_a_filter_of_one_cell_selects_it() -> None:
    grid = Grid(4, 6, 1)
    q = draw(grid)[0]
    operator = MiTA(m=(2, 3), k=3, landmarks="dwconv").operator(Site(16, 2, grid)).double()
    with torch.no_grad():
        operator.extract.weight.zero_()
        operator.extract.weight[:, :, 1, 0] = 1.0  # second row, first column of each 2x2 window
    landmarks, _ = operator.pool(q, grid)
    selected = [1 + (2 * row + 1) * 6 + 2 * column for row in range(2) for column in range(3)]
    assert gap(landmarks, q[:, :, selected]) < 1e-12


def test_learned_landmarks_are_the_same_for_every_image_and_are_trained() -> None:
    grid = Grid(4, 6, 1)
    q, k, v = draw(grid)
    operator = MiTA(m=7, k=3, landmarks="learned").operator(Site(16, 2, grid)).double()
    landmarks, _ = operator.pool(q, grid)
    assert gap(landmarks, operator.extract.landmarks.expand_as(landmarks)) == 0.0
    (grad,) = torch.autograd.grad(operator(q, k, v, grid=grid).pow(2).sum(), operator.extract.landmarks)
    assert grad.flatten(0, 1).any(-1).all()


def test_drawn_landmarks_are_distinct_cells_and_fixed_in_evaluation() -> None:
    grid = Grid(4, 6, 2)
    q = draw(grid)[0]
    operator = MiTA(m=9, k=3, landmarks="random").operator(Site(16, 2, grid))
    operator.eval()
    landmarks = operator.pool(q, grid)[0]
    assert gap(landmarks, operator.pool(q, grid)[0]) == 0.0
    same = (landmarks[:, :, :, None] == q[:, :, None, grid.span]).all(-1)  # (B, H, m, cells)
    assert (same.sum(-1) == 1).all()
    assert (same.sum(-2) <= 1).all()
    operator.train()
    torch.manual_seed(1)
    assert gap(operator.pool(q, grid)[0], operator.pool(q, grid)[0]) > 0


def test_as_many_drawn_landmarks_as_cells_are_the_cells() -> None:
    grid = Grid(4, 6, 2, 1)
    q = draw(grid)[0]
    landmarks, _ = extracted("MiTA(m=24, k=3, landmarks='random')", grid, q)
    order = (landmarks[:, :, :, None] == q[:, :, None, grid.span]).all(-1).int().argmax(-1)
    assert torch.equal(order.sort(-1).values, torch.arange(24).expand(3, 2, -1))


def test_merging_down_to_all_tokens_is_the_identity() -> None:
    grid = Grid(4, 6, 1)
    q = draw(grid)[0]
    assert gap(extracted("MiTA(m=24, k=3, landmarks='tome')", grid, q)[0], q[:, :, 1:]) < 1e-12


def test_merged_landmarks_are_means_of_their_members() -> None:
    torch.manual_seed(0)
    for number in (98, 49, 25, 1):
        owner, sizes = merge_tokens(torch.randn(2, 196, 8, dtype=torch.float64), number)
        assert sizes.sum(-1).tolist() == [196, 196]
        assert all(set(row) == set(range(number)) for row in owner.tolist())
        assert torch.equal(torch.stack([row.bincount(minlength=number) for row in owner]), sizes.long())
    grid = Grid(4, 6, 1)
    q = draw(grid)[0]
    landmarks, _ = extracted("MiTA(m=5, k=3, landmarks='tome')", grid, q)
    owner, _ = merge_tokens(q[:, :, 1:].mean(1), 5)
    for b in range(3):
        for i in range(5):
            assert gap(landmarks[b, :, i], q[b, :, 1:][:, owner[b] == i].mean(1)) < 1e-12


def test_merged_landmarks_are_of_the_kept_tokens_alone() -> None:
    grid, keep = Grid(4, 6, 1), torch.arange(25).expand(3, -1) == 7
    q = draw(grid)[0]
    landmarks, used = extracted("MiTA(m=5, k=3, landmarks='tome')", grid, q, keep)
    assert used is not None
    assert used.sum(-1).tolist() == [1, 1, 1]
    assert gap(landmarks.transpose(1, 2)[used], q[:, :, 7]) < 1e-12


def test_equal_tokens_merge_first() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 10, 8)
    x[0, 7] = x[0, 2]
    owner, _ = merge_tokens(x, 9)
    assert owner[0, 7] == owner[0, 2]


def test_tokens_merge_by_their_direction_and_padding_merges_first() -> None:
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [10.0, 10.0]]])  # the largest product is of 0 with 3
    owner, _ = merge_tokens(x, 3)
    assert owner[0, 0] == owner[0, 1]
    assert len(set(owner[0].tolist())) == 3
    keep = torch.tensor([[True, True, False, True, True, True]])
    _, sizes = merge_tokens(torch.ones(1, 6, 2), 5, keep)  # all kept tokens are equal, and stay apart
    assert sizes.tolist() == [[1.0] * 5]


@pytest.mark.parametrize("kind", ["conv", "dwconv"])
def test_convolved_landmarks_start_as_the_mean_of_the_kept_tokens_and_add_their_bias_once(kind: str) -> None:
    grid = Grid(4, 6, 1)
    q = draw(grid)[0]
    keep = torch.ones(3, 25, dtype=torch.bool)
    keep[:, 1:4], keep[1, 13:] = False, False
    operator = MiTA(m=(2, 3), k=3, landmarks=kind).operator(Site(16, 2, grid)).double()
    with torch.no_grad():
        operator.extract.bias.fill_(0.25)
    landmarks, used = operator.pool(q, grid, keep)
    assert gap(landmarks, pool_landmarks(q, grid, (2, 3), keep=keep) + 0.25) < 1e-6  # the start is in float32
    assert used is not None
    assert used.tolist() == [[True] * 6, [True] * 3 + [False] * 3, [True] * 6]


def test_the_windows_of_a_partition_are_those_that_padding_empties() -> None:
    """14 cells in 5 windows of a partition are 2 + 3 + 3 + 3 + 3; the second adaptive window is cells 2 to 5."""
    grid = Grid(1, 14, 1)
    q = draw(grid)[0]
    keep = torch.ones(3, 15, dtype=torch.bool)
    keep[:, 1 + 2 : 1 + 5] = False
    pooled, used = extracted("MiTA(m=(1, 5), k=3, windows='partition')", grid, q, keep)
    assert used is not None
    assert used.tolist() == [[True, False, True, True, True]] * 3
    assert gap(pooled[:, :, 0], q[:, :, 1:3].mean(2)) < 1e-12
    assert not extracted("MiTA(m=(1, 5), k=3)", grid, q, keep)[1].logical_not().any()


@pytest.mark.parametrize("kind", EXTRACTORS)
def test_hidden_tokens_may_hold_anything(kind: str) -> None:
    grid, keep = Grid(4, 6, 1), torch.ones(3, 25, dtype=torch.bool)
    q, k, v = (x.detach() for x in draw(grid))
    keep[:, 11:], keep[1, 2:5] = False, False  # fewer cells than the 12 landmarks, of which some have no token
    for branches in ("both", "compress"):
        config = MiTA(m=12, k=5, landmarks=kind, branches=branches)  # type: ignore[arg-type]
        operator = config.operator(Site(16, 2, grid)).double().eval()
        forms = (partial(run, grid=grid, mask=Mask(keep=keep)) for run in (operator, operator.reference))
        fast, plain = (check_hidden(run, (k, v), keep, queries=q) * keep[:, None, :, None] for run in forms)
        assert gap(fast, plain) < 1e-12


def test_drawn_landmarks_are_kept_tokens_while_there_are_some() -> None:
    grid = Grid(4, 6, 1)
    keep = torch.zeros(3, 25, dtype=torch.bool)
    keep[:, :6] = True  # the prefix token and five cells
    _, used = extracted("MiTA(m=6, k=5, landmarks='random')", grid, draw(grid)[0], keep)
    assert used is not None
    assert used.sum(-1).tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("error", "words", "text"),
    [
        (ConfigError, "would never be trained", "MiTA(branches='route', landmarks='learned')"),
        (ConfigError, "would never be trained", "MiTA(branches='route', landmarks='conv')"),
        (ConfigError, "would never be trained", "MiTA(branches='route', landmarks='dwconv')"),
        (ConfigError, "pools means", "MiTA(preset='official', landmarks='tome')"),
        (GridError, "at most 24", "MiTA(m=25, k=3, landmarks='random')"),
        (GridError, "at most 24", "MiTA(m=25, k=3, landmarks='tome')"),
        (GridError, "nearest possible", "MiTA(m=17, k=3, landmarks='conv')"),
    ],
)
def test_what_cannot_be_is_refused(error: type, words: str, text: str) -> None:
    check_error(error, words, lambda: parse(text).build(Site(16, 2, Grid(4, 6))))


@pytest.mark.untyped
def test_unknown_words_are_refused_with_the_nearest() -> None:
    check_error(ConfigError, "did you mean tome", parse, "MiTA(landmarks='tom')")
    check_error(ConfigError, "did you mean partition", parse, "MiTA(windows='partitions')")


def test_convolved_landmarks_refuse_another_grid() -> None:
    layer = MiTA(m=6, k=3, landmarks="conv").build(Site(16, 2, Grid(4, 6)))
    check_error(GridError, "were built for 4x6 cells", layer, torch.randn(2, 30, 16), Grid(5, 6))


def test_parameters_of_the_extractors() -> None:
    site = Site(192, 3, Grid(14, 14, 1))
    plain = MiTA().cost(site).params
    extra = {kind: MiTA(landmarks=kind).cost(site).params - plain for kind in EXTRACTORS}
    assert extra["learned"] == 25 * 192
    assert extra["dwconv"] == 192 * 37
    assert extra["conv"] == 192 * 192 * 36 + 192
    assert not any(extra[kind] for kind in ("avg2d", "avg1d", "random", "tome"))


def test_padded_tokens_do_not_steer_the_merging() -> None:
    torch.manual_seed(0)
    x, keep = torch.randn(4, 24, 8), torch.rand(4, 24) < 0.7
    owners = [merge_tokens(torch.where(keep[..., None], x, 100 * torch.randn_like(x)), 5, keep)[0] for _ in range(2)]
    assert torch.equal(owners[0][keep], owners[1][keep])


@pytest.mark.untyped
@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": 99}, GridError, "can start at token 0 to 3, not 99"),
        ({"start": -3}, GridError, "can start at token 0 to 3, not -3"),
        ({"start": 1.0}, RegardError, "(start is|can start at token 0 to 3, not) 1.0"),
        ({"policy": "foo"}, ConfigError, 'windows are "adaptive" or a "partition", not \'foo\''),
        ({"m": 2.5}, RegardError, r"(m is 2\.5; a whole number, \(a whole|a whole number, not 2\.5)"),
        ({"m": (2, 2, 2)}, RegardError, r"m is (a whole number or \(rows, columns\), not )?\(2, 2, 2\)"),
        ({"m": ()}, RegardError, r"m is (a whole number or \(rows, columns\), not )?\(\)"),
    ],
)
def test_windows_that_do_not_exist_are_refused(
    native: str, arguments: dict, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose tokens a compiled kernel would read beyond the tensor."""
    monkeypatch.setenv("REGARD_NATIVE", native)
    grid = Grid(3, 5, 1, 2)
    q = torch.randn(2, 2, grid.tokens, 8)
    given = {"m": (2, 2)} | arguments
    check_error(error, message, pool_landmarks, q, grid, **given)
    pooled = PooledQueries(grid, given.pop("m"), **given)
    check_error(error, message, mita, q, q, q, pooled, 2)
    check_error(error, message, pooled.of, q)


@pytest.mark.untyped
def test_queries_are_pooled_on_a_grid() -> None:
    q = torch.randn(2, 2, 16, 8)
    check_error(ConfigError, "landmarks are pooled on a Grid, .*, not 'x'", mita, q, q, q, PooledQueries("x", 4), 2)


def test_an_image_may_start_at_any_token_before_its_last_place() -> None:
    grid = Grid(3, 5, 1, 2)
    x = draw(grid)[0]
    for start in range(4):
        expected = pool_landmarks(x[:, :, start : start + 15], Grid(3, 5), (2, 2))
        assert gap(pool_landmarks(x, grid, (2, 2), start=start), expected) < 1e-12
        assert gap(pool_matrix(grid, (2, 2), start=start, dtype=torch.float64) @ x, expected) < 1e-12
