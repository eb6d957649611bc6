"""Port of torchvision's vision transformer."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.core import NO_MASK, ConfigError, Grid, Site, UnsupportedError
from regard.swapping.grid_source import watched_module
from regard.swapping.layer import Port, library_mask


class TorchvisionViT(Port):
    """nn.MultiheadAttention in torchvision's VisionTransformer."""

    replaces: ClassVar[tuple[type, ...]] = (nn.MultiheadAttention,)
    watch: ClassVar[str] = "conv_proj"
    parameter_names: ClassVar[dict[str, str]] = {
        "in_proj_weight": "qkv.weight",
        "in_proj_bias": "qkv.bias",
        "out_proj": "proj",
    }

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """nn.MultiheadAttention is also used in decoders and pooling heads, whose tokens have no grid."""
        return watched_module(model, name, cls.watch) is not None

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if (
            not module._qkv_same_embed_dim
            or module.bias_k is not None
            or module.add_zero_attn
            or not module.batch_first
        ):
            return "it has keys of another width, extra keys, or the batch is not the first axis"
        return ""

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        bias = module.in_proj_bias is not None
        dim, heads = module.embed_dim, module.num_heads
        return Site(dim=dim, heads=heads, grid=grid, qkv_bias=bias, out_bias=bias, layer=layer, name=name)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Boolean masks are True where attention is forbidden, as in torch. The weights are always None.

        Raises: UnsupportedError for keys or values that are not the queries' tensor; ConfigError for a padding mask
        that is not boolean.
        """
        if not (_is_one(key, query) and _is_one(value, query)):
            raise UnsupportedError(
                "this layer was called with separate keys or values: the port is for self-attention, which gets one "
                "tensor as query, key and value; leave the layer out with where="
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        mask = library_mask(attn_mask, is_causal and attn_mask is None, query)  # beside a mask, is_causal is a hint
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool:
                raise ConfigError("key_padding_mask must be boolean, True where a key is padding")
            mask = replace(mask or NO_MASK, keep=~key_padding_mask)
        return self.mixer(query, self.grid(), mask), None


def _is_one(x: Tensor, query: Tensor) -> bool:
    """Whether an argument is the queries' tensor; FSDP2 hands every argument on as an alias of its own."""
    return x is query or (x.shape == query.shape and x.data_ptr() == query.data_ptr())
