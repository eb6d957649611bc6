"""CvT at the SKA paper's sizes: cvt_13 as published by its authors, and cvt_13_32, a plainer variant for small images.

Stages of 64/192/384 channels, 1/2/10 layers, 1/3/6 heads. A stage begins with a convolution; queries, keys and values
come from a depth-wise 3x3 convolution with batch normalisation and a linear layer, keys and values on a coarser grid
(Wu et al. 2021). At 32 pixels the last stage has 2x2 patch tokens, and keys for one of them and the class token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath, Mlp, QuickGELU, calculate_drop_path_rates
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mixer, MixerConfig, Site, UnsupportedError, heads, merge
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.swapping.layer import Port
from regard.swapping.separate_qkv import SeparateProjection, roles_with_bias

from .pyramids import Pyramid, init_linear


class CvTPort(Port):
    """CvT's attention: its convolutions and the grid of its keys are kept.

    A mechanism's `scale` is the factor of its logits; where it is None or missing, the host's replaces d^-0.5.
    """

    watch = "embed.proj"
    parameter_names = {"proj_q": "qkv.q", "proj_k": "qkv.k", "proj_v": "qkv.v"}

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(
            dim=module.proj.out_features, heads=module.num_heads, grid=grid, qkv_bias=module.proj_q.bias is not None,
            layer=layer, memory=grid.every(module.kv_stride) if module.kv_stride > 1 else None, name=name,
        )  # fmt: skip

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        if not isinstance(config, HeadMixerConfig):
            return super().build_mixer(config, site, shared)
        if site.memory is not None and not config.cross:
            raise UnsupportedError(
                f"{type(config).__name__} needs keys on the grid of the queries; make the host with kv_stride=1"
            )
        if site.memory is not None and config.dwc:
            raise ConfigError("dwc needs values on the grid of the queries: build the host with kv_stride=1")
        mixer = super().build_mixer(config, site, shared)
        if type(mixer) is not HeadMixer:
            raise UnsupportedError(
                f"{type(config).__name__} has a layer of its own around its operator ({type(mixer).__name__}: a "
                "branch, gate or norm), but CvT needs the plain one; use options without it, or another host"
            )
        return ConvMixer(config, mixer.site, shared, self.host)  # the mixer's site: a mechanism may change the heads

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        return self.mixer(x, Grid(height, width, self.prefix))


class ConvMixer(HeadMixer):
    """The layer around an operator in CvT: depth-wise convolutions before the projection, keys on a coarser grid."""

    def __init__(self, config: HeadMixerConfig, site: Site, shared: nn.Module | None, host: Any) -> None:
        super().__init__(config, site, shared)
        roles = config.roles
        if isinstance(self.qkv, nn.Linear):
            biases = roles_with_bias(q=host.proj_q, k=host.proj_k, v=host.proj_v)
            self.qkv = SeparateProjection(site, roles, biases)
        self.stride = host.kv_stride
        has_scale = getattr(config, "scale", None) is not None
        self.factor = 1.0 if has_scale else host.scale * site.width**0.5
        for name, _ in host.named_children():
            if name.startswith("conv_") and set(name[5:]) & set(roles):
                self.add_module(name, DepthwiseProjection(site.dim, 1 if name == "conv_q" else host.kv_stride))

    def memory_grid(self, grid: Grid) -> Grid | None:
        return grid.every(self.stride) if self.stride > 1 else None

    def project_heads(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        projected: dict[str, Tensor | None] = dict.fromkeys("qkv")
        for role in self.config.roles:
            projected[role] = self.normalise_and_rotate(
                role, self.project(convolve(self, role, x, grid), role)[0], grid, rope
            )
        if projected["q"] is not None and self.factor != 1.0:
            projected["q"] = projected["q"] * self.factor
        return projected


class DepthwiseProjection(nn.Module):
    """A depth-wise 3x3 convolution (no bias) and batch normalisation of the patch tokens; not of a class token."""

    def __init__(self, dim: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, x: Float[Tensor, "B N C"], grid: Grid) -> Float[Tensor, "B M C"]:
        class_token, patches = grid.to_map(x)
        patches = self.bn(self.conv(patches)).flatten(2).mT
        return torch.cat([class_token, patches], 1) if grid.extra else patches


class ConvAttention(nn.Module):
    """Attention with keys and values on a grid that is kv_stride times coarser.

    shared: one convolution for keys and values. scale: factor of the logits.
    """

    port = CvTPort

    def __init__(self, dim: int, num_heads: int, kv_stride: int, bias: bool, shared: bool, scale: float) -> None:
        super().__init__()
        self.num_heads, self.kv_stride, self.scale = num_heads, kv_stride, scale
        self.conv_q = DepthwiseProjection(dim, 1)
        for name in ("conv_kv",) if shared else ("conv_k", "conv_v"):
            self.add_module(name, DepthwiseProjection(dim, kv_stride))
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(dim, dim, bias=bias) for _ in "qkv")
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "B N C"], height: int, width: int) -> Float[Tensor, "B N C"]:
        grid = Grid(height, width, x.shape[1] - height * width)
        q, k, v = (heads(self.get_submodule(f"proj_{r}")(convolve(self, r, x, grid)), self.num_heads) for r in "qkv")
        return self.proj(merge((q @ k.mT * self.scale).softmax(-1) @ v))


def convolve(attention: nn.Module, role: str, x: Tensor, grid: Grid) -> Tensor:
    """The input of a role's linear layer: tokens after the role's convolution."""
    shared = role in "kv" and getattr(attention, "conv_kv", None) is not None
    return attention.get_submodule("conv_kv" if shared else f"conv_{role}")(x, grid)


class CvTBlock(nn.Module):
    """x + attention(norm x), x + MLP(norm x)."""

    def __init__(self, dim: int, attention: nn.Module, act: type[nn.Module], drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), attention, nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim, act_layer=act, drop=drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Float[Tensor, "B N C"], height: int, width: int) -> Float[Tensor, "B N C"]:
        x = x + self.drop_path(self.attn(self.norm1(x), height, width))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ConvEmbed(nn.Module):
    """A convolution and a LayerNorm over channels."""

    def __init__(self, in_chans: int, dim: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B C h w"]:
        return self.norm(self.proj(x).movedim(1, -1)).movedim(-1, 1)


class CvTStage(nn.Module):
    """Convolutional embedding, then blocks on its tokens; the last stage of cvt_13 has a class token before them."""

    def __init__(self, embed: ConvEmbed, blocks: Sequence[CvTBlock], class_token: int) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(blocks)
        self.cls_token = nn.Parameter(torch.empty(1, 1, class_token)) if class_token else None
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Float[Tensor, "B c H W"]) -> tuple[Float[Tensor, "B C h w"], Float[Tensor, "B P C"]]:
        """The map, and the class token (P = 1) or no token (P = 0)."""
        x = self.embed(x)
        grid = Grid(x.shape[-2], x.shape[-1], int(self.cls_token is not None))
        tokens = x.flatten(2).mT
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1)
        for block in self.blocks:
            tokens = block(tokens, grid.height, grid.width)
        class_token, patches = grid.to_map(tokens)
        return patches, class_token


class CvT(Pyramid):
    """Three stages. plain: the variant cvt_13_32, with mean pooling; no class token, last norm or bias of q, k, v."""

    def __init__(
        self, img_size: int | tuple[int, int], in_chans: int, num_classes: int, dims: Sequence[int], kv_stride: int,
        plain: bool, drop: float, drop_path_rate: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.num_classes, self.num_features = num_classes, dims[-1]
        depths, head_counts = (1, 2, 10), (1, 3, 6)
        fits = len(dims) == len(head_counts) and not any(dim % n for dim, n in zip(dims, head_counts, strict=True))
        if not fits or kv_stride < 1:
            raise ConfigError(f"CvT-13 has dims of multiples of 1, 3, 6 and a kv_stride >= 1, not {dims}, {kv_stride}")
        rates: Any = calculate_drop_path_rates(drop_path_rate, depths[-1])
        stages, previous, reduction = [], in_chans, 1
        for index, (dim, depth, num_heads) in enumerate(zip(dims, depths, head_counts, strict=True)):
            first = index == 0
            kernel, stride, padding = (7, 4, 3 if plain else 2) if first else (3, 2, 1)
            embed = ConvEmbed(previous, dim, kernel, stride, padding)
            scale = (dim // num_heads if plain else dim) ** -0.5
            blocks = [
                CvTBlock(
                    dim, ConvAttention(dim, num_heads, kv_stride, bias=not plain, shared=plain, scale=scale),
                    nn.GELU if plain else QuickGELU, drop, rates[block] if index == 2 else 0.0,
                )
                for block in range(depth)
            ]  # fmt: skip
            stages.append(CvTStage(embed, blocks, dim if index == 2 and not plain else 0))
            reduction, previous = reduction * (4 if first else 2), dim
            self.add_stage(dim, reduction, f"stages.{index}")
        self.stages = nn.ModuleList(stages)
        self.norm = nn.Identity() if plain else nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], num_classes) if num_classes else nn.Identity()
        init_linear(self)

    def no_weight_decay(self) -> set[str]:
        """The class token."""
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def maps(self, x: Float[Tensor, "B c H W"]) -> list[Float[Tensor, "B C h w"]]:
        maps = []
        for stage in self.stages:
            x, _ = stage(x)
            maps.append(x)
        return maps

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B K"]:
        class_token = x
        for stage in self.stages:
            x, class_token = stage(x)
        token = class_token[:, 0] if class_token.shape[1] else x.mean((2, 3))
        return self.head(self.norm(token))


def cvt_13(
    *, img_size: int | tuple[int, int] = 32, in_chans: int = 3, num_classes: int = 10,
    dims: Sequence[int] = (64, 192, 384), kv_stride: int = 2, drop: float = 0.0, drop_path_rate: float = 0.1,
) -> CvT:  # fmt: skip
    """The SKA paper's host: 19,616,330 parameters with 10 classes; logits are scaled by channels^-0.5, as published.

    dims: channels of the stages (SKA's model "b" has 64, 198, 402). kv_stride: of keys and values; 1 gives them the
    grid of the queries. drop_path_rate: of the last block, up to which it rises from 0 in the last stage.
    Raises: ConfigError if dims do not fit 1, 3 and 6 heads.
    """
    return CvT(img_size, in_chans, num_classes, dims, kv_stride, False, drop, drop_path_rate)


def cvt_13_32(
    *, img_size: int | tuple[int, int] = 32, in_chans: int = 3, num_classes: int = 10,
    dims: Sequence[int] = (64, 192, 384), kv_stride: int = 2, drop: float = 0.0, drop_path_rate: float = 0.0,
) -> CvT:  # fmt: skip
    """The plainer variant: 19,555,146 parameters with 10 classes. One convolution for keys and values, mean pooling.

    dims, kv_stride: as in `cvt_13`. Raises: ConfigError if dims do not fit 1, 3 and 6 heads.
    """
    return CvT(img_size, in_chans, num_classes, dims, kv_stride, True, drop, drop_path_rate)
