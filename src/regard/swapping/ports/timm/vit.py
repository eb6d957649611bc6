"""The ports: how each library's attention is read and replaced. A new attention class is one more class here."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.xcit import XCA as XCiTAttention
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mask, Mixer, MixerConfig, Site, UnsupportedError
from regard.swapping.host_parameters import fused_refuses, normalisation
from regard.swapping.layer import Hosted, additive, watched_module
from regard.swapping.rotary import interleaved, turn_halves
from regard.swapping.separate_qkv import BIASES_APART, MATRICES_APART


class TimmViT(Hosted):
    """timm.layers.Attention: ViT, DeiT, DINOv2 and all that is built from them."""

    library: ClassVar[tuple[type, ...]] = (Attention,)
    watch: ClassVar[str] = "patch_embed.proj"

    @classmethod
    def refuses(cls, module: nn.Module) -> str:
        return fused_refuses(module)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x))


class TimmRope(TimmViT):
    """timm's attention with rotary embedding: vit_*_rope, EVA, EVA-02, DINOv3, Perception Encoder."""

    library: ClassVar[tuple[type, ...]] = (AttentionRope, EvaAttention)
    names: ClassVar[dict[str, str]] = {**BIASES_APART, **MATRICES_APART}

    @classmethod
    def refuses(cls, module: Any) -> str:  # type: ignore[override]
        if getattr(module, "rotate_half", False) and normalisation(module, "it"):
            return "it rotates halves of normalised channels, not neighbours"
        return fused_refuses(module)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        if grid.prefix != module.num_prefix_tokens:
            raise ConfigError(
                f"{name} leaves {module.num_prefix_tokens} tokens unrotated, {grid.prefix} are before the grid"
            )
        return replace(super().site(module, grid, name, layer), rotary=True)

    @property
    def halves(self) -> bool:
        """Whether the host rotates the halves of a head's channels, not neighbours."""
        return bool(getattr(self.host, "rotate_half", False))

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().built(config, site, shared)
        if self.halves:
            turn_halves(mixer)
        return mixer

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.halves and rope is not None:
            rope = interleaved(rope.unflatten(-1, (2, -1))).flatten(-2)
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x), rope)


class TimmXCiT(Hosted):
    """The cross-covariance blocks of XCiT; its two class-attention blocks stay."""

    library: ClassVar[tuple[type, ...]] = (XCiTAttention,)
    watch: ClassVar[str] = "patch_embed.proj"
    names: ClassVar[dict[str, str]] = {"temperature": "operator.temperature"}

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


class TimmMetaFormer(Hosted):
    """The attention of CAFormer; each stage has its own grid."""

    library: ClassVar[tuple[type, ...]] = (MetaFormerAttention,)
    watch: ClassVar[str] = "downsample"

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


class TimmPVT(Hosted):
    """PVTv2, each stage with its own grid. Convolutions that reduce keys and values stay in a `PVT` of their ratio."""

    library: ClassVar[tuple[type, ...]] = (PVTAttention,)
    watch: ClassVar[str] = "downsample.proj|patch_embed.proj"
    names: ClassVar[dict[str, str]] = {
        "q": "qkv.q", "kv": "qkv.kv", "sr": "operator.reduce", "norm": "operator.norm",
    }  # fmt: skip

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(
            dim=module.dim,
            heads=module.num_heads,
            grid=grid,
            qkv_bias=module.q.bias is not None,
            drop=module.proj_drop.p,
            layer=layer,
            name=name,
        )

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        height, width = feat_size
        return self.mixer(x, Grid(height, width))


class TorchvisionViT(Hosted):
    """nn.MultiheadAttention in torchvision's VisionTransformer."""

    library: ClassVar[tuple[type, ...]] = (nn.MultiheadAttention,)
    watch: ClassVar[str] = "conv_proj"
    names: ClassVar[dict[str, str]] = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj": "proj"}

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """nn.MultiheadAttention is also in decoders and pooling heads, whose tokens have no grid."""
        return watched_module(model, name, cls.watch) is not None

    @classmethod
    def refuses(cls, module: Any) -> str:  # type: ignore[override]
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
        if key is not query or value is not query:
            raise UnsupportedError(
                "this layer got keys or values of their own: cross-attention has no port, only self-attention, which "
                "is called with one tensor as query, key and value; leave the layer out with where="
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        mask = additive(attn_mask, False, query)
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool:
                raise ConfigError("key_padding_mask must be boolean, True where a key is padding")
            mask = Mask(keep=~key_padding_mask, bias=None if mask is None else mask.bias)
        return self.mixer(query, self.grid(), mask), None
