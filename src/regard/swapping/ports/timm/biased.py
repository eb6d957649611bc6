"""Ports of timm's attention with relative position biases: Swin and BEiT."""

from typing import Any, ClassVar

from timm.models.beit import Attention as BeitAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, MixerConfig, Site, UnsupportedError
from regard.swapping.host_parameters import fused_refuses
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import BIASES_APART


class TimmSwin(Port):
    """Swin's attention in windows: the relative position bias and the mask of shifted windows arrive as Mask.bias."""

    library: ClassVar[tuple[type, ...]] = (WindowAttention,)
    sends: ClassVar[frozenset[str]] = frozenset({"bias"})
    stays: ClassVar[tuple[str, ...]] = ("relative_position_bias_table",)

    def __init__(self, host: Any, *args: Any) -> None:
        super().__init__(host, *args)
        self.windows = self.grid_of(host)
        index = host.relative_position_index.clone()
        self.register_buffer("relative_position_index", index, persistent=False)

    @classmethod
    def grid_of(cls, module: Any) -> Grid:
        return Grid(*module.window_size)

    def grid(self) -> Grid:
        return self.windows

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().built(config, site, shared)
        table: Tensor = self.host.relative_position_bias_table  # type: ignore[assignment]
        if config.uses and table.shape[1] not in (1, mixer.site.heads):
            raise UnsupportedError(
                f"{site.name} adds relative position biases of {table.shape[1]} heads, which {mixer.site.heads} heads "
                f"of {type(config).__name__} cannot have; leave heads= out"
            )
        return mixer

    def biased(self, x: Tensor, more: Tensor | None) -> Tensor:
        """The mixer with the relative biases and more of them."""
        if self._parameters.get("relative_position_bias_table") is None:  # removed: nothing to add a bias to
            return self.mixer(x, self.windows)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)[None]
        return self.mixer(x, self.windows, Mask(bias=bias if more is None else bias + more))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.biased(x, None if mask is None else mask.repeat(x.shape[0] // len(mask), 1, 1)[:, None])


class TimmBeit(TimmSwin):
    """BEiT: relative position biases of the class token and all cells, which are one window."""

    library: ClassVar[tuple[type, ...]] = (BeitAttention,)
    names: ClassVar[dict[str, str]] = BIASES_APART

    @classmethod
    def refuses(cls, module: Any) -> str:  # type: ignore[override]
        if module.relative_position_bias_table is None:
            return "its relative position biases are those of the whole model"
        return fused_refuses(module)

    @classmethod
    def grid_of(cls, module: Any) -> Grid:
        height, width = module.window_size
        return Grid(height, width, 1)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.biased(x, shared_rel_pos_bias)
