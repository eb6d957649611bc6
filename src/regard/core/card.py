"""Card: facts about a mechanism for lists, the taxonomy and reports."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Card:
    """A mechanism in the terms of MiTA's Table 1, and what a user needs for a choice.

    query_content, key_content, relative_position: which factors decide the weights. dynamic: how the weights are made,
    in MiTA's terms. scaling: subset of {"routing", "compression"}. expert_type: the layer that a query passes through,
    whose weights are keys and values. expert_count: the number of experts. construction: how experts are built.
    topology: how queries are assigned to experts. conditions: what construction and routing depend on, of Q, K, V and
    position; empty where the only expert is all keys and values. discrete: indices are selected, so outputs are not
    continuous. prefix: how class and register tokens are handled. row_maps: out = A v with one matrix A per head.
    """

    title: str
    source: str
    formula: str
    complexity: str
    query_content: bool
    key_content: bool
    relative_position: bool = False
    dynamic: Literal["none", "one-step", "two-step"] = "one-step"
    scaling: frozenset[str] = frozenset()
    expert_type: str = ""
    expert_count: str = ""
    construction: str = ""
    topology: str = ""
    conditions: str = ""
    discrete: bool = False
    prefix: str = "like any other token"
    row_maps: bool = True

    @property
    def strategy(self) -> str:
        """How the cost of N keys per query is reduced: "none", "compress", "route" or "both"."""
        if len(self.scaling) > 1:
            return "both"
        return {"compression": "compress", "routing": "route"}[next(iter(self.scaling))] if self.scaling else "none"
