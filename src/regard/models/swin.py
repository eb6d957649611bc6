"""swin_t_32: the small Swin of the SKA paper, on timm's SwinTransformerBlock.

Patch merging before each stage is an unfolding by 2, 2, 2, 1 and a linear layer, so an image of 32 has the grids 16, 8,
4, 4; window 4, one table of relative biases for all heads of a layer, no bias of q, k and v (SKA paper, Table 1).
Windows, shifts and their masks depend on the image size, so the model takes only the size that it was built for.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from jaxtyping import Float
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import Tensor, nn

from regard.core import ConfigError, GridError, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.swapping.per_window import PerWindow
from regard.swapping.ports.timm.relative_position_bias import TimmSwin

from .pyramids import Pyramid, init_linear

FACTORS, DIMS, DEPTHS, WIDTH, WINDOW = (2, 2, 2, 1), (96, 192, 384, 768), (2, 2, 6, 2), 32, 4


class WindowKeySwin(TimmSwin):
    """swin_t_32(keys="window"): a mechanism has its parameters once for each head in each window."""

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer) and isinstance(config, HeadMixerConfig):
            windows: int = self.host.windows  # type: ignore[assignment]
            every_window = replace(mixer.site, heads=mixer.site.heads * windows)
            mixer.operator = PerWindow(config.operator(every_window), windows)
        return mixer


class SharedBiasAttention(WindowAttention):
    """timm's attention in windows with one relative bias for all heads: the table is ((2w-1)^2, 1).

    windows: number of windows of an image of the trained size. All windows share learned keys.
    """

    port = TimmSwin

    def __init__(self, dim: int, num_heads: int, window_size: tuple[int, int], windows: int, proj_drop: float) -> None:
        super().__init__(dim, num_heads, WIDTH, window_size, qkv_bias=False, proj_drop=proj_drop)
        self.windows = windows
        self.relative_position_bias_table = nn.Parameter(self.relative_position_bias_table.detach()[:, :1].clone())


class WindowKeyAttention(SharedBiasAttention):
    """`SharedBiasAttention` into which mechanisms are swapped with parameters for each window of the image."""

    port = WindowKeySwin


class Merging(nn.Module):
    """Patch merging: factor x factor neighbours joined in the order of `nn.Unfold`, then one linear layer."""

    def __init__(self, dim: int, out: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(dim * factor**2, out)

    def forward(self, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B h w D"]:
        return self.linear(F.pixel_unshuffle(x.movedim(-1, 1), self.factor).movedim(1, -1))


class SmallSwin(Pyramid):
    """Stages of a merging and blocks; LayerNorm and Linear on the mean of the last map.

    Raises: GridError in a forward pass on images of another size than `img_size`.
    """

    def __init__(
        self, img_size: tuple[int, int], in_chans: int, num_classes: int, heads: Sequence[int], drop: float,
        attention: type[SharedBiasAttention],
    ) -> None:  # fmt: skip
        super().__init__()
        self.img_size, self.in_chans, self.num_classes, self.num_features = img_size, in_chans, num_classes, DIMS[-1]
        self.stages = nn.ModuleList()
        (height, width), dim, reduction = img_size, in_chans, 1
        for factor, out, depth, num_heads in zip(FACTORS, DIMS, DEPTHS, heads, strict=True):
            height, width, reduction = height // factor, width // factor, reduction * factor
            blocks = [_block(out, (height, width), num_heads, index % 2, drop, attention) for index in range(depth)]
            self.stages.append(nn.Sequential(Merging(dim, out, factor), *blocks))
            self.add_stage(out, reduction, f"stages.{len(self.stages) - 1}")
            dim = out
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes) if num_classes else nn.Identity()

    def no_weight_decay(self) -> set[str]:
        """The tables of relative biases."""
        return {name for name, _ in self.named_parameters() if "relative_position_bias_table" in name}

    def maps(self, x: Float[Tensor, "B c H W"]) -> list[Float[Tensor, "B D h w"]]:
        if tuple(x.shape[-2:]) != tuple(self.img_size):
            (height, width), (built_height, built_width) = x.shape[-2:], self.img_size
            raise GridError(
                f"swin_t_32 is built for images of {built_height}x{built_width}, not {height}x{width}: windows, shifts "
                f"and masks depend on the size; build it with img_size=({height}, {width})"
            )
        x = x.movedim(1, -1)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x.movedim(-1, 1))
        return maps

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B K"]:
        return self.head(self.norm(self.maps(x)[-1].mean((2, 3))))


def _block(
    dim: int, grid: tuple[int, int], heads: int, shifted: int, drop: float, attention: type[SharedBiasAttention]
) -> SwinTransformerBlock:
    shift = WINDOW // 2 * shifted
    block = SwinTransformerBlock(dim, grid, heads, WIDTH, WINDOW, shift, mlp_ratio=4.0, qkv_bias=False, proj_drop=drop)
    rows, columns = (-(-side // window) for side, window in zip(grid, block.window_size, strict=True))
    block.attn = attention(dim, heads, block.window_size, rows * columns, drop)
    return block


def swin_t_32(
    *, img_size: int | tuple[int, int] = 32, in_chans: int = 3, num_classes: int = 10,
    heads: Sequence[int] = (3, 6, 12, 24), drop: float = 0.0, keys: str = "shared",
) -> SmallSwin:  # fmt: skip
    """26,598,646 parameters with 10 classes. heads: of each stage, all 32 wide (SKA's model "b" has 4, 8, 16, 32).

    keys: whether all windows share the learned keys of a mechanism ("shared"), or each window of the image has its
    own ("window", as in the paper's code).
    Raises: ConfigError if the sides of the image are not multiples of 8, for another `keys`, or not four `heads`.
    """
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    kinds = {"shared": SharedBiasAttention, "window": WindowKeyAttention}
    if height % 8 or width % 8:
        raise ConfigError(f"swin_t_32: an image of {height}x{width} cannot be merged by 8; use multiples of 8")
    if keys not in kinds or len(heads) != len(DIMS):
        raise ConfigError(f"swin_t_32 has keys='shared' or 'window' and heads of four stages, not {keys!r}, {heads}")
    model = SmallSwin((height, width), in_chans, num_classes, heads, drop, kinds[keys])
    init_linear(model)
    return model
