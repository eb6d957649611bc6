"""Padding: pixels beside an image that is smaller than its batch are hidden from the attention of a backbone.

Convolutions see them as zeros, as in torchvision.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from regard.core import Grid, UnsupportedError
from regard.core.mask import NO_MASK
from regard.swapping.grid_source import NO_BACKWARD, nearest_marks
from regard.swapping.inspect import attention_layers
from regard.swapping.layer import Port

Sizes = tuple[tuple[tuple[int, int], ...], tuple[int, int]]
"""(height, width) of each image, then (height, width) of the padded batch."""


class Padding:
    """Passes a padding mask to every mechanism of a model in the forward passes that have padding; see `hide_padding`.

    Activation checkpointing runs a layer again during the backward pass: its sizes are then those that are marked in
    the graph that is being run backward. Reentrant checkpoints have no graph inside: run such a pass backward before
    the next one begins.
    """

    def __init__(self) -> None:
        self._sizes: Sizes | None = None
        self._last: Sizes | None = None  # of passes that may run backward

    def begin(self, sizes: Sequence[tuple[int, int]] | None, padded: tuple[int, int]) -> None:
        """Hide the padding of the pass that now begins. sizes: of each image, None = nothing is padding."""
        self._sizes = None if sizes is None else (tuple((height, width) for height, width in sizes), padded)
        if torch.is_grad_enabled():
            self._last = self._sizes

    def end(self) -> None:
        """The forward pass is over."""
        self._sizes = None

    def _of_pass(self, x: Tensor) -> Sizes | None:
        """The sizes of the pass to which a layer's input x belongs."""
        if torch.compiler.is_compiling():
            return self._sizes
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            found = nearest_marks(torch._C._current_autograd_node(), self)
            return found.pop() if len(found) == 1 else self._last
        if x.grad_fn is not None:
            x.grad_fn.metadata[self] = self._sizes  # type: ignore[index]
        return self._sizes

    def mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hook before a mixer's forward pass: the same arguments with a mask."""
        x, grid, *rest = args
        sizes = self._of_pass(x)
        if sizes is None:
            return None
        keep = kept_cells(*sizes, grid, x.device)
        if keep.shape != x.shape[:2]:
            raise UnsupportedError(
                f"padding cannot be hidden from {type(module).__name__}: it attends to {tuple(x.shape[:2])} (batch, "
                f"tokens), not to whole maps {tuple(keep.shape)}; use images of one size"
            )
        given = (rest[0] if rest else kwargs.get("mask")) or NO_MASK
        mask = replace(given, keep=keep if given.keep is None else keep & given.keep)
        return (x, grid, mask, *rest[1:]), {name: value for name, value in kwargs.items() if name != "mask"}


def kept_cells(
    sizes: Sequence[tuple[int, int]], padded: tuple[int, int], grid: Grid, device: torch.device
) -> Bool[Tensor, "B N"]:
    """True for the grid's extra tokens, and for the cells whose first pixel is inside the image."""
    rows = torch.arange(grid.height, device=device) * padded[0] / grid.height
    columns = torch.arange(grid.width, device=device) * padded[1] / grid.width
    heights, widths = torch.tensor(sizes, device=device).unbind(1)
    cells = (rows < heights[:, None])[:, :, None] & (columns < widths[:, None])[:, None, :]
    keep = cells.flatten(1)
    extra = keep.new_ones(len(sizes), 1)
    return torch.cat([extra.expand(-1, grid.prefix), keep, extra.expand(-1, grid.suffix)], 1)


def cannot_hide(model: nn.Module) -> str:
    """Why padding cannot be hidden from all attention of a model; "" if it can."""
    for name, module in model.named_modules():
        if isinstance(module, Port) and module.mixer.config.uses and "padding" not in module.mixer.config.masks:
            return f"{type(module.mixer.config).__name__} in {name} cannot apply a padding mask"
    for name, port in attention_layers(model).items():
        module = model.get_submodule(name)
        if not isinstance(module, Port) and "Slot" not in type(module).__name__:
            return f"the host's own attention in {name} takes no padding mask; swap it, {port.__name__} can"
    return ""


def hide_padding(model: nn.Module) -> Padding:
    """Install the hooks on all mechanisms of a model; they do nothing in passes without padding.

    Raises: UnsupportedError if a mechanism cannot apply a padding mask.
    """
    reason = cannot_hide(model)
    if reason:
        raise UnsupportedError(reason)
    padding = Padding()
    for module in model.modules():
        if isinstance(module, Port):
            module.mixer.register_forward_pre_hook(padding.mask, with_kwargs=True)
    return padding
