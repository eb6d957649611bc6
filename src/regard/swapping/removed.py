"""Removed: a mixer whose output is zero, the control without attention ("w/o" in the studies)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.core import Card, Cost, Grid, Mask, Mixer, MixerConfig, Site


@dataclass(frozen=True, kw_only=True)
class Removed(MixerConfig):
    """Used by `remove`. It is no mechanism, so `parse` does not know it."""

    card = Card(
        title="No mixer", source="control", formula="0", complexity="O(1)", query_content=False, key_content=False,
        dynamic="none", row_maps=False,
    )  # fmt: skip
    masks = frozenset({"causal", "padding", "bias"})
    depth = True

    @property
    def uses(self) -> str:
        return ""

    def build(self, site: Site, shared: nn.Module | None = None) -> "RemovedMixer":
        return RemovedMixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        return Cost()


class RemovedMixer(Mixer):
    """Zeros that keep the autograd graph, so that the norm before them still gets a gradient (of zero)."""

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        return x * 0.0
