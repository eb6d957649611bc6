"""Contract: what `regard.testing.check` must know about one configuration of a mechanism."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the contract suite cannot measure by itself. The defaults hold for most mechanisms.

    macs: the form whose products `cost` counts, "forward" or "reference"; "" where PyTorch's counter cannot count them.
    counted: attributes of the operator that select the form which is counted, such as {"execution": "gather"}.
    positions: False if the output must not depend on the order of tokens. reach: grid cells that a local mechanism
    reaches in each direction. skip: item -> why it cannot hold, such as {"cross": "the local branch needs one grid"}.
    """

    macs: Literal["forward", "reference", ""] = "forward"
    counted: Mapping[str, object] = field(default_factory=dict)
    positions: bool = True
    reach: int | None = None
    skip: Mapping[str, str] = field(default_factory=dict)
