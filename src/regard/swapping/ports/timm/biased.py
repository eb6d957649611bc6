"""Ports of attention with relative position biases: timm's Swin and BEiT, and swin_t_32."""

from dataclasses import replace
from typing import Any, ClassVar

from timm.models.beit import Attention as BeitAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from regard.core import Grid, GridError, Mask, Mixer, MixerConfig, Operator, Site, UnsupportedError
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.models.swin import SharedBiasAttention, WindowKeyAttention
from regard.swapping.host_parameters import fused_refuses
from regard.swapping.layer import Hosted
from regard.swapping.separate_qkv import BIASES_APART


class TimmSwin(Hosted):
    """Swin's attention in windows: the relative position bias and the mask of shifted windows arrive as Mask.bias."""

    library: ClassVar[tuple[type, ...]] = (WindowAttention, SharedBiasAttention)
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


class WindowKeySwin(TimmSwin):
    """swin_t_32(keys="window"): what a mechanism learns for a head, it learns for a head in each window."""

    library: ClassVar[tuple[type, ...]] = (WindowKeyAttention,)

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().built(config, site, shared)
        if isinstance(mixer, HeadMixer) and isinstance(config, HeadMixerConfig):
            windows: int = self.host.windows  # type: ignore[assignment]
            every = replace(mixer.site, heads=mixer.site.heads * windows)
            mixer.operator = PerWindow(config.operator(every), windows)
        return mixer


class PerWindow(Operator):
    """An operator whose heads are the heads of every window of an image.

    Raises: GridError if the windows are not those of whole images: another size of image has no keys of its own.
    """

    def __init__(self, inner: Operator, windows: int) -> None:
        super().__init__()
        self.inner, self.windows = inner, windows

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        return self._by_window(self.inner, q, k, v, grid, memory, mask)

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        return self._by_window(self.inner.reference, q, k, v, grid, memory, mask)

    def _by_window(
        self, inner: Any, q: Any, k: Any, v: Any, grid: Grid, memory: Grid | None, mask: Mask | None
    ) -> Tensor:
        roles = [None if x is None else self._together(x) for x in (q, k, v)]
        if mask is not None and mask.bias is not None:
            number = max(x.shape[0] for x in (q, k, v) if x is not None)
            heads = next(x.shape[1] for x in (q, k, v) if x is not None)
            bias = mask.bias.expand(number, heads, *mask.bias.shape[-2:])
            mask = replace(mask, bias=self._together(bias))
        out = inner(*roles, grid=grid, memory=memory, mask=mask)
        return out.unflatten(1, (self.windows, -1)).flatten(0, 1)

    def _together(self, x: Tensor) -> Tensor:
        """(B windows, H, N, d) -> (B, windows H, N, d)."""
        if x.shape[0] % self.windows:
            raise GridError(
                f"{x.shape[0]} windows are not images of {self.windows}, each of which has parameters of its own"
            )
        return x.unflatten(0, (-1, self.windows)).flatten(1, 2)
