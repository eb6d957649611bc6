"""Port of transformers' Hiera, which is timm's with other names."""

from typing import Any

from torch import Tensor

from regard.swapping.layer import Port
from regard.swapping.ports.timm.hiera import TimmHiera

from .base import HuggingPort, refuse_weights


class HuggingHiera(TimmHiera, HuggingPort):
    """Hiera, in mask units and global; layers that pool their queries take mechanisms that have cross-attention."""

    class_paths = frozenset({"hiera.modeling_hiera.HieraMaskUnitAttention"})
    watch = "embeddings.patch_embeddings.projection"
    routed = False

    @classmethod
    def query_stride(cls, module: Any) -> int:
        return int(module.query_stride)

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, None]:  # type: ignore
        """As in `TimmHiera`. Raises: also UnsupportedError for output_attentions."""
        refuse_weights(output_attentions)
        return super().forward(hidden_states), None


PORTS: tuple[type[Port], ...] = (HuggingHiera,)
