"""Contract: what `regard.testing.check` must know of one configuration of a mechanism."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the contract suite cannot see by itself. The defaults hold for most mechanisms.

    macs: the form whose products `cost` describes, "forward" or "reference"; "" where PyTorch's counter cannot see
    them. counted: attributes of the operator that choose the form which is counted, such as {"execution": "gather"}.
    positions: False if the order of tokens must not matter. reach: cells that a local mechanism sees in each direction.
    skip: item -> the reason why it cannot hold, such as {"cross": "the local branch needs one grid"}.
    """

    macs: Literal["forward", "reference", ""] = "forward"
    counted: Mapping[str, object] = field(default_factory=dict)
    positions: bool = True
    reach: int | None = None
    skip: Mapping[str, str] = field(default_factory=dict)
