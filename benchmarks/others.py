"""Regard's mechanisms beside what other packages install, with the same weights and inputs, in one process.

`python benchmarks/others.py [--tokens 196 1024 4096] [--rounds 7] [--only NAME ...]`
Prints the median milliseconds (CPU time of one thread, float32, one image, 3 heads of 64) of both, forward and forward
and backward, the ratio (below 1: Regard takes less), the peak memory that forward and backward add in a fresh process,
and the largest difference of the outputs. A package that is not installed is named and left out. The last row is no
package: MiTA in its published form, which gathers keys for each query. `factors.py` compares with mmcv's form.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from peaks import in_fresh_process, peak_growth
from turns import in_turns

from regard.core.allocator import ALLOCATOR

WIDTH, HEADS = 192, 3
SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}


class Case(NamedTuple):
    """ours, theirs: passes that return the output. leaves: tensors whose gradients they compute."""

    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    leaves: list[Any]


def inputs(tokens: int) -> Any:
    """An image's tokens (1, tokens, C) with a gradient."""
    import torch

    torch.manual_seed(0)
    return torch.randn(1, tokens, WIDTH, requires_grad=True)


def square(tokens: int) -> Any:
    """A grid of these tokens, as near to square as possible."""
    from regard import Grid

    height = max(h for h in range(1, math.isqrt(tokens) + 1) if tokens % h == 0)
    return Grid(height, tokens // height)


def layer(spelling: str, grid: Any, **options: bool) -> Any:
    """A layer of Regard."""
    from regard import Site, parse

    return parse(spelling).build(Site(WIDTH, HEADS, grid, **options))


def of_layers(ours: Any, theirs: Any, x: Any, grid: Any) -> Case:
    """ours: a layer of Regard. theirs: a module or function of x."""
    parameters = [*ours.parameters(), *getattr(theirs, "parameters", list)()]
    return Case(lambda: ours(x, grid), lambda: theirs(x), [x, *parameters])


def multihead(tokens: int) -> Case:
    """torch.nn.MultiheadAttention."""
    from torch import nn

    from regard.testing.external.packages import copy_weights

    grid, theirs = square(tokens), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = layer("Softmax()", grid)
    copy_weights(theirs, ours)
    case = of_layers(ours, theirs, inputs(tokens), grid)
    x = case.leaves[0]
    return case._replace(theirs=lambda: theirs(x, x, x, need_weights=False)[0])


def plain_vit(tokens: int) -> Case:
    """vit_pytorch.vit.Attention, its norm before both."""
    import torch
    from vit_pytorch.vit import Attention

    grid, theirs = square(tokens), Attention(WIDTH, HEADS, WIDTH // HEADS)
    ours, x = layer("Softmax()", grid, qkv_bias=False), inputs(tokens)
    with torch.no_grad():
        ours.qkv.weight.copy_(theirs.to_qkv.weight)
        ours.proj.load_state_dict(theirs.to_out[0].state_dict())
    return of_layers(ours, theirs, x, grid)._replace(ours=lambda: ours(theirs.norm(x), grid))


def nystromformer(tokens: int) -> Case:
    """transformers' NystromformerSelfAttention, Regard's output projection after both."""
    import torch
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    from regard import Grid

    grid, marks = Grid(1, tokens), 49 if tokens % 64 else 64
    config = NystromformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_landmarks=marks,
        segment_means_seq_len=tokens,
        conv_kernel_size=33,
        attention_probs_dropout_prob=0.0,
    )
    theirs: Any = NystromformerSelfAttention(config)
    ours = layer(f'Nystrom(m={marks}, kernel=33, start="matrix")', grid)
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([theirs.query.weight, theirs.key.weight, theirs.value.weight]))
        ours.qkv.bias.copy_(torch.cat([theirs.query.bias, theirs.key.bias, theirs.value.bias]))
        ours.local.weight.copy_(theirs.conv.weight)
    x = inputs(tokens)
    return of_layers(ours, theirs, x, grid)._replace(theirs=lambda: ours.proj(theirs(x)[0]))


def linformer(tokens: int) -> Case:
    """LinformerSelfAttention of the package linformer, 64 keys."""
    import torch
    from linformer.linformer import LinformerSelfAttention

    from regard import Grid

    grid, theirs = Grid.sequence(tokens), LinformerSelfAttention(WIDTH, tokens, k=64, heads=HEADS)
    ours = layer("Linformer(m=64)", grid, qkv_bias=False)
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight]))
        ours.proj.load_state_dict(theirs.to_out.state_dict())
        for own, matrix in ((ours.operator.project_k, theirs.proj_k), (ours.operator.project_v, theirs.proj_v)):
            own.cells.copy_(matrix.mT)
    return of_layers(ours, theirs, inputs(tokens), grid)


def on_heads(tokens: int) -> list[Any]:
    """q, k and v (1, H, tokens, d)."""
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, HEADS, tokens, WIDTH // HEADS, requires_grad=True) for _ in range(3)]


def performer(tokens: int) -> Case:
    """The parts of performer-pytorch's FastAttention with 256 features, without its epsilon, which weighs otherwise."""
    import torch
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

    from regard import ops

    q, k, v = on_heads(tokens)
    features = torch.randn(256, WIDTH // HEADS)

    def theirs() -> Any:
        made = (softmax_kernel(y, projection_matrix=features, is_query=y is q, eps=0.0) for y in (q, k))
        return linear_attention(*made, v)

    return Case(lambda: ops.performer(q, k, v, features, eps=0.0), theirs, [q, k, v])


def linear(tokens: int) -> Case:
    """linear_attention of performer-pytorch with the features elu + 1."""
    import torch.nn.functional as F
    from performer_pytorch.performer_pytorch import linear_attention

    from regard import ops

    q, k, v = on_heads(tokens)
    return Case(lambda: ops.linear(q, k, v), lambda: linear_attention(F.elu(q) + 1, F.elu(k) + 1, v), [q, k, v])


def deformable(tokens: int) -> Case:
    """torchvision.ops.deform_conv2d, 3x3 with factors, 64 channels."""
    import torch
    from torchvision.ops import deform_conv2d

    from regard import ops

    grid = square(tokens)
    sides = (grid.height, grid.width)
    torch.manual_seed(0)
    x, weight = torch.randn(1, 64, *sides), torch.randn(64, 64, 3, 3) / 24
    offsets, factors = torch.randn(1, 18, *sides), torch.rand(1, 9, *sides)
    leaves = [t.requires_grad_() for t in (x, weight, offsets, factors)]
    return Case(
        lambda: ops.deformable_conv(x, weight, offsets, mask=factors, padding=1),
        lambda: deform_conv2d(x, offsets, weight, padding=1, mask=factors),
        leaves,
    )


def mita(tokens: int) -> Case:
    """MiTA(m=25, k=25) as published: keys and values are gathered for each query."""
    from regard import ops

    qkv = on_heads(tokens)
    landmarks = ops.pool_landmarks(qkv[0].detach(), square(tokens), 25)
    return Case(lambda: ops.mita(*qkv, landmarks, 25), lambda: ops.mita(*qkv, landmarks, 25, execution="gather"), qkv)


CASES: dict[str, Callable[[int], Case]] = {
    "torch nn.MultiheadAttention": multihead,
    "vit-pytorch Attention": plain_vit,
    "transformers Nystromformer": nystromformer,
    "linformer": linformer,
    "performer-pytorch, softmax features": performer,
    "performer-pytorch, linear attention": linear,
    "torchvision deform_conv2d": deformable,
    "MiTA as published": mita,
}


def peak(name: str, tokens: int, side: str) -> int:
    """Bytes that one forward and backward pass adds, after a first one."""
    import torch

    torch.set_num_threads(1)
    case = CASES[name](tokens)
    run = case.ours if side == "ours" else case.theirs
    gradient = torch.ones_like(run())

    def whole() -> None:
        torch.autograd.grad(run(), case.leaves, gradient, allow_unused=True)

    whole()
    return peak_growth(whole)


def row(name: str, tokens: int, rounds: int) -> str:
    """One line of the table."""
    case = CASES[name](tokens)
    difference = (case.ours() - case.theirs()).abs().max().item()
    times, _ = in_turns({"ours": case.ours, "theirs": case.theirs}, case.leaves, rounds)
    cells = [
        f"{1e3 * times['ours', part]:.2f} | {1e3 * times['theirs', part]:.2f} | "
        f"{times['ours', part] / times['theirs', part]:.2f}"
        for part in ("f", "fb")
    ]
    memory = [in_fresh_process(peak, name, tokens, side, **SETTINGS) / 1e6 for side in ("ours", "theirs")]
    return f"| {name} | {tokens} | {cells[0]} | {cells[1]} | {memory[0]:.1f} | {memory[1]:.1f} | {difference:.1e} |"


def main() -> int:
    """Print the table as Markdown; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[196, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    options = parser.parse_args()
    print(
        "| beside | N | forward, ms | theirs | ratio | and backward, ms | theirs | ratio | MB | theirs | difference |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in options.only:
        for tokens in options.tokens:
            try:
                print(row(name, tokens, options.rounds), flush=True)
            except ModuleNotFoundError as error:
                print(f"{name}: needs {error.name}", flush=True)
                break
    return 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    import torch

    torch.set_num_threads(1)
    sys.exit(main())
