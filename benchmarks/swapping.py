"""What a swap costs: the swap itself, the time of a swapped model, and the time to compile it.

`python benchmarks/swapping.py swap forward compile --rounds 5`
swap: `Softmax()` into a large ViT, beside one forward pass of the image that the swap runs. forward: a swapped model
beside the model as it was, in turns, with the same weights, as their place in memory decides a few percent. compile:
`torch.compile(fullgraph=True)` of the forward pass without its caches, swapped and not, in turns. All figures are CPU
time of one thread, with that of the C++ compiler; medians.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

LIMITS = {"swap": 1.0, "forward": 1.02, "compile": 1.3}
"""The goals: seconds beyond one forward pass, then ratios to the model as it was."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one line for each part; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(LIMITS), help=", ".join(LIMITS))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds after one warm-up")
    options = parser.parse_args(arguments)
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if not own.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | own)
    import torch

    from regard.measure.bench import conditions

    print(f"torch {torch.__version__}, one thread; {'; '.join(conditions())}")
    for part in options.parts:
        print({"swap": swapping, "forward": forward, "compile": compiling}[part](options.rounds), flush=True)
    return 0


def swapping(rounds: int, name: str = "vit_large_patch16_224") -> str:
    """Seconds of a swap and of one forward pass."""
    import torch

    from regard import Softmax, restore, swap

    model, x = host(name)
    runs: dict[str, Callable[[], Any]] = {"forward": lambda: model(x), "swap": lambda: swap(model, Softmax())}
    seconds: dict[str, list[float]] = {part: [] for part in runs}
    for turn in range(rounds + 1):
        for part, run in runs.items():
            with torch.no_grad():
                took = cpu_seconds(run)
            if turn:
                seconds[part].append(took)
        restore(model)
    plain, whole = (statistics.median(seconds[part]) for part in runs)
    beyond = whole - plain
    return (
        f"swap: Softmax() into {name} {whole:.2f} s, forward {plain:.2f} s, beyond {beyond:.2f} s "
        f"(goal {LIMITS['swap']}: {verdict(beyond, 'swap')})"
    )


def forward(rounds: int, name: str = "vit_small_patch16_224") -> str:
    """The time of a swapped model over that of the model as it was, for inference and for a training step."""
    import torch

    from regard import Softmax, swap

    lines = []
    for batch, turns in ((1, 10 * rounds), (8, 2 * rounds)):
        model, x = host(name)
        x = x.repeat(batch, 1, 1, 1)
        own = [block.attn for block in model.blocks]
        swapped = [block.attn for block in swap(model, Softmax()).blocks]  # of the same weights

        def infer(layers: list[Any], model: Any = model, x: torch.Tensor = x) -> None:
            use(model, layers)
            with torch.no_grad():
                model(x)

        def train(layers: list[Any], model: Any = model, x: torch.Tensor = x) -> None:
            use(model, layers)
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()

        for label, run in (("inference", infer), ("training", train)):
            plain, other = (1e3 * each for each in in_turns([partial(run, own), partial(run, swapped)], turns))
            lines.append(
                f"forward: {name} with Softmax(), {label}, batch {batch}: {other:.1f} ms, as it was {plain:.1f} ms: "
                f"{other / plain:.3f} (goal {LIMITS['forward']}: {verdict(other / plain, 'forward')})"
            )
    return "\n".join(lines)


def use(model: Any, layers: list[Any]) -> None:
    """Put attention layers into a ViT of timm."""
    for block, layer in zip(model.blocks, layers, strict=True):
        block.attn = layer


def in_turns(runs: Sequence[Callable[[], None]], turns: int) -> list[float]:
    """The median seconds of each run, after one warm-up, in changing order."""
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(turns + 1):
        for index in range(len(runs)) if turn % 2 else reversed(range(len(runs))):
            took = cpu_seconds(runs[index])
            if turn:
                seconds[index].append(took)
    return [statistics.median(each) for each in seconds]


def compiling(rounds: int, name: str = "vit_tiny_patch16_224") -> str:
    """The time to compile a swapped model over that of the model as it was."""
    import torch

    from regard import swap

    mixers = ("", "MiTA(m=25, k=25)")
    seconds: dict[str, list[float]] = {mixer: [] for mixer in mixers}
    for turn in range(rounds + 1):
        for mixer in mixers:
            model, x = host(name)
            if mixer:
                swap(model, mixer)
            torch._dynamo.reset()
            with torch.no_grad():
                took = cpu_seconds(lambda: torch.compile(model, fullgraph=True)(x))  # noqa: B023
            if turn:
                seconds[mixer].append(took)
    plain, swapped = (statistics.median(seconds[mixer]) for mixer in mixers)
    ratio = swapped / plain
    return (
        f"compile: {name} with {mixers[1]} {swapped:.1f} s, as it was {plain:.1f} s: {ratio:.2f} "
        f"(goal {LIMITS['compile']}: {verdict(ratio, 'compile')})"
    )


def host(name: str) -> Any:
    """A model of timm in evaluation mode with random weights of seed 0, and one image."""
    import timm
    import torch

    torch.manual_seed(0)
    return timm.create_model(name).eval(), torch.randn(1, 3, 224, 224)


def cpu_seconds(run: Callable[[], Any]) -> float:
    """CPU time of a call and of the processes that it starts and ends."""
    before = time.process_time(), sum(os.times()[2:4])
    run()
    return time.process_time() - before[0] + sum(os.times()[2:4]) - before[1]


def verdict(value: float, part: str) -> str:
    """Whether a goal is met."""
    return "met" if value <= LIMITS[part] else "missed"


if __name__ == "__main__":
    sys.exit(main())
