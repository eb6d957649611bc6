"""A mechanism whose fast form is not its equation, by which checks are tried."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Card, Site
from regard.mixers.softmax import Softmax, SoftmaxOperator


class Louder(SoftmaxOperator):
    """Logits are 1 % too large."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Tensor:
        return super().forward(q * 1.01, k, v, **options)


@dataclass(frozen=True, kw_only=True)
class Wrong(Softmax):
    """Softmax attention with that operator."""

    card: ClassVar[Card] = Softmax.card

    def operator(self, site: Site) -> SoftmaxOperator:
        return Louder(self)
