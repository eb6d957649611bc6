"""Multiply-accumulates of a whole model: mechanisms by their formulas, all else as PyTorch counts it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.core import Grid, Mixer, check_accounting
from regard.mixers.shared.heads import HeadMixer

from .layer import Port


def count_macs(model: nn.Module, images: Tensor, accounting: str = "executed") -> int:
    """Multiply-accumulates of one forward pass (matrix products, convolutions), in evaluation mode.

    Operators of swapped layers are not run: their formulas count, once for each window and image that they get, so that
    the form which runs at a size (dense on small grids) does not matter. Parameters and images may lie on the meta
    device. accounting: of the formulas, as in `MixerConfig.cost`. Raises: ConfigError for another.
    """
    check_accounting(accounting)
    counter = FlopCounterMode(display=False)
    model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:  # the counter's hooks trip over views of parameters that want a gradient
            parameter.requires_grad_(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _by_formula(model, accounting) as formulas, counter:
            model(images)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return counter.get_total_flops() // 2 + sum(formulas)


@contextmanager
def _by_formula(model: nn.Module, accounting: str) -> Iterator[list[int]]:
    """Operators give zeros instead of a result, and write what their formula says into the list."""
    found: list[int] = []
    silenced: list[Any] = []
    for mixer in [module.mixer for module in model.modules() if isinstance(module, Port)]:
        if not isinstance(mixer, HeadMixer):
            silenced.append(mixer)
            silenced[-1].forward = _whole(mixer, accounting, found)
        elif _its_own(mixer):
            silenced.append(mixer.operator)
            silenced[-1].forward = _operator(mixer, accounting, found)
    try:
        yield found
    finally:
        for module in silenced:
            del module.forward


def _its_own(mixer: HeadMixer) -> bool:
    """Whether the operator is the mechanism's, not one that the port puts around it."""
    with torch.device("meta"):
        return type(mixer.operator) is type(mixer.config.operator(mixer.site))


def _operator(mixer: HeadMixer, accounting: str, found: list[int]):  # type: ignore[no-untyped-def]
    def forward(
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Any = None,
    ) -> Tensor:
        given = next(role for role in (v, q, k) if role is not None)
        site = replace(mixer.site, grid=grid, memory=memory)
        found.append(given.shape[0] * mixer.config.operator_cost(site, accounting).macs)
        return given.new_zeros(*given.shape[:2], grid.tokens, given.shape[-1])

    return forward


def _whole(mixer: Mixer, accounting: str, found: list[int]):  # type: ignore[no-untyped-def]
    def forward(x: Tensor, grid: Grid, *args: Any, **kwargs: Any) -> Tensor:
        found.append(x.shape[0] * mixer.config.cost(replace(mixer.site, grid=grid), accounting).macs)
        return torch.zeros_like(x)

    return forward
