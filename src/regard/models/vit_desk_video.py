"""vit_desk_video: the small vision transformer of the desk studies for clips."""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from regard.core import ConfigError

from .vit_desk import image_sides


class TubeletEmbed(nn.Module):
    """Tokens of boxes of `tube` frames x patch x patch pixels (Arnab et al. 2021, ViViT, Sec. 3.2)."""

    def __init__(self, grid: tuple[int, int, int], tube: int, patch: int, in_chans: int, dim: int) -> None:
        super().__init__()
        depth, height, width = grid
        self.num_patches, self.grid_size = depth * height * width, (height, width)
        self.clip = in_chans, tube * depth, patch * height, patch * width
        self.proj = nn.Conv3d(in_chans, dim, (tube, patch, patch), (tube, patch, patch))

    def forward(self, clips: Float[Tensor, "B C T h w"]) -> Float[Tensor, "B N D"]:
        return self.proj(clips).flatten(2).mT


class VideoTransformer(VisionTransformer):
    """timm's VisionTransformer on clips."""

    @torch.no_grad()
    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Take clips of another (height, width): positions are resampled within each frame. Raises: ConfigError."""
        embed = cast(TubeletEmbed, self.patch_embed)
        channels, frames, *sides = embed.clip
        patch = embed.proj.kernel_size[-1]
        height, width = image_sides("vit_desk_video", img_size or (sides[0], sides[1]), patch)
        new = height // patch, width // patch
        if new == embed.grid_size:
            return
        depth = embed.num_patches // (embed.grid_size[0] * embed.grid_size[1])
        old = self.get_parameter("pos_embed")
        maps = old[0].unflatten(0, (depth, *embed.grid_size)).permute(0, 3, 1, 2)
        resampled = F.interpolate(maps, new, mode="bicubic", antialias=True).permute(0, 2, 3, 1).flatten(0, 2)
        self.pos_embed = nn.Parameter(resampled[None].to(old.dtype))
        embed.grid_size, embed.num_patches = new, depth * new[0] * new[1]
        embed.clip = channels, frames, height, width

    def example_input(self) -> Float[Tensor, "1 C T h w"]:
        """Noise of the size that it takes."""
        embed = cast(TubeletEmbed, self.patch_embed)
        clip = torch.randn((1, *embed.clip), generator=torch.Generator().manual_seed(0))
        return clip


def vit_desk_video(
    *, size: int | tuple[int, int] = 28, frames: int = 8, patch: int = 7, tube: int = 1, dim: int = 64, depth: int = 4,
    heads: int = 2, mlp_ratio: float = 2.0, in_chans: int = 3, num_classes: int = 10,
    img_size: int | tuple[int, int] | None = None, drop_path_rate: float = 0.0,
) -> VideoTransformer:  # fmt: skip
    """`vit_desk` for clips (B, C, frames, height, width); every token attends to all places of all frames.

    tube: frames of a token. size, img_size: as in `vit_desk`. Learned positions are initialised with half of the sines
    and cosines of the place, and a quarter of those of the frame. Raises: ConfigError if the sizes do not fit.
    """
    height, width = image_sides("vit_desk_video", size if img_size is None else img_size, patch)
    if dim % 4 or dim % heads:
        raise ConfigError(f"vit_desk_video: dim {dim} must be a multiple of 4 and of {heads} heads")
    if tube < 1 or frames < 1 or frames % tube:
        raise ConfigError(f"vit_desk_video: {frames} frames cannot be cut into tubes of {tube}")
    grid = frames // tube, height // patch, width // patch

    def embed(**timm_options: object) -> TubeletEmbed:
        return TubeletEmbed(grid, tube, patch, in_chans, dim)

    model = VideoTransformer(
        img_size=(height, width), patch_size=patch, in_chans=in_chans, num_classes=num_classes, embed_dim=dim,
        depth=depth, num_heads=heads, mlp_ratio=mlp_ratio, qkv_bias=False, class_token=False, global_pool="avg",
        drop_path_rate=drop_path_rate, embed_layer=embed,  # type: ignore[arg-type]  # timm takes factories
    )  # fmt: skip
    with torch.no_grad():
        place = build_sincos2d_pos_embed(list(grid[1:]), dim=dim, interleave_sin_cos=False)
        time = build_sincos2d_pos_embed([grid[0], 1], dim=dim, interleave_sin_cos=False)
        waves = 0.5 * place + 0.25 * time[:, None]
        model.get_parameter("pos_embed").copy_(waves.reshape(1, -1, dim))
    return model
