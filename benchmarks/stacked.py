"""Several seeds of one row in one process: a training step of stacked networks beside the same steps one after another.

`python benchmarks/stacked.py --seeds 4 --seconds 5 --mixers 'Softmax()' 'MiTA(m=9, k=9)'`
The networks are those of the probes, with the same optimizer. Stacked: `torch.func.vmap` over parameters that have one
more axis. Gradients of both are compared first. Times are CPU time of one thread; a ratio above 2 would pay for a
second way to train.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from regard.core.allocator import ALLOCATOR

SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
HOSTS = ("vit_desk(patch=14, dim=64, depth=3, heads=2)", "vit_desk(patch=4, dim=96, depth=6, heads=4)")
"""Of the probes, 36 tokens, and of the studies on 32 pixels, 64 tokens."""
SIZES = ((84, 1), (32, 3))
"""(pixels of a side, channels) of their images."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each form is repeated")
    parser.add_argument("--mixers", nargs="+", default=["Softmax()", "SKA()", "MiTA(m=9, k=9)"])
    options = parser.parse_args(arguments)
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    import torch

    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {options.seeds} seeds, batch {options.batch}, ms of CPU time a step of all seeds"
    )
    print(f"{'host':50} {'mixer':16} {'in turn':>8} {'stacked':>8} {'ratio':>6} {'difference':>10}")
    for host, size in zip(HOSTS, SIZES, strict=True):
        for mixer in options.mixers:
            print(f"{host:50} {mixer:16} {measure(host, size, mixer, options)}", flush=True)
    return 0


def measure(host: str, size: tuple[int, int], mixer: str, options: argparse.Namespace) -> str:
    """One row: times of a step of all seeds, their ratio, the largest relative difference of gradients."""
    import torch
    from torch import Tensor, nn

    from regard import create_model, parse
    from regard.measure.turns import in_turns

    side, channels = size

    def network(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return create_model(host, parse(mixer), img_size=side, in_chans=channels).train()

    torch.manual_seed(0)
    images = torch.randn(options.seeds, options.batch, channels, side, side)
    models = [network(seed) for seed in range(options.seeds)]
    labels = torch.randint(0, models[0](images[0]).shape[-1], (options.seeds, options.batch))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    params, buffers = torch.func.stack_module_state(models)
    stacked_optimizer = torch.optim.AdamW(params.values(), lr=1e-4)

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(models[0], (params, buffers), (x,)), y)

    gradients = torch.func.vmap(torch.func.grad(loss), randomness="different")

    def in_turn() -> None:
        for model, optimizer, x, y in zip(models, optimizers, images, labels, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def stacked() -> None:
        for name, value in gradients(params, buffers, images, labels).items():
            params[name].grad = value
        stacked_optimizer.step()

    found = gradients(params, buffers, images, labels)
    gap = 0.0
    for index, model in enumerate(models):
        nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                scale = parameter.grad.abs().max().clamp_min(1e-8)
                gap = max(gap, ((found[name][index] - parameter.grad).abs().max() / scale).item())
    first, second = (1000 * run.median for run in in_turns([in_turn, stacked], options.seconds, torch.device("cpu")))
    return f"{first:8.1f} {second:8.1f} {first / second:6.2f} {gap:10.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
