"""vit_desk: the small vision transformer of the desk studies."""

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer

from regard.core import ConfigError


def image_sides(host: str, size: int | tuple[int, int], patch: int) -> tuple[int, int]:
    """(height, width) of the images in pixels. Raises: ConfigError if the patch side does not divide them."""
    height, width = (size, size) if isinstance(size, int) else size
    if height % patch or width % patch:
        raise ConfigError(f"{host}: an image of {height}x{width} cannot be cut into patches of {patch}x{patch}")
    return height, width


def vit_desk(
    *, size: int | tuple[int, int] = 32, patch: int = 4, dim: int = 64, depth: int = 4, heads: int = 2,
    mlp_ratio: float = 2.0, in_chans: int = 3, num_classes: int = 10, img_size: int | tuple[int, int] | None = None,
    drop_path_rate: float = 0.0, dynamic_img_size: bool = False,
) -> VisionTransformer:  # fmt: skip
    """timm's VisionTransformer with mean pooling, no class token and no bias of q, k and v (a hidden content term).

    size: image side or (height, width); img_size: the same by timm's name, used if both are given. Learned
    positions are initialised with half of the sines and cosines. Raises: ConfigError if the sizes do not fit.
    """
    height, width = image_sides("vit_desk", size if img_size is None else img_size, patch)
    if dim % 4 or dim % heads:
        raise ConfigError(f"vit_desk: dim {dim} must be a multiple of 4 and of {heads} heads")
    model = VisionTransformer(
        img_size=(height, width), patch_size=patch, in_chans=in_chans, num_classes=num_classes, embed_dim=dim,
        depth=depth, num_heads=heads, mlp_ratio=mlp_ratio, qkv_bias=False, class_token=False, global_pool="avg",
        drop_path_rate=drop_path_rate, dynamic_img_size=dynamic_img_size,
    )  # fmt: skip
    with torch.no_grad():
        waves = build_sincos2d_pos_embed([height // patch, width // patch], dim=dim, interleave_sin_cos=False)
        model.get_parameter("pos_embed").copy_(0.5 * waves[None])
    return model
