"""Whole models with swapped attention beside the model as it was: time and peak memory of a pass over images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import ConfigError, Extra, MixerConfig, RegardError
from regard.core.validation import check_arguments
from regard.models.catalog import user_ports
from regard.swapping.layer_plan import spell_or_none
from regard.swapping.swap import swap

from .bench import Candidate, Run, Timing, check_placement, scale_timing, time_candidates, too_much, with_gradients
from .cost import host_and_image, model_cost

OWN = "host"
"""The row of the model with its own attention."""


@check_arguments
def bench_model(
    host: str, configs: Sequence[MixerConfig], sizes: Sequence[tuple[int, int]] | None = None, *, batch: int = 4,
    dtype: str = "fp32", backward: bool = False, device: str = "cpu", seconds: float = 2.0,
    report: Callable[[str], None] | None = None, refuse: Callable[[str], None] | None = None, extra: Extra = (),
) -> list[Timing]:  # fmt: skip
    """Time a model with its own attention, the first row of each size, and with each mechanism; weights are random.

    sizes: (height, width) of images, None = the host's own. batch: images. The other arguments are those of `bench`.
    refuse: called with a sentence for each mechanism that the model cannot take, which is then left out. A row that is
    estimated, from the size before, to take over a minute or a quarter of the memory is not run, as in `bench`.
    Raises: ConfigError for an unknown host or dtype, or a size that the host does not take; without `refuse`,
    RegardError where the attention cannot be replaced.
    """
    placement = check_placement(device, dtype, batch=batch, seconds=seconds)
    timings: list[Timing] = []
    work: dict[str, int] = {}  # multiply-accumulates of each row at the size before
    for size in sizes or (None,):
        with torch.device("meta"):
            height, width = host_and_image(host, size, extra)[1].shape[-2:]
        name = f"{height}x{width}"
        if report is not None:
            report(f"timing {host} at {name} with {len(configs)} mechanisms")
        before = {timing.mixer: timing for timing in timings}
        rows: list[Candidate | Timing] = []
        for config in (None, *configs):
            try:
                row = _candidate(host, config, size, batch, placement, backward, extra)
            except RegardError as error:
                if refuse is None or config is None:
                    raise
                refuse(f"{spell_or_none(config)} in {host} at {name}: {error}")
                continue
            rows.append(_unless_too_much(row, name, before.get(row.name), work.get(row.name, 0), placement[0]))
            work[row.name] = row.macs
        timings += time_candidates(rows, name, 0, placement, backward, seconds, before)
    return timings


def _candidate(
    host: str, config: MixerConfig | None, size: tuple[int, int] | None, batch: int,
    placement: tuple[torch.device, torch.dtype], backward: bool, extra: Extra,
) -> Candidate:  # fmt: skip
    device, dtype = placement
    torch.manual_seed(0)
    model, example = host_and_image(host, size, extra)
    if config is not None:
        swap(model, config, example=example, ports=user_ports(extra))
    cost = model_cost(host, config, size, extra=extra)
    if not example.is_floating_point():
        raise ConfigError(f"{host} takes token ids; models of images are timed, `regard bench` times mechanisms alone")
    images = torch.randn(batch, *example.shape[1:], device=device, dtype=dtype)
    run = _pass(model.to(device, dtype), images, backward)
    traffic = (cost.params + images.numel()) * dtype.itemsize
    return Candidate(OWN if config is None else spell_or_none(config), run, batch * cost.macs, traffic)


def _unless_too_much(
    row: Candidate, name: str, before: Timing | None, macs: int, device: torch.device
) -> Candidate | Timing:
    """The row, or its estimate where it would take too long. macs: of the size before."""
    if before is None or not macs:
        return row
    estimate = replace(scale_timing(before, row.macs / macs), grid=name)
    return estimate if too_much(estimate, device) else row


def _pass(model: nn.Module, images: Tensor, backward: bool) -> Run:
    def run() -> Tensor:
        return output_tensor(model(images))

    if not backward:
        return torch.no_grad()(run)
    return with_gradients(run, [parameter for parameter in model.train().parameters() if parameter.requires_grad])


def output_tensor(output: Any) -> Tensor:
    """The first tensor of a model's output: itself, or of a tuple, a list or a mapping."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output
