"""cait_s_32: the small CaiT of the SKA paper, on timm's Cait.

Image 32, patch 4, width 512, 6 patch layers and 2 class layers, 8 heads, MLP 512, layer scale from 0.1, talking heads
without bias in all layers (static keys paper, Table 1; CaiT: Touvron et al. 2021).
"""

from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from timm.models.cait import Cait
from torch import Tensor, nn

from regard.core import heads, merge
from regard.swapping.layer import Port
from regard.swapping.ports.timm.cait import TimmCaiT
from regard.swapping.talking_heads import mix_heads


class CaiTWithoutTalkingHeads(Port):
    """cait_s_32(keep_talking=False): the talking heads are removed together with the softmax between them."""

    watch = "patch_embed.proj"


class TalkingAttention(nn.Module):
    """Softmax attention with talking heads: logits, and then weights, are mixed over the heads. A swap keeps both maps.

    Children: qkv (no bias), proj_l before the softmax, proj_w after it, proj.
    """

    port: ClassVar[type[Port]] = TimmCaiT

    def __init__(self, dim: int, num_heads: int, head_dim: int, proj_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim, bias=False)
        self.proj_l = nn.Linear(num_heads, num_heads, bias=False)
        self.proj_w = nn.Linear(num_heads, num_heads, bias=False)
        self.proj = nn.Linear(num_heads * head_dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B n C"]:
        q, k, v = (heads(y, self.num_heads) for y in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output (B, n, C) for queries (B, H, n, d), keys and values."""
        a = mix_heads(self.proj_l, q @ k.mT * self.scale).softmax(-1)
        return self.proj_drop(self.proj(merge(mix_heads(self.proj_w, a) @ v)))


class ReplaceableTalkingAttention(TalkingAttention):
    """`TalkingAttention` whose talking heads a swap removes."""

    port = CaiTWithoutTalkingHeads


class ClassAttention(TalkingAttention):
    """The class token attends to itself and the patch tokens, with talking heads. A swap does not change it."""

    def forward(self, x: Float[Tensor, "B N C"]) -> Float[Tensor, "B n C"]:
        inner = self.proj.in_features
        q = torch.nn.functional.linear(x[:, :1], self.qkv.weight[:inner])
        k, v = torch.nn.functional.linear(x, self.qkv.weight[inner:]).chunk(2, -1)
        return self.attend(*(heads(y, self.num_heads) for y in (q, k, v)))


def cait_s_32(
    *, img_size: int | tuple[int, int] = 32, in_chans: int = 3, num_classes: int = 10, heads: int = 8, width: int = 64,
    drop: float = 0.1, drop_path_rate: float = 0.05, keep_talking: bool = True,
) -> Cait:  # fmt: skip
    """12,685,322 parameters with 10 classes. heads, width: of all layers (SKA's model "b" has 10 and 62).

    drop: dropout of embeddings, projections and MLPs. keep_talking: whether a mechanism that is swapped in keeps the
    talking heads of the patch layers; only those with a map over all keys can.
    """

    def attention(kind: type[TalkingAttention], dim: int, **timm_options: object) -> TalkingAttention:
        return kind(dim, heads, width, drop)

    kind = TalkingAttention if keep_talking else ReplaceableTalkingAttention
    return Cait(
        img_size=img_size,  # type: ignore[arg-type]  # timm takes pairs too
        patch_size=4, in_chans=in_chans, num_classes=num_classes, embed_dim=512, depth=6, num_heads=heads,
        mlp_ratio=1.0, mlp_ratio_token_only=1.0, qkv_bias=False, pos_drop_rate=drop, proj_drop_rate=drop,
        drop_path_rate=drop_path_rate, init_values=0.1,
        norm_layer=partial(nn.LayerNorm, eps=1e-5),  # type: ignore[arg-type]  # timm takes factories
        attn_block=partial(attention, kind),  # type: ignore[arg-type]
        attn_block_token_only=partial(attention, ClassAttention),  # type: ignore[arg-type]
    )  # fmt: skip
