"""Sparsifiner: the published predictor of the mask, what its loss moves, padding, counts."""

import pytest
import torch
from torch import Tensor

from operators import check_error
from regard import ConfigError, Grid, Mask, Site, Sparsifiner
from regard.core import Inputs
from regard.mixers.sparsifiner import SparsifinerOperator
from regard.ops import softmax_reference
from regard.testing.subject import gap, perturb

F64 = torch.float64
GRID = Grid(3, 4, 1)


def draw(**options: int) -> tuple[SparsifinerOperator, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = perturb(Sparsifiner(**{"k": 5, "m": 3, "channels": 4} | options).build(Site(16, 2, GRID)))
    return layer.operator, *torch.randn(3, 3, 2, 13, 8, dtype=F64)


def published(operator: SparsifinerOperator, q: Tensor, k: Tensor, v: Tensor, budget: int) -> Tensor:
    """MaskPredictor and Attention of the authors' code, without thresholds and the exception of the class token."""
    reduced_q = q @ operator.query.weight.mT + operator.query.bias
    reduced_k = (k @ operator.key.weight.mT + operator.key.bias).permute(0, 1, 3, 2)
    tokens, basis = (torch.cat([x.extra[0], x.cells[0]], -1) for x in (operator.project, operator.basis))
    coefficients = (reduced_q @ (reduced_k @ tokens.mT) * 4**-0.5).softmax(-1)
    indices = torch.topk(coefficients @ basis, budget, sorted=False)[1]
    mask = torch.zeros(*q.shape[:3], 13).scatter(-1, indices, 1.0).bool()
    return ((q @ k.mT) * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("budget", [1, 5, 13])
def test_it_attends_as_the_published_code(budget: int) -> None:
    operator, q, k, v = draw(k=budget)
    expected = published(operator, q, k, v, budget)
    for form in (operator, operator.reference):
        assert gap(form(q, k, v, grid=GRID), expected) < 1e-12
    if budget == 13:
        assert gap(expected, softmax_reference(q, k, v)) < 1e-12


def test_its_loss_moves_the_skim_towards_the_attention_and_nothing_else() -> None:
    operator, q, k, v = draw()
    q.requires_grad_()
    parameters = list(operator.parameters())
    assert torch.autograd.grad(operator(q, k, v, grid=GRID).sum(), parameters, allow_unused=True) == (None,) * 8
    keep = torch.arange(13).expand(3, -1) < 11
    hidden = k.masked_fill(~keep[:, None, :, None], torch.nan)
    inputs = Inputs(q, hidden, v, GRID, mask=Mask(keep=keep))
    first = loss = operator.own_loss(inputs)
    assert torch.autograd.grad(loss, q, allow_unused=True, retain_graph=True) == (None,)
    for _ in range(20):
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= 0.1 * gradient
        loss = operator.own_loss(inputs)
    assert 0 < loss.item() < 0.9 * first.item()


def test_padding_is_not_read() -> None:
    operator, q, k, v = draw()
    keep = torch.arange(13).expand(3, -1) < torch.tensor([13, 9, 3])[:, None]
    out = operator(q, k, v, grid=GRID, mask=Mask(keep=keep))
    bad = k.masked_fill(~keep[:, None, :, None], torch.nan)
    assert gap(operator(q, bad, v, grid=GRID, mask=Mask(keep=keep)), out) == 0
    assert gap(out[2], softmax_reference(q, k, v, mask=Mask(keep=keep))[2]) < 1e-12  # three keys, all within k = 5


def test_cost() -> None:
    """Two maps of 64 to 32 channels, E and U; the products of the skim, all logits, and the values of k keys."""
    site, config = Site(192, 3, Grid(14, 14, 1)), Sparsifiner()
    cost, n = config.operator_cost(site), 197
    assert cost.params == 2 * 65 * 32 + 2 * 24 * n
    skim = 2 * n * 192 * 32 + 24 * 3 * (2 * n * 32 + n * n)
    assert cost.macs == skim + n * n * 192 + n * 49 * 192
    assert config.operator_cost(site, "paper").macs == skim + 2 * n * 49 * 192


def test_what_is_refused() -> None:
    check_error(ConfigError, "at least 1, not k=5, m=0, channels=32", Sparsifiner, k=5, m=0)
    check_error(ConfigError, "k=49, but the site has 13 keys", Sparsifiner().build, Site(16, 2, GRID))
