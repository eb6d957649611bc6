"""Ports of timm's attention with relative position biases: Swin, SwinV2, BEiT and `vit_relpos`."""

from typing import Any, ClassVar, cast

from timm.models.beit import Attention as BeitAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer, drops_bias
from regard.swapping.biases import check_heads, continuous_biases, keep_biases, mix_biased, use_cosine, with_shift_mask
from regard.swapping.host_parameters import fused_refusal
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SEPARATE_BIASES


class TimmSwin(Port):
    """Swin's attention in windows: relative position biases and the mask of shifted windows are passed as Mask.bias."""

    replaces: ClassVar[tuple[type, ...]] = (WindowAttention,)
    mask_kinds = frozenset({"bias"})
    kept_parameters: ClassVar[tuple[str, ...]] = ("relative_position_bias_table",)

    def __init__(self, host: Any, *args: Any) -> None:
        super().__init__(host, *args)
        index = host.relative_position_index.clone()
        self.register_buffer("relative_position_index", index, persistent=False)

    windows = "window_size"

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        table: Tensor = self.host.relative_position_bias_table  # type: ignore[assignment]
        if config.uses and table.shape[1] != 1 and not drops_bias(config):
            check_heads(mixer, table.shape[1])
        return mixer

    def mix_with_biases(self, x: Tensor, extra: Tensor | None) -> Tensor:
        """The mixer's output with the relative position biases plus `extra` biases."""
        if self._parameters.get("relative_position_bias_table") is None:  # a removed attention has no logits
            return self.mixer(x, self.grid())
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)[None]
        return self.mixer(x, self.grid(), Mask(bias=bias if extra is None else bias + extra))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_with_biases(x, None if mask is None else mask.repeat(x.shape[0] // len(mask), 1, 1)[:, None])


class TimmBeit(TimmSwin):
    """BEiT: relative position biases of the class token and all patch tokens, which form one window."""

    replaces: ClassVar[tuple[type, ...]] = (BeitAttention,)
    parameter_names = SEPARATE_BIASES

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if module.relative_position_bias_table is None:
            return "its relative position biases belong to the whole model"
        return fused_refusal(module)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        height, width = module.window_size
        return Grid(height, width, 1)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.mix_with_biases(x, shared_rel_pos_bias)


class TimmRelPos(Port):
    """`vit_relpos` and `vit_srelpos`: biases from a table or an MLP, of each layer or shared by all."""

    replaces: ClassVar[tuple[type, ...]] = (RelPosAttention,)
    watch = "patch_embed.proj"
    mask_kinds = frozenset({"bias"})

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer):
            keep_biases(mixer, self.host, "rel_pos")
        return mixer

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return mix_biased(self.mixer, x, self.grid(), shared_rel_pos)


class TimmSwinV2(Port):
    """SwinV2 in windows: cosine attention with learned scales; biases of an MLP and shift masks as Mask.bias."""

    replaces: ClassVar[tuple[type, ...]] = (WindowAttentionV2,)
    mask_kinds = frozenset({"bias"})
    parameter_names = {**SEPARATE_BIASES, "logit_scale": "q_norm.logit_scale"}
    bias_module: ClassVar[str] = "cpb_mlp"
    buffer_names: ClassVar[tuple[str, ...]] = ("relative_coords_table", "relative_position_index")

    def __init__(self, host: Any, *args: Any) -> None:
        super().__init__(host, *args)
        for name in self.buffer_names:
            self.register_buffer(name, getattr(host, name).clone(), persistent=False)

    windows = "window_size"

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer, host = super().build_mixer(config, site, shared), cast(Any, self.host)
        if isinstance(mixer, HeadMixer):
            keep_biases(mixer, host, self.bias_module)
            use_cosine(mixer, host.logit_scale)
        return mixer

    def biases(self, heads: int, tokens: int) -> Tensor:
        """The biases (1, H, N, N) of a window."""
        mlp = cast(nn.Module, self.mixer.cpb_mlp)
        return continuous_biases(mlp, self.relative_coords_table, self.relative_position_index)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.mixer.config.uses or self.mixer.drops_bias:  # a removed attention has no logits
            return self.mixer(x, self.grid())
        bias = self.biases(self.mixer.site.heads, x.shape[1])
        return self.mixer(x, self.grid(), Mask(bias=with_shift_mask(bias, mask, len(x))))


class TimmSwinV2Cr(TimmSwinV2):
    """The CR form of SwinV2: another MLP of the biases, one matrix with a bias for queries, keys and values."""

    replaces: ClassVar[tuple[type, ...]] = (WindowMultiHeadAttention,)
    parameter_names = {"logit_scale": "q_norm.logit_scale"}
    bias_module: ClassVar[str] = "meta_mlp"
    buffer_names: ClassVar[tuple[str, ...]] = ("relative_coordinates_log",)

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        return "it computes its windows one after the other" if module.sequential_attn else ""

    def biases(self, heads: int, tokens: int) -> Tensor:
        return self.mixer.meta_mlp(self.relative_coordinates_log).mT.reshape(1, heads, tokens, tokens)  # type: ignore[operator]


PORTS: tuple[type[Port], ...] = (TimmSwin, TimmBeit, TimmRelPos, TimmSwinV2, TimmSwinV2Cr)
