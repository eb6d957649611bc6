"""Card: what is known about a mechanism, for lists, the taxonomy and reports."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Card:
    """The five dimensions of MiTA's Table 1 and what a user wants to know before choosing.

    query_content, key_content, relative_position: which factors decide the weights. dynamic: MiTA's notion of how the
    weights come about. scaling: subset of {"routing", "compression"}. expert_type: what a query is passed through, seen
    as a layer whose weights are made from keys and values. expert_count: how many of them there are. construction: how
    they come about. topology: how queries find theirs. conditions: what construction and routing depend on, of Q, K, V
    and position; empty where the experts are all keys and values as they are. discrete: indices are picked, so outputs
    jump.
    prefix: what becomes of class and register tokens. row_maps: out = A v with one matrix A per head.
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
        """What is done about the cost of N keys a query: "none", "compress", "route" or "both"."""
        if len(self.scaling) > 1:
            return "both"
        words = {"compression": "compress", "routing": "route"}
        return next((words.get(word, word) for word in self.scaling), "none")
