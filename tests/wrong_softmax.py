"""A mechanism whose fast form differs from its reference, for tests of the checks."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Card, Site
from regard.mixers.softmax import Softmax, SoftmaxOperator


class Louder(SoftmaxOperator):
    """An operator whose logits are 1 % too large."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        return super().forward(q * 1.01, k, v, **options)


@dataclass(frozen=True, kw_only=True)
class Wrong(Softmax):
    """Softmax attention with the operator `Louder`."""

    card: ClassVar[Card] = Softmax.card

    def operator(self, site: Site) -> SoftmaxOperator:
        return Louder(self)
