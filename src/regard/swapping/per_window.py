"""PerWindow: separate parameters of a mechanism for each window of an image."""

from dataclasses import replace

from torch import Tensor

from regard.core import GridError, Inputs, Operator


class PerWindow(Operator):
    """An operator with the heads of all windows of an image side by side: `inner` has windows * heads heads.

    Raises: GridError if the batch is not a number of whole images; images of another size have no keys.
    """

    def __init__(self, inner: Operator, windows: int) -> None:
        super().__init__()
        self.inner, self.windows = inner, windows

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
        if mask is not None and mask.bias is not None:
            batch, heads = v.shape[:2]
            mask = replace(mask, bias=self._windows_to_heads(mask.bias.expand(batch, heads, *mask.bias.shape[-2:])))
        q, k, v = (None if x is None else self._windows_to_heads(x) for x in (q, k, v))
        form = self.inner.reference if plain else self.inner
        out = form(q, k, v, grid=inputs.grid, memory=inputs.memory, mask=mask)
        return out.unflatten(1, (self.windows, -1)).flatten(0, 1)

    def _windows_to_heads(self, x: Tensor) -> Tensor:
        """(B windows, H, N, d) -> (B, windows H, N, d)."""
        if x.shape[0] % self.windows:
            raise GridError(
                f"{x.shape[0]} windows are not whole images of {self.windows} windows, each with parameters of its own"
            )
        return x.unflatten(0, (-1, self.windows)).flatten(1, 2)
