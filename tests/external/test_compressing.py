"""Compressing mechanisms against independent code: transformers' Nystromformer, and the papers' equations.

The equations follow the order of operations of the papers (tokens by channels, loops over heads) and share no code with
the package. More of them are in tests/published_layers.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import published_layers as rewrites
from regard.core import Grid
from regard.ops import performer
from regard.testing.external import largest
from regard.testing.external.packages import nystrom_pairs

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.slow  # the import
@pytest.mark.parametrize(("batch", "heads", "start"), [(1, 1, "matrix"), (2, 2, "batch")])
def test_nystrom_is_that_of_transformers(batch, heads, start):
    """Its pseudo-inverse starts from one norm for the batch: ours is equal for one matrix, and with start="batch"."""
    pytest.importorskip("transformers")
    assert largest(nystrom_pairs(batch, heads, start)) < 1e-12
    if batch > 1:  # theirs couples the samples
        assert largest(nystrom_pairs(batch, heads, "matrix")) > 1e-6


def test_linear_of_the_comparison():
    """RMSNorm over C before the heads are split, relu + 1e-6, one head after another."""
    grid = Grid(3, 5, 1)
    mixer = rewrites.layer('Linear(feature="relu", norm="rms")', grid)
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = rewrites.projected(mixer, x)
    q = F.relu(F.rms_norm(q, (16,), mixer.operator.q_norm.weight.flatten(), 1e-6)) + 1e-6
    k = F.relu(F.rms_norm(k, (16,), mixer.operator.k_norm.weight.flatten(), 1e-6)) + 1e-6
    outs = []
    for head in (slice(0, 8), slice(8, 16)):
        state, total = k[..., head].mT @ v[..., head], k[..., head].sum(1)
        outs.append(q[..., head] @ state / (torch.einsum("bnc,bc->bn", q[..., head], total)[..., None] + 1e-6))
    assert torch.allclose(mixer(x, grid), mixer.proj(torch.cat(outs, -1)), atol=1e-12)


def test_linformer_as_published():
    grid = Grid(3, 5, 1)
    mixer = rewrites.layer("Linformer(m=4)", grid)
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = rewrites.projected(mixer, x)
    e, f = (torch.cat([p.extra, p.cells], -1)[0] for p in (mixer.operator.project_k, mixer.operator.project_v))
    k, v = torch.einsum("bnc,mn->bmc", k, e), torch.einsum("bnc,mn->bmc", v, f)
    out = F.multi_head_attention_forward(
        *(y.transpose(0, 1) for y in (q, k, v)),
        embed_dim_to_check=16,
        num_heads=2,
        in_proj_weight=torch.eye(16, dtype=F64).repeat(3, 1),
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=mixer.proj.weight,
        out_proj_bias=mixer.proj.bias,
        need_weights=False,
    )[0]
    assert torch.allclose(mixer(x, grid), out.transpose(0, 1), atol=1e-12)


def test_performer_as_published():
    """exp(W x - |x|^2 / 2 - max) + eps over sqrt(r), the maximum of a query and of all keys; loops over pairs."""
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=F64)
    features, eps = torch.randn(6, 4, dtype=F64), 1e-3
    fq, fk = torch.zeros(5, 6, dtype=F64), torch.zeros(5, 6, dtype=F64)
    exponent = lambda x: features @ (x * 4**-0.25) - (x * 4**-0.25).square().sum() / 2  # noqa: E731
    largest = max(exponent(x).max() for x in k[0, 0])
    for i in range(5):
        fq[i] = ((exponent(q[0, 0, i]) - exponent(q[0, 0, i]).max()).exp() + eps) / math.sqrt(6)
        fk[i] = ((exponent(k[0, 0, i]) - largest).exp() + eps) / math.sqrt(6)
    out = torch.stack([sum((fq[i] @ fk[j]) * v[0, 0, j] for j in range(5)) / (fq[i] @ fk.sum(0)) for i in range(5)])
    assert torch.allclose(performer(q, k, v, features, eps=eps)[0, 0], out, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mita", "MiTA(m=(2, 3), k=6)"),
        ("flatten", "FLatten(local=5, power=4.0)"),
        ("polaformer", "PolaFormer(local=5, gate=True, position=True, alpha=3.0)"),
        ("mhla", 'MHLA(m=(2, 2), norm=True, normalize="none")'),
        ("topk", 'TopK(k=5, indexer="lightning")'),
        ("bra", "BRA(regions=2, k=3)"),
        ("moba", "MoBA(block=(3, 4), k=2, own=False)"),
        ("nsa", "NSA(block=(3, 4), k=2, window=5)"),
        ("vit3", "ViT3(lr=0.9)"),
    ],
)
def test_a_rewrite_finds_a_wrong_field(monkeypatch, name, wrong):
    """Each independent layer uses the weights of a layer with another number or rule."""
    build = rewrites.layer
    monkeypatch.setattr(rewrites, "layer", lambda text, grid: build(wrong, grid))
    assert largest(getattr(rewrites, f"{name}_pairs")()[:1]) > 1e-4
