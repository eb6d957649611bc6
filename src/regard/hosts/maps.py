"""Attention maps of a forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Grid, Mask, UnsupportedError
from regard.mixers.heads import HeadMixer

from .owners import swapped
from .small_ports import ConvMixer


@contextmanager
def capture(model: nn.Module, layers: str = "*") -> Iterator[dict[str, Tensor]]:
    """Collect attention maps during a forward pass: `with capture(model) as maps: model(x)`.

    Maps are (B, H, N, M), float32 on the CPU, keyed by layer name; a second pass overwrites them. Rows sum to 1
    only for softmax kinds. Costs one extra operator call per layer with N-wide values: O(N^2 H) memory.
    A host's own attention gives maps after `swap(model, Softmax())`, which changes nothing.
    Raises: SwapError if no swapped layer matches, UnsupportedError if a matching one has no weights between tokens.
    """
    maps: dict[str, Tensor] = {}
    mixers = {}
    for name in swapped(model, layers):
        mixer: Any = model.get_submodule(name).mixer
        if not isinstance(mixer, HeadMixer) or not mixer.config.card.row_maps:
            raise UnsupportedError(f"{name}: {type(mixer.config).__name__} has no weights between tokens to show")
        mixers[name] = mixer
    handles = [mixer.register_forward_hook(_noting(maps, name), with_kwargs=True) for name, mixer in mixers.items()]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def _noting(maps: dict[str, Tensor], name: str) -> Callable[..., None]:
    @torch.no_grad()
    def note(mixer: HeadMixer, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
        maps[name] = _weights(mixer, *args, **kwargs).float().cpu()

    return note


def _weights(mixer: HeadMixer, x: Tensor, grid: Grid, mask: Mask | None = None, rope: Tensor | None = None) -> Tensor:
    made = mixer.roles(x, grid, rope)
    values = made["v"]
    if values is None:
        raise UnsupportedError(f"{type(mixer.config).__name__} has no values, so no weights between tokens")
    memory = mixer.memory_grid(grid) if isinstance(mixer, ConvMixer) else None
    return mixer.operator.weights(made["q"], made["k"], values, grid=grid, memory=memory, mask=mask)
