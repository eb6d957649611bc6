"""Comparing mechanisms: interleaved passes, medians, ratios to the first, beside the bound, the memory and the growth.

Wall-clock time varies on a shared machine; the CPU time of one thread repeats to a few per cent. Times are comparable
within one call only, so every row has its ratio to the first mechanism of its grid. On CUDA, events measure time.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core import ConfigError, Cost, Grid, Mask, Mixer, MixerConfig, RegardError, Site, nearest
from regard.core.allocator import ALLOCATOR
from regard.core.validation import check_arguments, short_repr
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.mixers.shared.memory import MemoryMixer
from regard.mixers.shared.native import instruction_set, native_enabled
from regard.mixers.spelling import spell

from .bounds import speed
from .memory import peak_growth, total_memory
from .turns import ROUNDS, Summary, in_turns, one_thread, time_pass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PARTS = ("operator", "layer")
LONGEST = 60.0
"""Seconds: a mechanism whose rounds on one grid are estimated to take longer is not run."""
MOST_MEMORY = 0.25
"""Of the memory of the machine or device: a pass that is estimated to need more is not run."""
_UNKNOWN = 2304
"""Tokens above which a mechanism is estimated from a smaller grid first."""

Run = Callable[[], object]
Placement = tuple[torch.device, torch.dtype]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One mechanism at one grid, or one model: median and quartiles of seconds a pass, ratio of medians to the first.

    ratio: None where the first was not run. tokens: of the grid; 0 for a whole model. bound: the least seconds, as
    `Speed.bound`. memory: bytes that a pass adds at its peak, None where the system does not tell. exponent: e, where
    time grew with tokens^e since the grid before; None on the first grid. faults: page faults per pass. system: share
    of the time in the kernel (above 0.05: much time for memory allocation). estimated: the row was not run; seconds and
    memory are the estimate, and rounds is 0.
    """

    mixer: str
    grid: str
    tokens: int
    backward: bool
    seconds: float
    low: float
    high: float
    ratio: float | None
    bound: float
    memory: int | None
    exponent: float | None
    rounds: int
    faults: float
    system: float
    estimated: bool = False


@dataclass(frozen=True)
class Candidate:
    """What is timed in one row. macs: of a forward pass. traffic: bytes that it reads and writes at least."""

    name: str
    run: Run
    macs: int
    traffic: int


@check_arguments
def bench(
    configs: Sequence[MixerConfig], grids: Sequence[Grid], *, dim: int = 128, heads: int = 2, batch: int = 4,
    dtype: str = "fp32", backward: bool = False, part: str = "operator", device: str = "cpu", seconds: float = 2.0,
    report: Callable[[str], None] | None = None, refuse: Callable[[str], None] | None = None,
) -> list[Timing]:  # fmt: skip
    """Time every mechanism on every grid, in the order of the grids. part: "operator" is the mechanism on heads,
    "layer" adds its projections.

    seconds: how long each mechanism is repeated on each grid (at least 5 rounds). report: called with a line of text
    before each grid. refuse: called with a sentence for each mechanism that a grid does not fit, which is then left
    out; without it, that is an error. A row that is estimated to take over a minute or a quarter of the memory is not
    run: its numbers are the estimate, from the row before by the growth of its multiply-accumulates.
    Raises: ConfigError for an unknown dtype or part, a number that is not positive, or part="operator" for a mechanism
    without heads; RegardError for a mechanism that does not fit a grid.
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r}; {nearest(part, PARTS)}")
    placement = check_placement(device, dtype, dim=dim, heads=heads, batch=batch, seconds=seconds)
    timings: list[Timing] = []
    for grid in grids:
        if report is not None:
            report(f"timing {len(configs)} mechanisms on {grid}")
        before = {timing.mixer: timing for timing in timings}
        rows: list[Candidate | Timing] = []
        for config in configs:
            try:
                site = Site(dim, heads, grid)
                estimate = _estimate(config, site, batch, placement, backward, part, before.get(spell(config)))
                if estimate is not None and too_much(estimate, placement[0]):
                    rows.append(replace(estimate, grid=_name(grid), tokens=grid.tokens))
                else:
                    rows.append(_candidate(config, site, batch, placement, backward, part))
            except RegardError as error:
                if refuse is None:
                    raise
                refuse(f"{spell(config)} on {_name(grid)}: {error}")
        timings += time_candidates(rows, _name(grid), grid.tokens, placement, backward, seconds, before)
    return timings


def check_placement(device: str, dtype: str, **numbers: int | float) -> Placement:
    """The device and the numbers' type by name.

    Raises: ConfigError for an unknown dtype, a device that this machine lacks or on which nothing can be timed, or a
    number that is not positive.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ConfigError(f"{name} is a positive number, not {number}")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"nothing can be timed on {short_repr(device)} yet; the device is cpu or cuda")
    number = int(index) if index.isdecimal() else -1 if index else 0
    if number not in range(torch.cuda.device_count() if kind == "cuda" else 1):
        raise ConfigError(f"this machine has no device {short_repr(device)}; pass device='cpu'")
    return torch.device(device), DTYPES[dtype]


def time_candidates(
    rows: Sequence[Candidate | Timing], name: str, tokens: int, placement: Placement, backward: bool, seconds: float,
    before: Mapping[str, Timing],
) -> list[Timing]:  # fmt: skip
    """The timings of candidates, which take turns; rows that are estimates already stay as they are.

    name, tokens: of the grid. before: the timing of each candidate on the grid before.
    """
    device, dtype = placement
    candidates = [row for row in rows if isinstance(row, Candidate)]
    with one_thread():
        summaries = iter(in_turns([candidate.run for candidate in candidates], seconds, device))
        timings = []
        for row in rows:
            if isinstance(row, Timing):
                timings.append(row)
                continue
            passes = 3 if backward else 1  # the gradients of both factors of each product
            bound = speed(device, dtype).bound(passes * row.macs, (2 if backward else 1) * row.traffic)
            timing = _timing(row.name, name, tokens, backward, next(summaries), bound, peak_growth(row.run, device))
            timings.append(replace(timing, exponent=_exponent(before.get(row.name), timing)))
    first = timings[0].seconds if timings and not timings[0].estimated else 0.0
    return [replace(timing, ratio=timing.seconds / first if first else None) for timing in timings]


def layer_pass(
    layer: Mixer, grid: Grid, mask: Mask | None, batch: int, placement: Placement, *, backward: bool, part: str
) -> Run:
    """One pass of a built layer as a function without arguments, on random inputs (batch, tokens, channels).

    Raises: ConfigError for part="operator" of a mechanism without heads.
    """
    device, dtype = placement
    layer = layer.to(device, dtype)
    torch.manual_seed(0)
    x = torch.randn(batch, grid.tokens, layer.site.dim, device=device, dtype=dtype, requires_grad=backward)
    rope = torch.rand(grid.cells, 2 * layer.site.width, device=device, dtype=dtype) if layer.site.rotary else None
    run: Callable[[], Tensor] = lambda: layer(x, grid, mask, rope)  # noqa: E731
    leaves = [x, *layer.parameters()]
    if part == "operator":
        if not isinstance(layer, HeadMixer) or isinstance(layer, MemoryMixer):  # whose memory is made before the heads
            raise ConfigError(
                f'{spell(layer.config)} has no operator on heads: time the whole layer, part="layer" (--part layer)'
            )
        with torch.no_grad():
            projected = layer.project_heads(x, grid)
        roles = {role: None if y is None else y.contiguous().requires_grad_(backward) for role, y in projected.items()}
        operator = layer.operator
        run = lambda: operator(roles["q"], roles["k"], roles["v"], grid=grid)  # noqa: E731
        leaves = [y for y in roles.values() if y is not None] + list(operator.parameters())
    return with_gradients(run, leaves) if backward else torch.no_grad()(run)


def with_gradients(run: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Run:
    """A pass that also computes the gradients of tensors."""
    gradient = torch.ones_like(run().detach())

    @torch.enable_grad()
    def forward_and_backward() -> None:
        torch.autograd.grad(run(), leaves, gradient, allow_unused=True)

    return forward_and_backward


def conditions() -> list[str]:
    """What else the times of this process depend on, as lines of text."""
    kernels = f"compiled kernels for {instruction_set()}" if native_enabled() else "no compiled kernels"
    lines = [f"MiTA, TopK, DAT and deformable convolution: {kernels}"]
    if not all(name in os.environ for name in ALLOCATOR):
        lines.append("the allocator's settings were not fixed: page faults may dominate")
    return lines


def too_much(timing: Timing, device: torch.device) -> bool:
    """Whether an estimated row is not to be run."""
    too_large = (timing.memory or 0) > MOST_MEMORY * total_memory(device)
    return timing.seconds * (ROUNDS + 1) > LONGEST or too_large


def scale_timing(timing: Timing, growth: float) -> Timing:
    """The estimate of a row from a smaller one. growth: of the multiply-accumulates."""
    seconds, memory = timing.seconds * growth, None if timing.memory is None else round(timing.memory * growth)
    return replace(
        timing, seconds=seconds, low=seconds, high=seconds, memory=memory, bound=timing.bound * growth, exponent=None,
        rounds=0, faults=0.0, system=0.0, estimated=True,
    )  # fmt: skip


def _name(grid: Grid) -> str:
    return "x".join(map(str, grid.sides))


def _build_mixer(config: MixerConfig, site: Site) -> Mixer:
    torch.manual_seed(0)
    return config.build(site)


def _cost(config: MixerConfig, site: Site, part: str) -> Cost:
    if part == "operator" and isinstance(config, HeadMixerConfig):
        return config.operator_cost(site)
    return config.cost(site)


def _candidate(
    config: MixerConfig, site: Site, batch: int, placement: Placement, backward: bool, part: str
) -> Candidate:
    """Its pass has run once, so that what it refuses is known. Raises: RegardError."""
    run = layer_pass(_build_mixer(config, site), site.grid, None, batch, placement, backward=backward, part=part)
    run()
    cost = _cost(config, site, part)
    tensors = len(config.uses) + 1 if part == "operator" else 2  # inputs and the output
    numbers = cost.params + tensors * batch * site.grid.tokens * site.dim
    return Candidate(spell(config), run, batch * cost.macs, numbers * placement[1].itemsize)


def _estimate(
    config: MixerConfig, site: Site, batch: int, placement: Placement, backward: bool, part: str, before: Timing | None
) -> Timing | None:  # fmt: skip
    """The row as estimated from the one before, or from a small image where the first is large; None: not needed, or
    the mechanism does not fit that image."""
    small = replace(site, grid=replace(site.grid, height=32, width=32, depth=1))
    if before is None:
        if site.grid.tokens <= _UNKNOWN:
            return None
        try:
            candidate = _candidate(config, small, batch, placement, backward, part)
        except RegardError:
            return None
        with one_thread():
            memory, once = peak_growth(candidate.run, placement[0]), time_pass(candidate.run, placement[0])
        summary = Summary(once.seconds, once.seconds, once.seconds, 1, 0.0, 0.0)
        before = _timing(candidate.name, "32x32", small.grid.tokens, backward, summary, 0.0, memory)
    *depth, height, width = (int(text) for text in before.grid.split("x"))
    last = replace(site, grid=replace(site.grid, height=height, width=width, depth=depth[0] if depth else 1))
    return scale_timing(before, _cost(config, site, part).macs / max(1, _cost(config, last, part).macs))


def _timing(
    mixer: str, grid: str, tokens: int, backward: bool, summary: Summary, bound: float, memory: int | None
) -> Timing:
    return Timing(
        mixer=mixer, grid=grid, tokens=tokens, backward=backward, seconds=summary.median, low=summary.low,
        high=summary.high, ratio=1.0, bound=bound, memory=memory, exponent=None, rounds=summary.rounds,
        faults=summary.faults, system=summary.system,
    )  # fmt: skip


def _exponent(before: Timing | None, now: Timing) -> float | None:
    if before is None or before.estimated or before.tokens == now.tokens or not before.seconds:
        return None
    return math.log(now.seconds / before.seconds) / math.log(now.tokens / before.tokens)
