"""What is special of a mechanism, as the page shows it, agrees with its weights."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from operators import draw_qkv
from regard.core import Grid, Inputs, Operator, Site
from regard.core.view import View
from regard.explorer.weights import encode_view, read_weights
from regard.mixers.spelling import parse
from regard.swapping.swap import swap
from small_hosts import draw_large_weights, vit

GRID = Grid(3, 5, prefix=1)


def views_of(spelling: str) -> tuple[Operator, dict[str, View], Tensor]:
    """The operator, its views by name, and its weights (H, N, N) of the first of three images."""
    torch.manual_seed(0)
    operator = parse(spelling).operator(Site(16, 2, GRID)).double().eval()
    q, k, v = draw_qkv(16, 16)
    used = {name: x if name in operator.config.uses else None for name, x in zip("qkv", (q, k, v), strict=True)}
    with torch.no_grad():
        views = operator.views(Inputs(**used, grid=GRID))
        weights = operator.weights(used["q"], used["k"], v, grid=GRID)[0]
    return operator, {view.name: view for view in views}, weights


def by_query(view: View) -> Tensor:
    """The row of each query, (H, N, T)."""
    if view.row_of is None:
        return view.rows
    return torch.stack([rows[of] for rows, of in zip(view.rows, view.row_of, strict=True)])


@pytest.mark.parametrize("experts", [1, 2])
def test_keys_of_an_expert_are_those_with_weight(experts: int) -> None:
    _, views, weights = views_of(f"MiTA(m=3, k=4, experts={experts}, branches='route')")
    keys = by_query(views["keys of its expert" if experts == 1 else "keys of its experts"])
    assert torch.equal(keys, weights > 0)
    rows, lacking = (
        views["keys that no expert has"].rows,
        views["keys of its expert" if experts == 1 else "keys of its experts"].rows,
    )
    assert not (by_query(views["keys that no expert has"]) & keys).any()
    if experts == 1:
        assert torch.equal(rows[:, 0], ~lacking.any(1))
        assert (lacking.sum(-1) == 4).all()
        assert torch.equal(by_query(views["queries of its expert"]), (keys[:, :, None] == keys[:, None]).all(-1))


def test_a_landmark_looks_where_the_compressed_branch_does() -> None:
    """With the landmark branch alone the weights are averages of what the landmarks see."""
    _, views, weights = views_of("MiTA(m=3, k=4, branches='compress')")
    _, agents, same = views_of("Agent(m=3)")
    seen, agent = views["where its landmark looks"], agents["where its strongest landmark looks"]
    assert torch.equal(seen.rows, agent.rows)
    for view, matrix in ((seen, weights), (agent, same)):
        parts = torch.linalg.lstsq(view.rows.mT, matrix.mT).solution  # (H, m, N)
        torch.testing.assert_close(view.rows.mT @ parts, matrix.mT, rtol=0, atol=1e-10)
        assert torch.equal(parts.argmax(1), view.row_of)


@pytest.mark.parametrize("spelling", ["TopK(k=4)", "BRA(regions=(1, 3), k=2)", "MoBA(block=(2, 3), k=1)"])
def test_a_discrete_choice_shows_the_keys_with_weight(spelling: str) -> None:
    _, views, weights = views_of(spelling)
    assert list(views) == ["keys that it chose"]
    assert torch.equal(views["keys that it chose"].rows, weights > 0)
    assert 0 < (weights > 0).double().mean() < 1


def test_static_keys_are_compared_with_each_other() -> None:
    operator, views, _ = views_of("SKA()")
    (view,) = views.values()
    keys = operator.keys_on(GRID).detach()
    expected = [[F.cosine_similarity(a, b, dim=0) for b in keys[1]] for a in keys[1]]
    torch.testing.assert_close(view.rows[1], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spelling", ["Factors(terms='1111')", "Factors(terms='0110', window=3)"])
def test_factors_multiply_to_the_weights(spelling: str) -> None:
    """A softmax of a sum is the product of the softmaxes of its terms, divided by its sum."""
    _, views, weights = views_of(spelling)
    assert len(views) == spelling.count("1")
    product = torch.stack([view.rows for view in views.values()]).prod(0)
    torch.testing.assert_close(product / product.sum(-1, keepdim=True), weights, rtol=0, atol=1e-10)


def test_others_have_no_view() -> None:
    assert views_of("Softmax()")[1] == views_of("Linear()")[1] == {}


def test_views_are_encoded_for_the_page() -> None:
    """Sets exactly, maps within half a step, and left out from the largest where there is no room."""
    model, x = vit()
    draw_large_weights(swap(model.eval(), "MiTA(m=4, k=3)"))
    (first, *_) = read_weights(model, x[0], "*", 10**8).layers
    tokens = first.grid.tokens
    views = {view.name: view for view in first.views}
    keys, looks = views["keys of its expert"], views["where its landmark looks"]
    members = np.unpackbits(keys.bits, axis=-1, count=tokens)
    assert (members.sum(-1) == 3).all()
    assert keys.row_of.shape == (first.codes.shape[0], tokens)
    shares = looks.codes * looks.scales[..., None] / 255
    assert np.abs(shares.sum(-1) - 1).max() < tokens * 0.5 / 255
    row = torch.rand(1, 2, 9) > 0.5
    assert np.array_equal(np.unpackbits(encode_view(View("a", row)).bits, axis=-1, count=9), row.numpy())
    size = sum(layer.codes.size for layer in read_weights(model, x[0], "*", 10**8).layers[:-1])
    few = read_weights(model, x[0], "*", size + 2 * keys.size + 10)
    assert "where its landmark looks" in few.hidden_views
    assert [view.name for view in few.layers[0].views] != []
