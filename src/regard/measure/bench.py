"""Comparing the speed of mechanisms: interleaved passes, medians, ratios to the first, CPU seconds of one thread.

Wall-clock time varies on a shared machine; the CPU time of one thread repeats to a few per cent. Times are comparable
within one call only, so every row has its ratio to the first mechanism of its grid. On CUDA, events measure time.
"""

import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from regard.core import ConfigError, Grid, Mask, Mixer, MixerConfig, Site, nearest
from regard.core.allocator import ALLOCATOR
from regard.mixers.shared.heads import HeadMixer
from regard.mixers.shared.native import instruction_set, native_enabled
from regard.mixers.spelling import spell

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PARTS = ("operator", "layer")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One mechanism at one grid: median and quartiles of seconds a pass, and the ratio of medians to the first.

    faults: page faults per pass. system: share of the time in the kernel (above 0.05: much time for memory allocation).
    """

    mixer: str
    grid: str
    tokens: int
    seconds: float
    low: float
    high: float
    ratio: float
    rounds: int
    faults: float
    system: float


def bench(
    configs: Sequence[MixerConfig],
    grids: Sequence[Grid],
    *,
    dim: int = 128,
    heads: int = 2,
    batch: int = 4,
    dtype: str = "fp32",
    backward: bool = False,
    part: str = "operator",
    device: str = "cpu",
    seconds: float = 2.0,
    report: Callable[[str], None] | None = None,
) -> list[Timing]:
    """Time every mechanism on every grid. part: "operator" is the mechanism on heads, "layer" adds its projections.

    seconds: how long each mechanism is repeated on each grid (at least 5 rounds). report: called with a line of text
    before each grid. Raises: ConfigError for an unknown dtype or part, a number that is not positive, or
    part="operator" for a mechanism without heads.
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r}; {nearest(part, PARTS)}")
    check_numbers(dtype, dim=dim, heads=heads, batch=batch, seconds=seconds)
    timings = []
    for grid in grids:
        if report is not None:
            report(f"timing {len(configs)} mechanisms on {grid}")
        layers = [_built(config, Site(dim, heads, grid)) for config in configs]
        placement = (torch.device(device), DTYPES[dtype])
        timings += bench_layers(layers, grid, None, batch, placement, backward=backward, part=part, seconds=seconds)
    return timings


def check_numbers(dtype: str, **numbers: int | float) -> None:
    """Raises: ConfigError for an unknown dtype or a number that is not positive."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ConfigError(f"{name} is a positive number, not {number}")


def bench_layers(
    layers: Sequence[Mixer], grid: Grid, mask: Mask | None, batch: int, placement: tuple[torch.device, torch.dtype],
    *, backward: bool, part: str, seconds: float,
) -> list[Timing]:  # fmt: skip
    """`bench` of built layers, on inputs (batch, tokens of grid, channels). placement: device and dtype."""
    with one_thread():
        runs = [_prepare(layer, grid, mask, batch, placement, backward, part) for layer in layers]
        samples = _interleave(runs, seconds, placement[0])
    first = statistics.median(sample[0] for sample in samples[0])
    return [_summary(layer.config, grid, sample, first) for layer, sample in zip(layers, samples, strict=True)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the `with` block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def conditions() -> list[str]:
    """What else the times of this process depend on, as lines of text."""
    kernels = f"compiled kernels for {instruction_set()}" if native_enabled() else "no compiled kernels"
    lines = [f"MiTA and deformable convolution: {kernels}"]
    if not all(name in os.environ for name in ALLOCATOR):
        lines.append("the allocator's settings were not fixed: page faults may dominate")
    return lines


def _built(config: MixerConfig, site: Site) -> Mixer:
    torch.manual_seed(0)
    return config.build(site)


def _prepare(
    layer: Mixer, grid: Grid, mask: Mask | None, batch: int, placement: tuple[torch.device, torch.dtype],
    backward: bool, part: str,
) -> Callable[[], object]:  # fmt: skip
    """One pass as a function without arguments."""
    device, dtype = placement
    layer = layer.to(device, dtype)
    torch.manual_seed(0)
    x = torch.randn(batch, grid.tokens, layer.site.dim, device=device, dtype=dtype, requires_grad=backward)
    rope = torch.rand(grid.cells, 2 * layer.site.width, device=device, dtype=dtype) if layer.site.rotary else None
    run: Callable[[], Tensor] = lambda: layer(x, grid, mask, rope)  # noqa: E731
    leaves = [x, *layer.parameters()]
    if part == "operator":
        if not isinstance(layer, HeadMixer):
            raise ConfigError(f"{spell(layer.config)} has no operator on heads; time the whole layer: --part layer")
        with torch.no_grad():
            projected = layer.project_heads(x, grid)
        roles = {role: None if y is None else y.contiguous().requires_grad_(backward) for role, y in projected.items()}
        operator = layer.operator
        run = lambda: operator(roles["q"], roles["k"], roles["v"], grid=grid)  # noqa: E731
        leaves = [y for y in roles.values() if y is not None] + list(operator.parameters())
    if not backward:
        return torch.no_grad()(run)

    gradient = torch.ones_like(run().detach())

    def forward_and_backward() -> None:
        torch.autograd.grad(run(), leaves, gradient, allow_unused=True)

    return forward_and_backward


def _interleave(
    runs: list[Callable[[], object]], seconds: float, device: torch.device
) -> list[list[tuple[float, float, float]]]:
    """A B C A B C ...: (seconds, system seconds, page faults) of every pass, after one round to warm up."""
    samples: list[list[tuple[float, float, float]]] = [[] for _ in runs]
    for run in runs:
        run()
    total = 0.0
    while len(samples[0]) < 5 or total < seconds * len(runs):
        for run, sample in zip(runs, samples, strict=True):
            before = resource.getrusage(resource.RUSAGE_SELF)
            elapsed = _time_once(run, device)
            after = resource.getrusage(resource.RUSAGE_SELF)
            sample.append((elapsed, after.ru_stime - before.ru_stime, float(after.ru_minflt - before.ru_minflt)))
            total += elapsed
        if len(samples[0]) >= 2000:
            break
    return samples


def _time_once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.process_time()
        run()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return cast(float, begin.elapsed_time(end)) / 1000


def _summary(config: MixerConfig, grid: Grid, samples: list[tuple[float, float, float]], first: float) -> Timing:
    low, median, high = statistics.quantiles([sample[0] for sample in samples], n=4)
    return Timing(
        mixer=spell(config),
        grid=f"{grid.height}x{grid.width}",
        tokens=grid.tokens,
        seconds=median,
        low=low,
        high=high,
        ratio=median / first if first else float("nan"),
        rounds=len(samples),
        faults=statistics.mean(sample[2] for sample in samples),
        system=sum(sample[1] for sample in samples) / max(sum(sample[0] for sample in samples), 1e-9),
    )
