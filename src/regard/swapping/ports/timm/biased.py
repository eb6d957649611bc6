"""Ports of timm's attention with relative position biases: Swin and BEiT."""

from typing import Any, ClassVar

from timm.models.beit import Attention as BeitAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, MixerConfig, Site, UnsupportedError
from regard.swapping.host_parameters import fused_refusal
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SEPARATE_BIASES


class TimmSwin(Port):
    """Swin's attention in windows: relative position biases and the mask of shifted windows are passed as Mask.bias."""

    replaces: ClassVar[tuple[type, ...]] = (WindowAttention,)
    mask_kinds: ClassVar[frozenset[str]] = frozenset({"bias"})
    kept_parameters: ClassVar[tuple[str, ...]] = ("relative_position_bias_table",)

    def __init__(self, host: Any, *args: Any) -> None:
        super().__init__(host, *args)
        self.windows = self.host_grid(host)
        index = host.relative_position_index.clone()
        self.register_buffer("relative_position_index", index, persistent=False)

    @classmethod
    def host_grid(cls, module: Any) -> Grid:
        return Grid(*module.window_size)

    def grid(self) -> Grid:
        return self.windows

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        table: Tensor = self.host.relative_position_bias_table  # type: ignore[assignment]
        if config.uses and table.shape[1] not in (1, mixer.site.heads):
            raise UnsupportedError(
                f"{site.name} adds relative position biases of {table.shape[1]} heads, which do not "
                f"fit the {mixer.site.heads} heads of {type(config).__name__}; leave heads= out"
            )
        return mixer

    def mix_with_biases(self, x: Tensor, extra: Tensor | None) -> Tensor:
        """The mixer's output with the relative position biases plus `extra` biases."""
        if self._parameters.get("relative_position_bias_table") is None:  # a removed attention has no logits
            return self.mixer(x, self.windows)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)[None]
        return self.mixer(x, self.windows, Mask(bias=bias if extra is None else bias + extra))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_with_biases(x, None if mask is None else mask.repeat(x.shape[0] // len(mask), 1, 1)[:, None])


class TimmBeit(TimmSwin):
    """BEiT: relative position biases of the class token and all patch tokens, which form one window."""

    replaces: ClassVar[tuple[type, ...]] = (BeitAttention,)
    parameter_names: ClassVar[dict[str, str]] = SEPARATE_BIASES

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if module.relative_position_bias_table is None:
            return "its relative position biases belong to the whole model"
        return fused_refusal(module)

    @classmethod
    def host_grid(cls, module: Any) -> Grid:
        height, width = module.window_size
        return Grid(height, width, 1)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.mix_with_biases(x, shared_rel_pos_bias)
