"""An operator whose heads are the heads of every window of an image."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.core import Grid, GridError, Mask, Operator


class PerWindow(Operator):
    """An operator whose heads are the heads of every window of an image.

    Raises: GridError if the windows are not those of whole images: another size of image has no keys of its own.
    """

    def __init__(self, inner: Operator, windows: int) -> None:
        super().__init__()
        self.inner, self.windows = inner, windows

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        return self._by_window(self.inner, q, k, v, grid, memory, mask)

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        return self._by_window(self.inner.reference, q, k, v, grid, memory, mask)

    def _by_window(
        self, inner: Any, q: Any, k: Any, v: Any, grid: Grid, memory: Grid | None, mask: Mask | None
    ) -> Tensor:
        roles = [None if x is None else self._together(x) for x in (q, k, v)]
        if mask is not None and mask.bias is not None:
            number = max(x.shape[0] for x in (q, k, v) if x is not None)
            heads = next(x.shape[1] for x in (q, k, v) if x is not None)
            bias = mask.bias.expand(number, heads, *mask.bias.shape[-2:])
            mask = replace(mask, bias=self._together(bias))
        out = inner(*roles, grid=grid, memory=memory, mask=mask)
        return out.unflatten(1, (self.windows, -1)).flatten(0, 1)

    def _together(self, x: Tensor) -> Tensor:
        """(B windows, H, N, d) -> (B, windows H, N, d)."""
        if x.shape[0] % self.windows:
            raise GridError(
                f"{x.shape[0]} windows are not images of {self.windows}, each of which has parameters of its own"
            )
        return x.unflatten(0, (-1, self.windows)).flatten(1, 2)
