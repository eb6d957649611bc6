"""Pairs (ours, rewritten) for mechanisms that no installed package has: their published layers, written anew.

Each rewrite follows the order of operations of the paper or its repository (tokens by channels, loops over images,
heads, queries or blocks, torch's own pooling, resizing and autograd) and shares no line with the mechanism. It is
weaker evidence than a package, because the same authors wrote both: `REWRITES` lists them for the tests alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Grid, Site, merge
from regard.testing.external import External
from regard.testing.external.packages import F64, Pairs, perturb


def layer(text: str, grid: Grid) -> Any:
    """A layer of 16 channels and 2 heads in float64, its parameters away from their start; seeds the generator."""
    from regard.mixers.spelling import parse

    torch.manual_seed(0)
    return perturb(parse(text).build(Site(16, 2, grid)))


def projected(ours: Any, x: Tensor) -> tuple[Tensor, ...]:
    """q, k and v as tokens by channels."""
    return F.linear(x, ours.qkv.weight, ours.qkv.bias).chunk(3, -1)


def split(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tokens by channels as two heads, heads first."""
    return tuple(y.unflatten(-1, (2, 8)).transpose(1, 2) for y in tensors)


def one_query(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one query (d,) to keys (M, d)."""
    return (keys @ q * q.shape[-1] ** -0.5).softmax(-1) @ values


# MiTA, agents


def mita_by_query(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, number: int, top: int, twice: bool) -> Tensor:
    """MiTA's Algorithm 1 for one image, head and query after another; tokens and landmarks by channels.

    twice: whether logits of landmarks are scaled twice, as in the published code.
    """
    out = torch.empty_like(q)
    for image in range(len(q)):
        for part in torch.arange(q.shape[-1]).chunk(number):
            queries, keys, values, marks = (y[image][:, part] for y in (q, k, v, landmarks))
            scale, scores = len(part) ** -0.5, marks @ keys.mT
            chosen, compressed = scores.topk(top).indices, (scores * scale).softmax(-1) @ values
            for token, query in enumerate(queries):
                expert = chosen[(marks @ query).argmax()]
                logits = torch.cat([marks @ query * (scale * scale if twice else scale), keys[expert] @ query * scale])
                out[image, token, part] = logits.softmax(-1) @ torch.cat([compressed, values[expert]])
    return out


def mita_pairs() -> Pairs:
    """MiTA as in the paper, as published for DeiT (pooled from the class token on) and for ViT-5 (patches alone)."""
    grid, pairs = Grid(5, 8, 1), []
    for preset, start in (("paper", 1), ("official", 0), ("official-patches", 1)):
        ours = layer(f'MiTA(m=(2, 3), k=7, preset="{preset}")', grid)
        x = torch.randn(2, 41, 16, dtype=F64)
        q, k, v = projected(ours, x)
        pooled = F.adaptive_avg_pool2d(q[:, start : start + 40].mT.reshape(2, 16, 5, 8), (2, 3)).flatten(2).mT
        pairs.append((ours(x, grid), ours.proj(mita_by_query(q, k, v, pooled, 2, 7, preset != "paper"))))
    return pairs


def agent_pairs() -> Pairs:
    """Agent with biases and a 3x3 convolution, then the layer without them that MiTA's comparison published."""
    grid = Grid(6, 9, 1)
    full, bare = layer("Agent(m=(3, 3), bias=True, dwc=3)", grid), layer('Agent(m=(3, 3), preset="official")', grid)
    x, pairs = torch.randn(3, 55, 16, dtype=F64), []
    for ours, start in ((full, 1), (bare, 0)):
        q, k, v = projected(ours, x)
        pooled = F.adaptive_avg_pool2d(q[:, start : start + 54].mT.reshape(3, 16, 6, 9), (3, 3)).flatten(2).mT
        queries, keys, values, a = split(q, k, v, pooled)
        to_keys, to_agents = a * 8**-0.5 @ keys.mT, queries * 8**-0.5 @ a.mT
        if start:
            tables = [
                F.interpolate(bias.table, (6, 9), mode="bilinear") + bias.rows + bias.columns
                for bias in (ours.operator.collect, ours.operator.read)
            ]
            to_keys = to_keys + torch.cat([ours.operator.collect.extra, tables[0].flatten(2)], -1)
            to_agents = to_agents + torch.cat([ours.operator.read.extra, tables[1].flatten(2)], -1).mT
        out = (to_agents.softmax(-1) @ (to_keys.softmax(-1) @ values)).transpose(1, 2).flatten(2)
        if start:
            local = F.conv2d(v[:, 1:].mT.reshape(3, 16, 6, 9), ours.dwc.weight, ours.dwc.bias, padding=1, groups=16)
            out = torch.cat([out[:, :1], out[:, 1:] + local.flatten(2).mT], 1)
        pairs.append((ours(x, grid), ours.proj(out)))
    return pairs


# linear attentions


def flatten_pairs() -> Pairs:
    """FLatten: norms over C before heads are split, softplus scale, positions on keys, 5x5 convolution of each head."""
    grid = Grid(3, 5, 1)
    ours = layer("FLatten(local=5)", grid)
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = projected(ours, x)
    positions = ours.operator.positions
    k = k + torch.cat([positions.extra, positions.cells], 1).transpose(0, 1).flatten(1)
    scale = F.softplus(ours.operator.sigma.flatten())
    q, k = (F.relu(q) + 1e-6) / scale, (F.relu(k) + 1e-6) / scale
    q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
    q, k = q**3, k**3
    q, k = q / q.norm(dim=-1, keepdim=True) * q_norm, k / k.norm(dim=-1, keepdim=True) * k_norm
    out = torch.zeros_like(v)
    for head in (slice(0, 8), slice(8, 16)):
        z = 1 / (torch.einsum("bic,bc->bi", q[..., head], k[..., head].sum(1)) + 1e-6)
        out[..., head] = torch.einsum("bic,bcd,bi->bid", q[..., head], k[..., head].mT @ v[..., head], z)
        image = v[:, 1:, head].reshape(3, 3, 5, 8).permute(0, 3, 1, 2)
        local = F.conv2d(image, ours.local.weight, ours.local.bias, padding=2, groups=8)
        out[:, 1:, head] += local.permute(0, 2, 3, 1).reshape(3, 15, 8)
    return [(ours(x, grid), ours.proj(out))]


def polaformer_pairs() -> Pairs:
    """PolaFormer: means with n^-0.5 on keys and values, eps on the mean, same and opposite signs, gate without SiLU."""
    grid = Grid(3, 5)
    ours = layer("PolaFormer(local=5, gate=True, position=True)", grid)
    x, op, n = torch.randn(3, 15, 16, dtype=F64), ours.operator, 15
    q, k, v = projected(ours, x)
    k = k + op.positions.cells.transpose(0, 1).flatten(1)
    scale, power = F.softplus(op.sigma.flatten()), 1 + 4 * op.w.flatten().sigmoid()
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
        out[..., head] += F.conv2d(image, ours.local.weight, ours.local.bias, padding=2, groups=8).flatten(2).mT
    return [(ours(x, grid), ours.proj(out * ours.gate(x)))]


def mhla_pairs() -> Pairs:
    """MHLA on four tiles of 2x3, query by query: normalised, and without as in MiTA's comparison."""
    grid, pairs = Grid(4, 6), []
    for normalize in ("correct", "none"):
        ours = layer(f'MHLA(m=(2, 2), norm=True, normalize="{normalize}")', grid)
        x = torch.randn(3, 24, 16, dtype=F64)
        normed = F.layer_norm(x, (16,), ours.input_norm.weight, ours.input_norm.bias)
        q, k, v = (y.unflatten(-1, (2, 8)) for y in projected(ours, normed))
        q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
        mixing = ours.operator.mixing if normalize == "none" else F.relu(ours.operator.mixing)
        tile = [(token // 6 // 2) * 2 + (token % 6) // 3 for token in range(24)]
        members = [[token for token in range(24) if tile[token] == j] for j in range(4)]
        states = torch.stack([torch.einsum("bthc,bthd->bhcd", k[:, tile], v[:, tile]) for tile in members])
        totals = torch.stack([k[:, tile].sum(1) for tile in members])
        out = []
        for token in range(24):
            state = torch.einsum("j,jbhcd->bhcd", mixing[tile[token]], states)
            value = torch.einsum("bhc,bhcd->bhd", q[:, token], state)
            if normalize == "correct":
                total = torch.einsum("j,jbhc->bhc", mixing[tile[token]], totals)
                value = value / ((q[:, token] * total).sum(-1, keepdim=True) + 1e-6)
            out.append(value)
        pairs.append((ours(x, grid), ours.proj(torch.stack(out, 1).flatten(2))))
    return pairs


def inline_pairs() -> Pairs:
    """InLine: keys with values over N first, then the correction; kernels of each image by grouped maps."""
    grid = Grid(3, 5, 1)
    ours = layer("InLine(residual=True)", grid)
    x, n = torch.randn(3, 16, 16, dtype=F64), 16
    q, k, v = split(*projected(ours, x))
    scale = 8**-0.5
    out = q @ ((k * scale / n).mT @ v)
    out = out + (1 - q @ k.mean(2, keepdim=True).mT * scale) * v.mean(2, keepdim=True)
    out = out.transpose(1, 2).flatten(2)
    for image in range(3):
        mean, flat = x[image].mean(0), v[image].transpose(0, 1).flatten(1)
        for channel in range(16):
            group = slice(0, 8) if channel < 8 else slice(8, 16)
            hidden = F.gelu(ours.first.weight[group, :, 0] @ mean[group] + ours.first.bias[group])
            taps = ours.second.weight[9 * channel : 9 * channel + 9, :, 0] @ hidden
            kernel = (taps + ours.second.bias[9 * channel : 9 * channel + 9]).reshape(1, 1, 3, 3)
            out[image, 1:, channel] += F.conv2d(flat[1:, channel].reshape(1, 1, 3, 5), kernel, padding=1).flatten()
    return [(ours(x, grid), ours.proj(out))]


# selections


def topk_pairs() -> Pairs:
    """TopK beside torch's attention with a mask of the keys that reach the k-th logit; DeepSeek-V3.2's index scores."""
    grid = Grid(3, 5, 1)
    ours, indexed = layer("TopK(k=5)", grid), layer('TopK(k=5, indexer="lightning")', grid).operator.index
    x = torch.randn(3, 16, 16, dtype=F64)
    q, k, v = split(*projected(ours, x))
    logits = q @ k.mT
    keep = logits >= logits.sort(-1, descending=True).values[..., 4:5]
    tokens_q, tokens_k = merge(q), merge(k)
    width = indexed.key.out_features
    parts = (tokens_q @ indexed.query.weight.mT).unflatten(-1, (-1, width))  # (B, N, heads, width)
    scores = F.relu(torch.einsum("bshd,btd->bsht", parts, tokens_k @ indexed.key.weight.mT))
    expected = torch.einsum("bsht,bsh->bst", scores, tokens_q @ indexed.weight.weight.mT)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    return [(ours(x, grid), ours.proj(merge(attended))), (indexed.parts(q, k)[0], expected)]


def bra_pairs() -> Pairs:
    """BRA in BiFormer's order: windows, their means, router on all channels, gather, scale C^-0.5; then the routes."""
    from regard.mixers.bra import bra_plan

    h, w, s, top = 6, 10, 2, 3
    grid = Grid(h, w)
    ours = layer(f'BRA(regions={s}, k={top}, preset="official")', grid)
    x = torch.randn(2, 60, 16, dtype=F64)
    q, k, v = projected(ours, x)
    size = (h // s, w // s)
    windows = [F.unfold(y.mT.unflatten(-1, (h, w)), size, stride=size).unflatten(1, (16, -1)) for y in (q, k, v)]
    qw, kw, vw = (y.permute(0, 3, 2, 1) for y in windows)  # (B, s * s, area, C)
    routes = (qw.mean(2) * 16**-0.5 @ kw.mean(2).mT).topk(top).indices
    out = torch.zeros_like(qw)
    for image in range(2):
        for region in range(s * s):
            region_k, region_v = (torch.cat([y[image, i] for i in routes[image, region]]) for y in (kw, vw))
            for part in torch.arange(16).chunk(2):
                a = (qw[image, region][:, part] * 16**-0.5 @ region_k[:, part].mT).softmax(-1)
                out[image, region][:, part] = a @ region_v[:, part]
    folded = F.fold(out.permute(0, 3, 2, 1).flatten(1, 2), (h, w), size, stride=size)
    queries, keys = split(q, k)
    regions = bra_plan(queries, keys, grid, s, top).regions
    return [
        (ours(x, grid), ours.proj(folded.flatten(2).mT)),
        (regions.sort(-1).values.double(), routes.sort(-1).values.double()),
    ]


def tiles(grid: Grid, rows: int, columns: int) -> list[list[int]]:
    """The tokens of tiles of the grid; those at its end may be smaller."""
    members: dict[tuple[int, int], list[int]] = {}
    for y in range(grid.height):
        for x in range(grid.width):
            members.setdefault((y // rows, x // columns), []).append(grid.prefix + y * grid.width + x)
    return list(members.values())


def moba_pairs() -> Pairs:
    """MoBA query by query: its own tile, the best other tiles by mean key, and the extra token, in one softmax."""
    grid, top = Grid(4, 6, 1), 2
    ours = layer(f"MoBA(block=(3, 4), k={top})", grid)
    x = torch.randn(2, 25, 16, dtype=F64)
    q, k, v = split(*projected(ours, x))
    members, out = tiles(grid, 3, 4), torch.empty_like(v)
    for image in range(2):
        for head in range(2):
            means = torch.stack([k[image, head, tile].mean(0) for tile in members])
            for token in range(25):
                ranks = (means @ q[image, head, token]).tolist()
                order = sorted(range(len(members)), key=lambda j: (token not in members[j], -ranks[j]))  # noqa: B023
                keys_of_query = [0, *(key for j in order[:top] for key in members[j])]
                out[image, head, token] = one_query(
                    q[image, head, token], k[image, head, keys_of_query], v[image, head, keys_of_query]
                )
    return [(ours(x, grid), ours.proj(merge(out)))]


def nsa_pairs() -> Pairs:
    """NSA query by query: means of tiles, the best tiles, and the square around, added up by gates."""
    grid, top = Grid(4, 6), 2
    ours = layer(f"NSA(block=(3, 4), k={top}, window=3)", grid)
    x = torch.randn(2, 24, 16, dtype=F64)
    q, k, v = split(*projected(ours, x))
    gates = ours.operator.gates(merge(q)).sigmoid().unflatten(-1, (2, 3))  # (B, N, H, 3)
    members, out = tiles(grid, 3, 4), torch.empty_like(v)
    for image in range(2):
        for head in range(2):
            keys, values = k[image, head], v[image, head]
            mean_keys, mean_values = (torch.stack([y[tile].mean(0) for tile in members]) for y in (keys, values))
            for token in range(24):
                query = q[image, head, token]
                best = (mean_keys @ query * 8**-0.5).softmax(-1).topk(top).indices.tolist()
                selected = [key for j in best for key in members[j]]
                near = [i for i in range(24) if max(abs(i // 6 - token // 6), abs(i % 6 - token % 6)) <= 1]
                branches = [one_query(query, mean_keys, mean_values)]
                branches += [one_query(query, keys[tokens], values[tokens]) for tokens in (selected, near)]
                out[image, head, token] = gates[image, token, head] @ torch.stack(branches)
    return [(ours(x, grid), ours.proj(merge(out)))]


# test-time training


def vit3_pairs() -> Pairs:
    """ViT3's block on 5x7 cells, its inner step by autograd: projection, heads, the convolution on the side."""
    grid = Grid(5, 7)
    ours = layer("ViT3()", grid)
    x = torch.randn(3, 35, 16, dtype=F64)
    q, k, v, q2, k2, v2 = ours.qkv(x).split([16, 16, 16, 8, 8, 8], -1)
    start = [ours.inner.w1.expand(3, -1, -1, -1), ours.inner.w2.expand(3, -1, -1, -1)]
    q, k, v = split(q, k, v)
    loss = -((k @ start[0]) * F.silu(k @ start[1]) * v).sum(3).mean(2).sum() * 9**-0.5
    w1, w2 = (
        w - g / (g.norm(dim=-2, keepdim=True) + 1) for w, g in zip(start, torch.autograd.grad(loss, start), strict=True)
    )
    heads_out = ((q @ w1) * F.silu(q @ w2)).transpose(1, 2).reshape(3, 35, 16)
    q2, k2, v2 = (y.reshape(3, 5, 7, 8).permute(0, 3, 1, 2) for y in (q2, k2, v2))
    local = []
    for i in range(3):
        w3 = ours.inner.w3[:, None]
        loss = -(F.conv2d(k2[i : i + 1], w3, padding=1, groups=8) * v2[i : i + 1]).sum() / 35 * 9**-0.5
        (g,) = torch.autograd.grad(loss, w3)
        w3 = w3 - g / (g.norm(dim=(-2, -1), keepdim=True) + 1)
        local.append(F.conv2d(q2[i : i + 1], w3, padding=1, groups=8))
    return [(ours(x, grid), ours.proj(torch.cat([heads_out, torch.cat(local).flatten(2).mT], -1)))]


REWRITES: tuple[External, ...] = (
    External("FLatten", "torch", "rewrite of the repository", flatten_pairs),
    External("PolaFormer", "torch", "rewrite of the repository", polaformer_pairs),
    External("MHLA", "torch", "rewrite of the paper", mhla_pairs),
    External("InLine", "torch", "rewrite of the repository", inline_pairs),
    External("ViT3", "torch", "rewrite of the repository", vit3_pairs),
    External("Agent", "torch", "rewrite of paper and repository", agent_pairs),
    External("TopK", "torch", "torch SDPA on the best keys; rewrite of DSA", topk_pairs),
    External("BRA", "torch", "rewrite of the repository", bra_pairs),
    External("MoBA", "torch", "rewrite of the paper", moba_pairs),
    External("MiTA", "torch", "rewrite of paper and repository", mita_pairs),
    External("NSA", "torch", "rewrite of the paper", nsa_pairs),
)
"""Every rewrite, in the order of `MIXERS`."""
