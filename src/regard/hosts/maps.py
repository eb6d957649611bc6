"""Attention maps of a forward pass."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Mask, UnsupportedError
from regard.mixers.heads import HeadMixer
from regard.mixers.softmax import Softmax

from .hosted import Hosted
from .looking import matching, resting
from .owners import swapped
from .small_ports import ConvMixer
from .swap import plan_layers


def readable(model: nn.Module, inputs: Float[Tensor, "B ..."], layers: str = "*") -> nn.Module:
    """The model, or where layers that match a glob have the host's own attention, a copy with our softmax in them.

    inputs: as the model expects them; both are compared on them.
    Raises: SwapError if no layer matches; UnsupportedError if the copy computes something else, as where the host's
    attention is not plain softmax.
    """
    own = [name for name in matching(model, layers) if not isinstance(model.get_submodule(name), Hosted)]
    if not own:
        return model
    reader = plan_layers(copy.deepcopy(model), Softmax(), own, inputs[:1]).apply()
    with resting(reader), resting(model):
        found, expected = reader(inputs), model(inputs)
    if not torch.allclose(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max())):
        raise UnsupportedError(f"{type(model).__name__} has attention of its own that is not plain softmax")
    return reader


@contextmanager
def capture(model: nn.Module, layers: str = "*") -> Iterator[dict[str, Tensor]]:
    """Collect attention maps during a forward pass: `with capture(model) as maps: model(x)`.

    Maps are (B, H, N, M), float32 on the CPU, keyed by layer name; a second pass overwrites them. Rows sum to 1
    only for softmax kinds. Costs one extra operator call per layer with N-wide values: O(N^2 H) memory.
    A host's own attention gives maps in the copy that `readable` makes.
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
