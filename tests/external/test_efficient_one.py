"""Efficient mechanisms beside independent code: transformers' Nystromformer, and the papers' equations written anew.

The second group follows the order of operations of the papers (tokens by channels, loops over heads or blocks, torch's
own resizing), so that it shares no line with the package.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from regard.core import Grid, Site
from regard.measure.external import largest
from regard.measure.external_pairs import nystrom_pairs
from regard.mixers.spell import parse
from regard.ops import performer

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def layer(text: str, grid: Grid, dim: int = 16, heads: int = 2, **options):
    """A layer in float64 whose parameters are moved away from their start."""
    made = parse(text).build(Site(dim, heads, grid, **options)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def rows(x: torch.Tensor) -> torch.Tensor:
    """(H, 1, d) as C channels."""
    return x.flatten()


@pytest.mark.slow  # the import
@pytest.mark.parametrize(("batch", "heads", "start"), [(1, 1, "matrix"), (2, 2, "batch")])
def test_nystrom_is_that_of_transformers(batch, heads, start):
    """Its start is one for the whole batch: ours is the same for one matrix, and with start="batch"."""
    pytest.importorskip("transformers")
    assert largest(nystrom_pairs(batch, heads, start)) < 1e-12
    if batch > 1:  # the coupling of samples is there in theirs
        assert largest(nystrom_pairs(batch, heads, "matrix")) > 1e-6


def test_linear_of_the_comparison():
    """RMSNorm over C before the heads are split, relu + 1e-6, one head after another."""
    grid = Grid(3, 5, 1)
    made = layer('Linear(feature="relu", norm="rms")', grid)
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = F.linear(x, made.qkv.weight, made.qkv.bias).chunk(3, -1)
    q = F.relu(F.rms_norm(q, (16,), rows(made.operator.q_norm.weight), 1e-6)) + 1e-6
    k = F.relu(F.rms_norm(k, (16,), rows(made.operator.k_norm.weight), 1e-6)) + 1e-6
    outs = []
    for head in (slice(0, 8), slice(8, 16)):
        state, total = k[..., head].mT @ v[..., head], k[..., head].sum(1)
        outs.append(q[..., head] @ state / (torch.einsum("bnc,bc->bn", q[..., head], total)[..., None] + 1e-6))
    assert torch.allclose(made(x, grid), made.proj(torch.cat(outs, -1)), atol=1e-12)


def test_flatten_as_published():
    """Norms over C before the heads are split; softplus scale; positions on keys; 5x5 convolution shared by heads."""
    grid = Grid(3, 5, 1)
    made = layer("FLatten(local=5)", grid)
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = F.linear(x, made.qkv.weight, made.qkv.bias).chunk(3, -1)
    places = made.operator.positions
    k = k + torch.cat([places.extra, places.cells], 1).transpose(0, 1).flatten(1)
    scale = F.softplus(rows(made.operator.sigma))
    q, k = (F.relu(q) + 1e-6) / scale, (F.relu(k) + 1e-6) / scale
    q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
    q, k = q**3, k**3
    q, k = q / q.norm(dim=-1, keepdim=True) * q_norm, k / k.norm(dim=-1, keepdim=True) * k_norm
    out = torch.zeros_like(v)
    for head in (slice(0, 8), slice(8, 16)):
        z = 1 / (torch.einsum("bic,bc->bi", q[..., head], k[..., head].sum(1)) + 1e-6)
        out[..., head] = torch.einsum("bic,bcd,bi->bid", q[..., head], k[..., head].mT @ v[..., head], z)
        image = v[:, 1:, head].reshape(3, 3, 5, 8).permute(0, 3, 1, 2)
        local = F.conv2d(image, made.local.weight, made.local.bias, padding=2, groups=8)
        out[:, 1:, head] += local.permute(0, 2, 3, 1).reshape(3, 15, 8)
    assert torch.allclose(made(x, grid), made.proj(out), atol=1e-12)


def test_polaformer_as_published():
    """Means with n^-0.5 on keys and values, eps on the mean, similar and opposite halves, gate without SiLU."""
    grid = Grid(3, 5)
    made = layer("PolaFormer(local=5, gate=True, position=True)", grid)
    x, op, n = torch.randn(3, 15, 16, dtype=F64), made.operator, 15
    q, k, v = F.linear(x, made.qkv.weight, made.qkv.bias).chunk(3, -1)
    k = k + op.positions.cells.transpose(0, 1).flatten(1)
    scale, power = F.softplus(rows(op.sigma)), 1 + 4 * rows(op.w).sigmoid()
    q, k = q / scale, k / scale
    out = torch.zeros_like(v)
    for first in (0, 8):
        head = slice(first, first + 8)
        qp, qn = F.relu(q[..., head]) ** power[head], F.relu(-q[..., head]) ** power[head]
        kk = torch.cat([F.relu(k[..., head]) ** power[head], F.relu(-k[..., head]) ** power[head]], -1)
        for index, qq in enumerate((torch.cat([qp, qn], -1), torch.cat([qn, qp], -1))):
            part = slice(first + 4 * index, first + 4 * index + 4)
            z = 1 / (qq @ kk.mean(1, keepdim=True).mT + 1e-6)
            out[..., part] = qq @ ((kk.mT * n**-0.5) @ (v[..., part] * n**-0.5)) * z
        image = v[..., head].mT.reshape(3, 8, 3, 5)
        out[..., head] += F.conv2d(image, made.local.weight, made.local.bias, padding=2, groups=8).flatten(2).mT
    assert torch.allclose(made(x, grid), made.proj(out * made.gate(x)), atol=1e-11)


@pytest.mark.parametrize("normalize", ["correct", "none"])
def test_mhla_block_by_block(normalize):
    """Four tiles of 2 x 3; LayerNorm of the input; every query by itself."""
    grid = Grid(4, 6)
    made = layer(f'MHLA(m=(2, 2), norm=True, normalize="{normalize}")', grid)
    x = torch.randn(3, 24, 16, dtype=F64)
    normed = F.layer_norm(x, (16,), made.input_norm.weight, made.input_norm.bias)
    q, k, v = (y.unflatten(-1, (2, 8)) for y in F.linear(normed, made.qkv.weight, made.qkv.bias).chunk(3, -1))
    q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
    mixing = made.operator.mixing if normalize == "none" else F.relu(made.operator.mixing)
    tile = [(token // 6 // 2) * 2 + (token % 6) // 3 for token in range(24)]
    states = [sum(torch.einsum("bhc,bhd->bhcd", k[:, t], v[:, t]) for t in range(24) if tile[t] == j) for j in range(4)]
    totals = [sum(k[:, t] for t in range(24) if tile[t] == j) for j in range(4)]
    out = []
    for t in range(24):
        state = sum(mixing[tile[t], j] * states[j] for j in range(4))
        total = sum(mixing[tile[t], j] * totals[j] for j in range(4))
        value = torch.einsum("bhc,bhcd->bhd", q[:, t], state)
        out.append(value / ((q[:, t] * total).sum(-1, keepdim=True) + 1e-6) if normalize == "correct" else value)
    assert torch.allclose(made(x, grid), made.proj(torch.stack(out, 1).flatten(2)), atol=1e-11)


def test_inline_as_published():
    """Keys with values over N first, then the correction; kernels of each image by grouped maps."""
    grid = Grid(3, 5, 1)
    made = layer("InLine(residual=True)", grid)
    x, n = torch.randn(3, 16, 16, dtype=F64), 16
    q, k, v = (
        y.unflatten(-1, (2, 8)).transpose(1, 2) for y in F.linear(x, made.qkv.weight, made.qkv.bias).chunk(3, -1)
    )
    scale = 8**-0.5
    out = q @ ((k * scale / n).mT @ v)
    out = out + (1 - q @ k.mean(2, keepdim=True).mT * scale) * v.mean(2, keepdim=True)
    out = out.transpose(1, 2).flatten(2)
    for image in range(3):
        mean, flat = x[image].mean(0), v[image].transpose(0, 1).flatten(1)
        for channel in range(16):
            group = slice(0, 8) if channel < 8 else slice(8, 16)
            hidden = F.gelu(made.first.weight[group, :, 0] @ mean[group] + made.first.bias[group])
            taps = made.second.weight[9 * channel : 9 * channel + 9, :, 0] @ hidden
            kernel = (taps + made.second.bias[9 * channel : 9 * channel + 9]).reshape(1, 1, 3, 3)
            out[image, 1:, channel] += F.conv2d(flat[1:, channel].reshape(1, 1, 3, 5), kernel, padding=1).flatten()
    assert torch.allclose(made(x, grid), made.proj(out), atol=1e-11)


def test_agent_as_published():
    """Queries of the cells pooled by torch; both biases resized by torch; the class column apart; 3x3 convolution."""
    grid = Grid(6, 9, 1)
    made = layer("Agent(m=(3, 3), bias=True, dwc=3)", grid)
    x, op = torch.randn(3, 55, 16, dtype=F64), made.operator
    q, k, v = F.linear(x, made.qkv.weight, made.qkv.bias).chunk(3, -1)
    pooled = F.adaptive_avg_pool2d(q[:, 1:].mT.reshape(3, 16, 6, 9), (3, 3)).flatten(2).mT
    q, k, vh, a = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (q, k, v, pooled))

    def bias(made):
        table = F.interpolate(made.table, (6, 9), mode="bilinear") + made.rows + made.columns
        return torch.cat([made.extra, table.flatten(2)], -1)

    collected = (a * 8**-0.5 @ k.mT + bias(op.collect)).softmax(-1) @ vh
    out = ((q * 8**-0.5 @ a.mT + bias(op.read).mT).softmax(-1) @ collected).transpose(1, 2).flatten(2)
    local = F.conv2d(v[:, 1:].mT.reshape(3, 16, 6, 9), made.dwc.weight, made.dwc.bias, padding=1, groups=16)
    out = torch.cat([out[:, :1], out[:, 1:] + local.flatten(2).mT], 1)
    assert torch.allclose(made(x, grid), made.proj(out), atol=1e-11)


def test_linformer_as_published():
    grid = Grid(3, 5, 1)
    made = layer("Linformer(m=4)", grid)
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = F.linear(x, made.qkv.weight, made.qkv.bias).chunk(3, -1)
    e, f = (torch.cat([p.extra, p.cells], -1)[0] for p in (made.operator.project_k, made.operator.project_v))
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
        out_proj_weight=made.proj.weight,
        out_proj_bias=made.proj.bias,
        need_weights=False,
    )[0]
    assert torch.allclose(made(x, grid), out.transpose(0, 1), atol=1e-12)


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
