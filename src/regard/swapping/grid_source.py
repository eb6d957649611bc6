"""How a swapped layer learns the grid of its tokens: from the output of the module that makes the tokens."""

from contextlib import suppress

from torch import Tensor, nn

from regard.core import Grid, SwapError


class GridSource:
    """The grid of the current forward pass, written by a forward hook on the watched module.

    The hook is the bound method `record`, so a deep copy of a model gets a source of its own. Within one training step
    all images have one resolution: activation checkpointing runs a layer again with the grid that was recorded last.
    """

    def __init__(self) -> None:
        self.height, self.width = 0, 0

    def record(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        """The forward hook; output (B, C, h, w)."""
        self.height, self.width = output.shape[-2], output.shape[-1]

    def grid(self, prefix: int) -> Grid:
        """The grid that was recorded last, with `prefix` tokens before its patch tokens."""
        return Grid(self.height, self.width, prefix)


def watched_module(model: nn.Module, layer: str, watch: str) -> nn.Module | None:
    """The module at path `watch` below the nearest ancestor of `layer` that has it; None if there is none.

    watch: as in `Port`, "a|b" means either path.
    """
    parts = layer.split(".")
    for end in range(len(parts) - 1, -1, -1):
        for path in watch.split("|"):
            with suppress(AttributeError):
                return model.get_submodule(".".join([*parts[:end], path]))
    return None


def require_watched_module(model: nn.Module, layer: str, watch: str) -> nn.Module:
    """`watched_module`. Raises: SwapError if there is none."""
    module = watched_module(model, layer, watch)
    if module is None:
        raise SwapError(
            f"no module {watch!r} was found above {layer}, so the grid of its tokens is unknown; this model needs a "
            "port of its own"
        )
    return module
