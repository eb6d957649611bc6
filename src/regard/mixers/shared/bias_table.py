"""A learned bias by relative position, for mechanisms with windows."""

import torch
from torch import Tensor, nn

from regard.core import Operator


class BiasTableOperator(Operator):
    """table (H, y, x): added logits by offset, for each head; None if it is not learned. It starts at 0, so that it
    does not change a swapped layer, and is kept out of weight decay, as in Swin.
    """

    def __init__(self, shape: tuple[int, ...], learned: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(shape)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The table to 0."""
        if self.table is not None:
            nn.init.zeros_(self.table)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to keep out of weight decay: the table."""
        return {"table"} if self.table is not None else set()

    def table_like(self, x: Tensor) -> Tensor | None:
        """The table in the dtype of a tensor."""
        return None if self.table is None else self.table.to(x.dtype)
