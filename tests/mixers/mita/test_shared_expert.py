"""MiTA's shared expert by test-time training: the sum of two operators, composed by hand."""

import pytest
import torch

from operators import check_error, check_same
from regard import ConfigError, Grid, Mask, MiTA, Site, UnsupportedError
from regard.ops import mita, pool_landmarks, ttt
from regard.testing.subject import gap, perturb

CONFIG = MiTA(m=4, k=5, experts=2, shared_expert="ttt")


@pytest.mark.parametrize("memory", [None, Grid(2, 7)], ids=["self", "cross"])
def test_it_is_the_sum_of_routed_attention_and_a_trained_inner_model(memory: Grid | None) -> None:
    """In value and in the gradients of inputs and of the inner model; the routed part has no landmarks as keys."""
    grid = Grid(3, 5, 1)
    operator = perturb(CONFIG.operator(Site(dim=16, heads=2, grid=grid, memory=memory))).requires_grad_(True)
    tokens = (memory or grid).tokens
    q, k, v = (torch.randn(3, 2, n, 8, dtype=torch.float64, requires_grad=True) for n in (16, tokens, tokens))
    weights = operator.inner.w1, operator.inner.w2
    routed = mita(q, k, v, pool_landmarks(q, grid, 4), 5, experts=2, branches="route", execution="dense")
    expected = routed + ttt(q, k, v, *weights)
    out = operator(q, k, v, grid=grid, memory=memory)
    check_same(out, expected, (q, k, v, *weights), 1e-12, 1e-12)
    assert gap(operator.reference(q, k, v, grid=grid, memory=memory), expected) < 1e-12


def test_what_it_cannot_be_combined_with_is_an_error() -> None:
    for options in ({"branches": "compress"}, {"branches": "route"}, {"landmarks": "learned"}):
        check_error(ConfigError, "ttt", MiTA, m=4, k=5, shared_expert="ttt", **options)
    layer = CONFIG.build(Site(dim=16, heads=2, grid=Grid(3, 5)))
    mask = Mask(keep=torch.ones(1, 15, dtype=torch.bool))
    check_error(UnsupportedError, "padding", layer, torch.randn(1, 15, 16), mask=mask)
