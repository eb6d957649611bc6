"""Degenerate cases in which different compressing mechanisms are the same."""

import pytest
import torch

from regard.core import Grid, Mask, Operator, Site
from regard.mixers.spelling import parse
from regard.ops import (
    agent,
    inline,
    linear,
    mita,
    nystrom,
    performer,
    polaformer,
    pool_landmarks,
    softmax_reference,
)

F64 = torch.float64
GRIDS = (Grid(4, 6, 2), Grid(6, 4, 1), Grid(3, 5, 1, 2), Grid(6, 6))
LINEAR = ["Linear()", 'Linear(feature="relu")', "FLatten(position=False)", "MHLA(m=1)", "InLine()", "Performer()"]
ALL = [*LINEAR, "PolaFormer()", "Agent(m=3)", "Linformer(m=3)", "Nystrom(m=3)"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tensors(grid: Grid, e: int = 8):
    make = lambda *shape: torch.randn(3, 2, grid.tokens, *shape, dtype=F64)  # noqa: E731
    return make(8), make(8), make(e)


def operator(text: str, grid: Grid) -> Operator:
    return parse(text).operator(Site(16, 2, grid)).double()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("m", [1, 3, (3, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_agent_is_mita_that_only_compresses(grid, m, masked):
    """Same landmarks, with padding and with a bias of keys, too."""
    q, k, v = tensors(grid)
    mask = None
    if masked:
        keep = torch.rand(3, grid.tokens) > 0.3
        mask = Mask(keep=keep, bias=torch.randn(2, 1, grid.tokens, dtype=F64))
    landmarks = pool_landmarks(q, grid, m)
    expected = mita(q, k, v, landmarks, 1, branches="compress", mask=mask)
    assert torch.allclose(agent(q, k, v, landmarks, mask=mask), expected, atol=1e-12)
    agent_operator, mita_operator = (
        operator(f"Agent(m={m})", grid),
        operator(f'MiTA(m={m}, k=1, branches="compress")', grid),
    )
    assert torch.allclose(
        agent_operator(q, k, v, grid=grid, mask=mask), mita_operator(q, k, v, grid=grid, mask=mask), atol=1e-12
    )


def test_agent_is_nystrom_with_the_identity_in_the_middle():
    """Landmarks far apart make the middle matrix the identity; keys' landmarks are the queries' then."""
    q, k, v = tensors(Grid(4, 6))
    landmarks = 60 * torch.eye(8, dtype=F64)[:4].expand(3, 2, 4, 8)
    assert torch.allclose(nystrom(q, k, v, landmarks, landmarks), agent(q, k, v, landmarks), atol=1e-9)


def test_linear_attention_with_first_moments_as_features_is_softmax_for_small_logits():
    """exp(x) = 1 + x."""
    q, k, v = tensors(Grid(3, 5))
    moments = lambda x: torch.cat([torch.ones_like(x[..., :1]), x], -1)  # noqa: E731
    small = linear(1e-4 * q, k, v, feature=moments, eps=0.0)
    assert torch.allclose(small, softmax_reference(1e-4 * q, k, v, scale=1.0), atol=1e-6)


def test_inline_is_softmax_to_first_order():
    """Weights 1 / N + (logit - mean logit) / N: the expansion of softmax for small logits."""
    q, k, v = tensors(Grid(3, 5))
    near, far = ((inline(s * q, k, v) - softmax_reference(s * q, k, v)).abs().max() for s in (1e-4, 1e-2))
    assert near < 1e-6
    assert 5e3 < far / near < 2e4  # the error is of second order


def test_relu_linear_attention_by_performer_and_polaformer():
    q, k, v = tensors(Grid(4, 6, 1))
    relu = linear(q, k, v, feature="relu")
    features = torch.eye(8, dtype=F64)
    assert torch.allclose(performer(q, k, v, features, kernel="relu", eps=1e-6 * 8**-0.25), relu, atol=1e-5)
    q, k = q.abs(), k.abs()
    half = polaformer(q, k, v, torch.ones(2, 1, 8, dtype=F64), eps=0.0)[..., :4]
    plain = linear(q, k, v, feature="identity", eps=0.0)[..., :4]
    assert torch.allclose(half, plain, atol=1e-12)


@pytest.mark.parametrize("text", ALL)
def test_equal_keys_average_the_values(text):
    """Equal keys have equal weights (without biases, position embeddings and projections of tokens)."""
    grid = Grid(4, 6, 1)
    q, k, v = tensors(grid)
    mechanism = operator(text, grid)
    if text.startswith("Linformer"):
        with torch.no_grad():
            mechanism.project_v.cells.fill_(1 / 25)
            mechanism.project_v.extra.fill_(1 / 25)
    if text.startswith("MHLA"):
        with torch.no_grad():
            mechanism.mixing.fill_(1.0)
    k = k.abs() + 0.1  # positive relu features for either sign of a query
    q[..., 0], q[..., 1] = q[..., 0].abs() + 0.1, -q[..., 1].abs() - 0.1
    k = k[:, :, :1].expand_as(k)
    out = mechanism(q, k, v, grid=grid)
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out), atol=2e-3)
