"""The small ViTs of the SKA paper: vit_s_32, and vit_s_32_spt with shifted patch tokens and locality self-attention.

Image 32, patch 4, width 512, depth 6, 8 heads, MLP 512 (SKA paper, Table 1; SPT and LSA: Lee et al. 2021).
"""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from regard.core import Mask, Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.layer import Port, library_mask

SHIFTS = ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))


def vit_s_32(
    *, img_size: int | tuple[int, int] = 32, in_chans: int = 3, num_classes: int = 10, drop: float = 0.1
) -> VisionTransformer:
    """The plain ViT: 9,523,722 parameters with 10 classes. drop: dropout of embeddings, projections and MLPs."""
    return _vit(img_size, in_chans, num_classes, drop)


def vit_s_32_spt(
    *, img_size: int | tuple[int, int] = 32, in_chans: int = 3, num_classes: int = 10, drop: float = 0.1,
    keep_lsa: bool = False,
) -> VisionTransformer:  # fmt: skip
    """The paper's ViT-S: 9,622,512 parameters with 10 classes.

    keep_lsa: whether a mechanism that is swapped in keeps the temperature and the mask of the diagonal, as in the
    SKA paper's code.
    """
    attention = KeepLocalityAttention if keep_lsa else LocalityAttention
    model = _vit(img_size, in_chans, num_classes, drop)
    model.patch_embed.proj = ShiftedPatches(in_chans, 4, 512)
    for block in model.blocks:
        block.attn = attention(512, 8, proj_drop=drop)
    return model


def _vit(img_size: int | tuple[int, int], in_chans: int, num_classes: int, drop: float) -> VisionTransformer:
    return VisionTransformer(
        img_size=img_size, patch_size=4, in_chans=in_chans, num_classes=num_classes, embed_dim=512, depth=6,
        num_heads=8, mlp_ratio=1.0, qkv_bias=False, pos_drop_rate=drop, proj_drop_rate=drop, embed_layer=PatchEmbed,
        norm_layer=partial(nn.LayerNorm, eps=1e-5),
    )  # fmt: skip


class ShiftedPatches(nn.Module):
    """The image and its four one-pixel shifts, cut into patches: LayerNorm and Linear of 5 channels patch^2 values."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.in_chans, self.patch = channels, patch
        values = 5 * channels * patch**2
        self.norm = nn.LayerNorm(values)
        self.linear = nn.Linear(values, dim)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B C h w"]:
        x = torch.cat([x, *(F.pad(x, shift) for shift in SHIFTS)], 1)
        x = F.pixel_unshuffle(x, self.patch).movedim(1, -1)
        return self.linear(self.norm(x)).movedim(-1, 1)


class LocalityViT(Port):
    """The locality self-attention of vit_s_32_spt; a swap removes its temperature and diagonal mask."""

    watch = "patch_embed.proj"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, is_causal, x))


class KeepLocality(LocalityViT):
    """vit_s_32_spt(keep_lsa=True): a swap keeps the temperature in place of d^-0.5, and the mask of the diagonal."""

    mask_kinds = frozenset({"bias"})
    parameter_names = {"temperature": "q_norm.temperature"}

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer) and "q" in mixer.config.roles:
            mixer.q_norm = Temperature(site.width)
        return mixer

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        diagonal = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        bias = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).masked_fill(diagonal, -torch.inf)
        return self.mixer(x, self.grid(), Mask(bias=bias))


class Temperature(nn.Module):
    """q exp(t) sqrt(d): after a mechanism's factor d^-0.5, the logits are scaled by exp(t). temperature (): t."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.temperature = nn.Parameter(torch.tensor(float(width) ** -0.5).log())

    def forward(self, q: Tensor) -> Tensor:
        return q * (self.temperature.exp() * self.width**0.5)


class LocalityAttention(nn.Module):
    """Softmax attention with a learned temperature, in which a token does not attend to itself.

    temperature (): logarithm of the logits' factor, started from d^-0.5.
    """

    port: ClassVar[type[Port]] = LocalityViT

    def __init__(self, dim: int, num_heads: int, proj_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.temperature = nn.Parameter(torch.tensor(float(self.head_dim) ** -0.5).log())
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: Float[Tensor, "B N C"], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "B N C"]:
        """timm's blocks pass attn_mask and is_causal, which must be None and False."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        diagonal = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        logits = (q @ k.mT * self.temperature.exp()).masked_fill(diagonal, -torch.inf)
        return self.proj_drop(self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2)))


class KeepLocalityAttention(LocalityAttention):
    """`LocalityAttention` of which a swap keeps the temperature and the mask of the diagonal."""

    port = KeepLocality
