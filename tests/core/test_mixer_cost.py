"""A mechanism of a user whose `cost` fails says so when it is built."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from regard.core import Card, ConfigError, Cost, Grid, Site, UnsupportedError
from regard.mixers.softmax import Softmax

pytestmark = pytest.mark.untyped


@dataclass(frozen=True, kw_only=True)
class Own(Softmax):
    """Softmax attention with a cost of its own."""

    card: ClassVar[Card] = Softmax.card
    answer: Any = None

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (
            ZeroDivisionError("division by zero"),
            ConfigError,
            "Own.cost fails for 16 channels on 4x5 .*ZeroDivisionError",
        ),
        (UnsupportedError("not here"), UnsupportedError, "^not here$"),
        (3, ConfigError, r"Own.cost returns 3; a Cost\(params, macs\) is expected"),
    ],
)
def test_a_cost_that_fails_is_named(answer: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Own(answer=answer).build(Site(16, 2, Grid(4, 5)))


def test_a_cost_that_is_right_builds() -> None:
    assert Own(answer=Cost(3, 4)).build(Site(16, 2, Grid(4, 5))).site.dim == 16
