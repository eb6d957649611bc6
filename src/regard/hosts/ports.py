"""The ports: how each library's attention is read and replaced. A new attention class is one more class here."""

from typing import Any, ClassVar, Literal

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.xcit import XCA as XCiTAttention
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mask, Site

from .hosted import Hosted, additive
from .vit_spt import LocalityAttention


def fused_site(module: Any, grid: Grid, name: str, layer: int) -> Site:
    """The site of an attention with children `qkv` and `proj`, as all of timm's have."""
    return Site(
        dim=module.qkv.in_features,
        heads=module.num_heads,
        grid=grid,
        width=module.qkv.out_features // (3 * module.num_heads),
        qkv_bias=module.qkv.bias is not None,
        out_bias=module.proj.bias is not None,
        qk_norm=normalisation(module, name),
        drop=module.proj_drop.p,
        layer=layer,
        name=name,
    )


def normalisation(module: nn.Module, name: str) -> Literal["", "layer", "rms"]:
    """The kind of q/k normalisation. Raises: ConfigError for a kind that Regard's layer does not have."""
    norm = getattr(module, "q_norm", None)
    if norm is None or isinstance(norm, nn.Identity):
        return ""
    kind = type(norm).__name__.lower()
    if "rms" in kind:
        return "rms"
    if "layernorm" in kind:
        return "layer"
    raise ConfigError(f"{name} normalises q and k by {type(norm).__name__}; Regard's layer knows LayerNorm and RMSNorm")


def fused_refuses(module: Any) -> str:
    """What timm's attention may have that Regard's layer has not."""
    if getattr(module, "gate", None) is not None:
        return "it gates its output by a sigmoid"
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        return "it normalises its output before the projection"
    if module.qkv is None:
        return "it has separate q, k and v"
    if module.proj.out_features != module.qkv.in_features:
        return "it changes the number of channels"
    return ""


class TimmViT(Hosted):
    """timm.layers.Attention: ViT, DeiT, DINOv2 and all that is built from them."""

    library: ClassVar[tuple[type, ...]] = (Attention,)
    watch: ClassVar[str] = "patch_embed.proj"

    @classmethod
    def refuses(cls, module: nn.Module) -> str:
        return fused_refuses(module)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return fused_site(module, grid, name, layer)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x))


class TimmRope(TimmViT):
    """timm's attention with rotary embedding and fused q, k, v without bias: vit_*_rope, EVA without biases, DINOv3."""

    library: ClassVar[tuple[type, ...]] = (AttentionRope, EvaAttention)

    @classmethod
    def refuses(cls, module: Any) -> str:  # type: ignore[override]
        if getattr(module, "q_bias", None) is not None:
            return "it has biases of q and v apart from the fused matrix"
        if getattr(module, "rotate_half", False):
            return "it rotates halves, not neighbouring channels"
        return fused_refuses(module)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        if grid.prefix != module.num_prefix_tokens:
            raise ConfigError(
                f"{name} leaves {module.num_prefix_tokens} tokens unrotated, {grid.prefix} are before the grid"
            )
        site = fused_site(module, grid, name, layer)
        return Site(**{**vars(site), "rotary": True})

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x), rope)


class TimmXCiT(Hosted):
    """The cross-covariance blocks of XCiT; its two class-attention blocks stay."""

    library: ClassVar[tuple[type, ...]] = (XCiTAttention,)
    watch: ClassVar[str] = "patch_embed.proj"
    names: ClassVar[dict[str, str]] = {"temperature": "operator.temperature"}

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return fused_site(module, grid, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


class TimmMetaFormer(Hosted):
    """The attention of CAFormer; each stage has its own grid."""

    library: ClassVar[tuple[type, ...]] = (MetaFormerAttention,)
    watch: ClassVar[str] = "downsample"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return fused_site(module, grid, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


class TimmSwin(Hosted):
    """Swin's attention in windows: the relative position bias and the mask of shifted windows arrive as Mask.bias."""

    library: ClassVar[tuple[type, ...]] = (WindowAttention,)
    sends: ClassVar[frozenset[str]] = frozenset({"bias"})
    stays: ClassVar[tuple[str, ...]] = ("relative_position_bias_table",)

    def __init__(self, host: Any, *args: Any) -> None:
        super().__init__(host, *args)
        self.windows = Grid(*host.window_size)
        index = host.relative_position_index.clone()
        self.register_buffer("relative_position_index", index, persistent=False)

    @classmethod
    def grid_of(cls, module: Any) -> Grid:
        return Grid(*module.window_size)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return fused_site(module, grid, name, layer)

    def grid(self) -> Grid:
        return self.windows

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self._parameters.get("relative_position_bias_table") is None:  # removed: nothing to add a bias to
            return self.mixer(x, self.windows)
        n = self.windows.cells
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = bias.unflatten(0, (n, n)).permute(2, 0, 1)[None]
        if mask is not None:
            bias = bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None]
        return self.mixer(x, self.windows, Mask(bias=bias))


class LocalityViT(Hosted):
    """The locality self-attention of vit_s_32_spt; its temperature and diagonal mask go with it."""

    library: ClassVar[tuple[type, ...]] = (LocalityAttention,)
    watch: ClassVar[str] = "patch_embed.proj"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return fused_site(module, grid, name, layer)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x))


class TorchvisionViT(Hosted):
    """nn.MultiheadAttention in torchvision's VisionTransformer."""

    library: ClassVar[tuple[type, ...]] = (nn.MultiheadAttention,)
    watch: ClassVar[str] = "conv_proj"
    names: ClassVar[dict[str, str]] = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj": "proj"}

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
        """Boolean masks are True where attention is forbidden, as in torch. The weights are always None."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        mask = additive(attn_mask, False, query)
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool:
                raise ConfigError("key_padding_mask must be boolean, True where a key is padding")
            mask = Mask(keep=~key_padding_mask, bias=None if mask is None else mask.bias)
        return self.mixer(query, self.grid(), mask), None


PORTS: tuple[type[Hosted], ...] = (
    TimmViT,
    TimmRope,
    TimmXCiT,
    TimmMetaFormer,
    TimmSwin,
    LocalityViT,
    TorchvisionViT,
)
