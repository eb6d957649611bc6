"""xcit_desk: the small XCiT of the desk studies, the host of cross-covariance attention."""

from typing import Any, cast

from timm.models.xcit import Xcit
from torch import Tensor, nn

from regard.core import ConfigError

from .vit_desk import image_sides


class Patches(nn.Module):
    """One convolution in place of XCiT's stem, which reduces by 8 or 16. Returns (B, N, C) and (height, width)."""

    def __init__(self, img_size: tuple[int, int], patch: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.img_size, self.patch_size = img_size, (patch, patch)
        self.grid_size = (img_size[0] // patch, img_size[1] // patch)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(in_chans, dim, patch, patch, bias=False)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens of a map (B, C, h, w)."""
        x = self.norm(self.proj(x))
        return x.flatten(2).mT, (x.shape[2], x.shape[3])


def xcit_desk(
    *, size: int | tuple[int, int] = 32, patch: int = 4, dim: int = 64, depth: int = 4, heads: int = 2,
    mlp_ratio: float = 2.0, class_layers: int = 1, in_chans: int = 3, num_classes: int = 10,
    img_size: int | tuple[int, int] | None = None, drop_path_rate: float = 0.0,
) -> Xcit:  # fmt: skip
    """timm's Xcit with another stem: local patch interaction in every block, then class attention.

    size: image side or (height, width); img_size: the same by timm's name, used if both are given. class_layers: 2 in
    XCiT. q, k and v have biases, as in XCiT. Raises: ConfigError if the sizes do not fit.
    """
    sides = image_sides("xcit_desk", size if img_size is None else img_size, patch)
    if dim % heads:
        raise ConfigError(f"xcit_desk: dim {dim} must be a multiple of {heads} heads")
    model = Xcit(
        img_size=16, patch_size=16,  # of the stem, which is replaced below
        in_chans=in_chans, num_classes=num_classes, embed_dim=dim, depth=depth, num_heads=heads,
        mlp_ratio=mlp_ratio, drop_path_rate=drop_path_rate, cls_attn_layers=class_layers,
    )  # fmt: skip
    model.patch_embed = cast(Any, Patches(sides, patch, in_chans, dim))
    model.feature_info = [{**stage, "reduction": patch} for stage in model.feature_info]
    return model
