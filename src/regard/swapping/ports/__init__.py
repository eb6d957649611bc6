"""The ports for attention classes of timm, torchvision and transformers; Regard's own models name theirs themselves."""

from regard.swapping.layer import Port

from .hugging_face import HuggingCLIP, HuggingDINOv3, HuggingSegformer, HuggingViT
from .timm.biased import TimmBeit, TimmRelPos, TimmSwin, TimmSwinV2, TimmSwinV2Cr
from .timm.cait import TimmCaiT
from .timm.inside import (
    TimmConvAttention,
    TimmEfficientFormerV2,
    TimmEfficientFormerV2Downsample,
    TimmGCViT,
    TimmSAM,
    TimmTNT,
)
from .timm.maps import TimmCoAtNet, TimmFastViT, TimmMaxViT
from .timm.metaformer import TimmMetaFormer
from .timm.pooled import TimmHiera, TimmHieraDetPooled, TimmHieraPooled, TimmMultiQuery, TimmMViT, TimmNextViT
from .timm.pvt import TimmPVT, TimmTwins
from .timm.vit import TimmRope, TimmRopeHalves, TimmViT
from .timm.wide import TimmEfficientFormer, TimmLeViT, TimmLeViTDownsample, TimmTinyViT
from .timm.windows import TimmDaViT, TimmNesT, TimmTwinsLocal
from .timm.xcit import TimmXCiT
from .torchvision import TorchvisionViT

PORTS: tuple[type[Port], ...] = (
    TimmViT,
    TimmRope,
    TimmRopeHalves,
    TimmXCiT,
    TimmMetaFormer,
    TimmPVT,
    TimmTwins,
    TimmTwinsLocal,
    TimmSwin,
    TimmBeit,
    TimmCaiT,
    TimmRelPos,
    TimmSwinV2,
    TimmSwinV2Cr,
    TimmMaxViT,
    TimmCoAtNet,
    TimmFastViT,
    TimmLeViT,
    TimmLeViTDownsample,
    TimmEfficientFormer,
    TimmTinyViT,
    TimmDaViT,
    TimmNesT,
    TimmHiera,
    TimmHieraPooled,
    TimmHieraDetPooled,
    TimmMViT,
    TimmNextViT,
    TimmMultiQuery,
    TimmConvAttention,
    TimmGCViT,
    TimmSAM,
    TimmEfficientFormerV2,
    TimmEfficientFormerV2Downsample,
    TimmTNT,
    TorchvisionViT,
    HuggingViT,
    HuggingDINOv3,
    HuggingSegformer,
    HuggingCLIP,
)
