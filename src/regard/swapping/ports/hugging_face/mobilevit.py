"""Ports of transformers' attention between the pixels at one place of all 2 x 2 patches: MobileViT, MobileViTV2."""

from typing import Any, cast

from torch import Tensor

from regard.core import Grid
from regard.swapping.host_mixer import host_parts
from regard.swapping.layer import Port
from regard.swapping.ports.timm.mobilevit import TimmSeparable, merged_grid

from .base import HuggingPort
from .vit import HuggingDPT


class HuggingMobileViT(HuggingDPT):
    """MobileViT: softmax attention between the pixels at one place of all patches."""

    class_paths = frozenset({"mobilevit.modeling_mobilevit.MobileViTAttention"})
    watch = "conv_1x1"
    routed = False

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return merged_grid(cast(Grid, watched), inputs[0].shape[1])

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return self.mixer(hidden_states, merged_grid(self.grid(), hidden_states.shape[1]))


class HuggingMobileViTV2(TimmSeparable, HuggingPort):
    """MobileViTV2: scores of tokens, which depend on no query; between the pixels at one place of all patches."""

    class_paths = frozenset({"mobilevitv2.modeling_mobilevitv2.MobileViTV2LinearSelfAttention"})
    parameter_names = host_parts("qkv_proj", "out_proj")
    dropouts = ("attn_dropout",)
    routed = False


PORTS: tuple[type[Port], ...] = (HuggingMobileViT, HuggingMobileViTV2)
