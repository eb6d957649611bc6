"""Port of the self-attention of diffusers: DiT, PixArt, the UNets and the autoencoder; cross-attention stays."""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, MixerConfig, Site, UnsupportedError
from regard.swapping.layer import Port

PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
"""Processors that compute the attention that the port replaces."""


class DiffusersAttention(Port):
    """Self-attention of diffusers on tokens (B, N, C) or maps (B, C, h, w), with its norm and residual connection."""

    class_paths = frozenset({"diffusers.models.attention_processor.Attention"})
    watch = "norm|pos_embed.proj|conv_in"
    dropouts = ()  # `dropout` is that of the output
    parameter_names = {
        "to_q": "qkv.q", "to_k": "qkv.k", "to_v": "qkv.v", "to_out.0": "proj", "norm_q": "q_norm", "norm_k": "k_norm",
        "to_out.1": "proj_drop",
    }  # fmt: skip

    @classmethod
    def matches(cls, module: Any) -> bool:
        """Not those with another input as keys."""
        return super().matches(module) and not module.is_cross_attention

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        processor = type(module.processor).__name__
        if module.added_kv_proj_dim is not None or processor not in PROCESSORS:
            return f"it attends to other tokens, too, or in another way: its processor is {processor}"
        if module.inner_kv_dim != module.inner_dim or module.out_dim != module.query_dim or not module.scale_qk:
            return "its keys and values have fewer heads, its output has other channels, or its logits have no scale"
        if module.spatial_norm is not None or not isinstance(module.norm_q, nn.LayerNorm | None):
            return "its normalisation is none that Regard's layer has"
        return ""

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        x = inputs[0]
        return Grid(*x.shape[2:]) if x.ndim == 4 else super().call_grid(module, inputs, watched)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return replace(super().site(module, grid, name, layer), drop=module.dropout)

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer, host = super().build_mixer(config, site, shared), self.host
        if host.group_norm is not None:
            mixer.add_module("group_norm", copy.deepcopy(host.group_norm))  # type: ignore[arg-type]
        return mixer

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """attention_mask (B, 1, N) is added to the logits. Raises: UnsupportedError for keys from another input."""
        if encoder_hidden_states is not None:
            raise UnsupportedError(
                "this layer was called with encoder_hidden_states: the port is for self-attention; leave the layer out "
                "with where="
            )
        host: Any = self.host
        maps = hidden_states.ndim == 4
        x = hidden_states.flatten(2).mT if maps else hidden_states
        grid = Grid(*hidden_states.shape[2:]) if maps else self.grid()
        group_norm: Any = self.mixer._modules.get("group_norm")
        if group_norm is not None:
            x = group_norm(x.mT).mT
        out = self.mixer(x, grid, None if attention_mask is None else Mask(bias=attention_mask[:, None]))
        out = out.mT.unflatten(2, hidden_states.shape[2:]) if maps else out
        return (out + hidden_states if host.residual_connection else out) / host.rescale_output_factor


PORTS: tuple[type[Port], ...] = (DiffusersAttention,)
