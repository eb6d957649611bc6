"""ViT-5: a vision transformer with register tokens after the patches, rotary positions, RMSNorm and layer scale.

Source: "ViT-5: Vision Transformers for the Mid-2020s", arXiv 2602.08071, and its repository wangf3014/ViT-5. Tokens are
a class token, the patches, then the registers. Patches have learned positions and rotary ones (base 10,000); registers
form a square with separate rotary positions (base 100); the class token is not rotated. Queries and keys are
normalised head by head (RMS) before they are rotated; q, k and v have no bias. Parameters have the repository's names.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import DropPath, Mlp, PatchEmbed, apply_rot_embed_cat, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Site, heads, merge
from regard.swapping.layer import Port

from .pyramids import Pyramid

EPS = 1e-6
PATCH_BASE, REGISTER_BASE = 10_000.0, 100.0


def axial_rope(
    rows: Float[Tensor, " h"], columns: Float[Tensor, " w"], width: int, base: float
) -> Float[Tensor, "n {2*width}"]:
    """Sines, then cosines, of h x w positions, rows first: half of the channels for the row, half for the column.

    Channels 2j and 2j + 1 of each half have the angle position * base^(-4j / width).
    """
    rates = base ** (-torch.arange(0, width // 2, 2, device=rows.device, dtype=rows.dtype) / (width // 2))
    vertical, horizontal = ((positions[:, None] * rates).repeat_interleave(2, -1) for positions in (rows, columns))
    angles = torch.cat(
        [vertical[:, None].expand(-1, len(columns), -1), horizontal[None].expand(len(rows), -1, -1)], -1
    ).flatten(0, 1)
    return torch.cat([angles.sin(), angles.cos()], -1)


class ViT5Port(Port):
    """The attention of ViT-5: a class token before the patch tokens, registers after them, rotary positions of both."""

    watch = "patch_embed.proj"
    rotary = True

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        registers = module.num_registers
        grid = Grid(grid.height, grid.width, grid.extra - registers, registers)
        return super().site(module, grid, name, layer)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        return self.mixer(x, self.grid(), None, rope)


class ViT5Attention(nn.Module):
    """Softmax attention of normalised and rotated queries and keys; children qkv, q_norm, k_norm, proj."""

    port = ViT5Port

    def __init__(self, dim: int, num_heads: int, num_registers: int) -> None:
        super().__init__()
        self.num_heads, self.num_registers = num_heads, num_registers
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm = nn.RMSNorm(dim // num_heads, eps=EPS)
        self.k_norm = nn.RMSNorm(dim // num_heads, eps=EPS)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Float[Tensor, "B N C"], rope: Float[Tensor, "N d2"]) -> Float[Tensor, "B N C"]:
        """rope: sines then cosines of every token."""
        q, k, v = (heads(y, self.num_heads) for y in self.qkv(x).chunk(3, -1))
        rope = rope.to(v.dtype)
        q, k = (apply_rot_embed_cat(norm(y).to(v.dtype), rope) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        return self.proj_drop(self.proj(merge(F.scaled_dot_product_attention(q, k, v))))


class ViT5Block(nn.Module):
    """x + gamma_1 * attention(norm(x)), then x + gamma_2 * MLP(norm(x))."""

    def __init__(
        self, dim: int, num_heads: int, num_registers: int, mlp_ratio: float, init_values: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=EPS)
        self.attn = ViT5Attention(dim, num_heads, num_registers)
        self.norm2 = nn.RMSNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)
        self.gamma_1 = nn.Parameter(init_values * torch.ones(dim))
        self.gamma_2 = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x: Float[Tensor, "B N C"], rope: Float[Tensor, "N d2"]) -> Float[Tensor, "B N C"]:
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), rope))
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


class ViT5(Pyramid):
    """Options as in `vit5_small`. Raises: ConfigError for sizes that do not fit."""

    def __init__(
        self, img_size: int | tuple[int, int], patch_size: int, in_chans: int, num_classes: int, embed_dim: int,
        depth: int, num_heads: int, mlp_ratio: float, num_registers: int, init_values: float, drop_path_rate: float,
        dynamic_img_size: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        _check(height, width, patch_size, embed_dim, num_heads, num_registers)
        self.num_classes, self.num_features = num_classes, embed_dim
        self.num_heads, self.num_registers = num_heads, num_registers
        self.patch_embed = PatchEmbed(
            (height, width), patch_size, in_chans, embed_dim, flatten=False, strict_img_size=not dynamic_img_size
        )
        self.train_grid = Grid(height // patch_size, width // patch_size, 1, num_registers)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, embed_dim)) if num_registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.train_grid.cells, embed_dim))
        self.blocks = nn.ModuleList(
            ViT5Block(embed_dim, num_heads, num_registers, mlp_ratio, init_values, drop_path_rate) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(embed_dim, eps=EPS)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        for index in range(depth):
            self.add_stage(embed_dim, patch_size, f"blocks.{index}")
        self._init_weights()

    def _init_weights(self) -> None:
        """Truncated normal tokens, positions and matrices (deviation 0.02), zero biases; patches as in PyTorch."""
        for token in (self.cls_token, self.reg_token, self.pos_embed):
            if token is not None:
                trunc_normal_(token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Positions, class token and registers."""
        return {"pos_embed", "cls_token", "reg_token"} & {name for name, _ in self.named_parameters()}

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last layer; 0 classes = none."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def rope(self, height: int, width: int, like: Tensor) -> Float[Tensor, "N d2"]:
        """Sines then cosines of every token, at least in float32, on the device of `like`.

        A grid of another size than the trained one is stretched over the same positions.
        """
        dtype, device = torch.promote_types(like.dtype, torch.float32), like.device
        head_width = self.num_features // self.num_heads

        def positions(number: int, span: int) -> Tensor:
            return torch.arange(number, device=device, dtype=dtype) * (span / number)

        zero = torch.zeros(1, head_width, device=device, dtype=dtype)
        parts = [
            torch.cat([zero, zero + 1], -1),
            axial_rope(
                positions(height, self.train_grid.height),
                positions(width, self.train_grid.width),
                head_width,
                PATCH_BASE,
            ),
        ]
        if self.num_registers:
            side = round(self.num_registers**0.5)
            parts.append(axial_rope(positions(side, side), positions(side, side), head_width, REGISTER_BASE))
        return torch.cat(parts)

    def tokens(self, x: Float[Tensor, "B c H W"]) -> tuple[Float[Tensor, "B N C"], Grid]:
        """Class token, patches with their positions, registers; and the grid."""
        x = self.patch_embed(x)
        grid = Grid(x.shape[-2], x.shape[-1], 1, self.num_registers)
        positions = self.pos_embed
        if (grid.height, grid.width) != (self.train_grid.height, self.train_grid.width):
            sizes = ([side.height, side.width] for side in (grid, self.train_grid))
            positions = resample_abs_pos_embed(positions, *sizes, num_prefix_tokens=0)
        parts = [self.cls_token.expand(x.shape[0], -1, -1), x.flatten(2).mT + positions]
        if self.reg_token is not None:
            parts.append(self.reg_token.expand(x.shape[0], -1, -1))
        return torch.cat(parts, 1), grid

    def maps(self, x: Float[Tensor, "B c H W"]) -> list[Float[Tensor, "B C h w"]]:
        tokens, grid = self.tokens(x)
        rope, maps = self.rope(grid.height, grid.width, tokens), []
        for block in self.blocks:
            tokens = block(tokens, rope)
            maps.append(grid.to_map(tokens)[1])
        return maps

    def forward_features(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """All tokens after the last norm."""
        tokens, grid = self.tokens(x)
        rope = self.rope(grid.height, grid.width, tokens)
        for block in self.blocks:
            tokens = block(tokens, rope)
        return self.norm(tokens)

    def forward_head(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B K"]:
        """Class scores from the class token."""
        return self.head(x[:, 0])

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B K"]:
        return self.forward_head(self.forward_features(x))


def _check(height: int, width: int, patch: int, dim: int, num_heads: int, registers: int) -> None:
    if min(patch, num_heads) < 1 or height % patch or width % patch:
        raise ConfigError(f"ViT-5: an image of {height}x{width} cannot be cut into patches of {patch}x{patch}")
    if dim % num_heads or (dim // num_heads) % 4:
        raise ConfigError(f"ViT-5: embed_dim {dim} in {num_heads} heads; rotary heads need a multiple of 4 channels")
    if registers < 0 or round(registers**0.5) ** 2 != registers:
        raise ConfigError(f"ViT-5: registers form a square: num_registers is 0, 1, 4, 9, ..., not {registers}")


def vit5_small(
    *, img_size: int | tuple[int, int] = 224, patch_size: int = 16, in_chans: int = 3, num_classes: int = 1000,
    embed_dim: int = 384, depth: int = 12, num_heads: int = 6, mlp_ratio: float = 4.0, num_registers: int = 4,
    init_values: float = 1e-4, drop_path_rate: float = 0.0, dynamic_img_size: bool = False,
) -> ViT5:  # fmt: skip
    """ViT-5-S: 22,039,144 parameters with 1000 classes, 201 tokens at 224 pixels.

    num_registers: a square number. init_values: of the layer scale. drop_path_rate: the same in every block.
    dynamic_img_size: whether images may have other sizes; positions are then resampled.
    Raises: ConfigError if patches do not fill the image or heads do not fit.
    """
    return ViT5(
        img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads, mlp_ratio, num_registers,
        init_values, drop_path_rate, dynamic_img_size,
    )  # fmt: skip


def vit5_base(
    *, img_size: int | tuple[int, int] = 224, in_chans: int = 3, num_classes: int = 1000, drop_path_rate: float = 0.0,
    dynamic_img_size: bool = False,
) -> ViT5:  # fmt: skip
    """ViT-5-B: 86,543,080 parameters with 1000 classes. Options as in `vit5_small`."""
    return ViT5(img_size, 16, in_chans, num_classes, 768, 12, 12, 4.0, 4, 1e-4, drop_path_rate, dynamic_img_size)


def vit5_large(
    *, img_size: int | tuple[int, int] = 224, in_chans: int = 3, num_classes: int = 1000, drop_path_rate: float = 0.0,
    dynamic_img_size: bool = False,
) -> ViT5:  # fmt: skip
    """ViT-5-L: 304,258,024 parameters with 1000 classes. Options as in `vit5_small`."""
    return ViT5(img_size, 16, in_chans, num_classes, 1024, 24, 16, 4.0, 4, 1e-4, drop_path_rate, dynamic_img_size)


def vit5_xlarge(
    *, img_size: int | tuple[int, int] = 224, in_chans: int = 3, num_classes: int = 1000, drop_path_rate: float = 0.0,
    dynamic_img_size: bool = False,
) -> ViT5:  # fmt: skip
    """ViT-5-XL: 448,505,128 parameters with 1000 classes. Options as in `vit5_small`."""
    return ViT5(img_size, 16, in_chans, num_classes, 1152, 28, 16, 4.0, 4, 1e-4, drop_path_rate, dynamic_img_size)
