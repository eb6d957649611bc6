"""F-SNE with one first product beside its literal form, and every projection beside a linear one, as ratios of time.

`python benchmarks/embeddings.py --rounds 15 --cases 192,192 384,384 --dtype float32`
The literal form puts a code beside every token and runs both layers once per role. Work per token, in multiples of C h:
3 (C + c) / C + 3 against 1 + 3: products alone limit the gain to 1.53 at c = 8, C = 192 and to 1.52 at C = 384.
Candidates take turns; a ratio is of medians of CPU time in one thread. The process restarts itself with an
allocator that keeps freed memory: otherwise the page faults of temporaries would dominate.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from turns import in_turns

from regard.core.allocator import ALLOCATOR

if TYPE_CHECKING:
    import torch

    from regard.core import Projection

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
CASES = ("192,192", "384,384")
FORMS = ("linear", "SNE", "P-SNE", "F-SNE literal", "F-SNE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds after one warm-up")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="channels,hidden width")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--code", type=int, default=8)
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, allocator fixed")
    print(f"batch {options.batch}, {options.tokens} tokens, codes of {options.code}, {options.rounds} rounds, medians")
    print(f"{'C':>5} {'h':>5}  {'dtype':<9} {'form':<14} {'forward':>9} {'for+back':>9} {'faults':>9}")
    for dtype in options.dtype:
        for case in options.cases:
            channels, hidden = (int(part) for part in case.split(","))
            for row in measure(channels, hidden, getattr(torch, dtype), options):
                print(row, flush=True)
    print("ratio of CPU time to a linear projection; faults: minor page faults a measured call")
    return 0


def measure(channels: int, hidden: int, dtype: "torch.dtype", options: argparse.Namespace) -> list[str]:
    """Rows of one size: all forms take turns; the last row is the literal form's time in that of F-SNE."""
    import torch

    from regard import FSNE, PSNE, SNE, Grid, LinearQKV, Site
    from regard.projections.sne import FSNEProjection, fsne_reference

    torch.manual_seed(0)
    site = Site(dim=channels, heads=max(1, channels // 64), grid=Grid.sequence(options.tokens))
    x = torch.randn(options.batch, options.tokens, channels, dtype=dtype).requires_grad_()

    def build(config: LinearQKV | SNE | PSNE | FSNE) -> "Projection":
        return config.build(site, "qkv", config.shared("qkv")).to(dtype)

    fsne = build(FSNE(code=options.code, width=hidden))
    assert isinstance(fsne, FSNEProjection)
    fsne.codebook.to(dtype)
    projections = [build(LinearQKV()), build(SNE(width=hidden)), build(PSNE(width=hidden))]
    runs: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
        name: (lambda module=module: module(x, "qkv"))  # type: ignore[misc]
        for name, module in zip(FORMS, projections, strict=False)
    }
    runs["F-SNE literal"] = lambda: fsne_reference(
        x, fsne.codebook.weight, fsne.weight1, fsne.bias1, fsne.weight2, fsne.bias2
    )
    runs["F-SNE"] = lambda: fsne(x, "qkv")
    leaves = [x, *(p for module in (*projections, fsne) for p in module.parameters())]
    times, faults = in_turns(runs, leaves, options.rounds)
    dtype_name = str(dtype).removeprefix("torch.")
    rows = []
    for name in FORMS:
        f, fb = (times[name, part] / times["linear", part] for part in ("f", "fb"))
        rows.append(f"{channels:>5} {hidden:>5}  {dtype_name:<9} {name:<14} {f:>9.3f} {fb:>9.3f} {faults[name]:>9.0f}")
    f, fb = (times["F-SNE literal", part] / times["F-SNE", part] for part in ("f", "fb"))
    bound = (3 * (channels + options.code) + 3 * channels) / (4 * channels)
    loss = " (loss)" if min(f, fb) < 1 else ""
    rows.append(f"F-SNE is {f:.3f} (forward) and {fb:.3f} (both) times as fast as literal; bound {bound:.3f}{loss}")
    return rows


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    sys.exit(main())
