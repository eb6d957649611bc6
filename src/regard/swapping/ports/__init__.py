"""The ports for attention classes of libraries; Regard's own models name theirs themselves."""

from regard.swapping.layer import Port

from .diffusers import DiffusersAttention
from .hugging_face import (
    HuggingBeit,
    HuggingCLIP,
    HuggingData2Vec,
    HuggingDETR,
    HuggingDINOv3,
    HuggingDPT,
    HuggingHiera,
    HuggingInternVL,
    HuggingLWDETR,
    HuggingMaskFormerSwin,
    HuggingMobileViT,
    HuggingMobileViTV2,
    HuggingPVT,
    HuggingPVT1,
    HuggingRFDETR,
    HuggingRTDETR,
    HuggingSAM,
    HuggingSAM2,
    HuggingSAM3,
    HuggingSegformer,
    HuggingSwin,
    HuggingSwinV2,
    HuggingTableTransformer,
    HuggingVideo,
    HuggingViT,
    HuggingViTDet,
    HuggingYOLOS,
)
from .open_clip import OpenCLIPAttention
from .timm.cait import TimmCaiT
from .timm.cascade import TimmCascade
from .timm.combined import TimmConViT, TimmDifferential
from .timm.gemma import TimmGemma
from .timm.halo import TimmBottleneck, TimmHalo
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
from .timm.mobilevit import TimmMobileViT, TimmSeparable
from .timm.pooled import TimmHiera, TimmHieraDetPooled, TimmHieraPooled, TimmMultiQuery, TimmMViT, TimmNextViT
from .timm.pvt import TimmPVT, TimmTwins
from .timm.reinitialised import TimmChannel, TimmCoaT, TimmOutlook, TimmSwiftFormer
from .timm.relative_position_bias import TimmBeit, TimmRelPos, TimmSwin, TimmSwinV2, TimmSwinV2Cr
from .timm.vit import TimmRope, TimmRopeHalves, TimmViT
from .timm.wide import TimmEfficientFormer, TimmLeViT, TimmLeViTDownsample, TimmTinyViT
from .timm.windows import TimmDaViT, TimmNesT, TimmTwinsLocal
from .timm.xcit import TimmXCiT
from .torch_attention import TorchAttention
from .torchvision import TorchvisionMaxViT, TorchvisionSwin, TorchvisionSwinV2

PORTS: tuple[type[Port], ...] = (
    TimmMobileViT,
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
    TimmConViT,
    TimmDifferential,
    TimmBottleneck,
    TimmHalo,
    TimmCascade,
    TimmGemma,
    TimmSeparable,
    TimmOutlook,
    TimmChannel,
    TimmCoaT,
    TimmSwiftFormer,
    TorchAttention,
    TorchvisionSwin,
    TorchvisionSwinV2,
    TorchvisionMaxViT,
    OpenCLIPAttention,
    DiffusersAttention,
    HuggingViT,
    HuggingDINOv3,
    HuggingSegformer,
    HuggingCLIP,
    HuggingBeit,
    HuggingDPT,
    HuggingInternVL,
    HuggingYOLOS,
    HuggingData2Vec,
    HuggingPVT,
    HuggingPVT1,
    HuggingSwin,
    HuggingSwinV2,
    HuggingMaskFormerSwin,
    HuggingMobileViT,
    HuggingMobileViTV2,
    HuggingDETR,
    HuggingTableTransformer,
    HuggingRTDETR,
    HuggingLWDETR,
    HuggingRFDETR,
    HuggingHiera,
    HuggingSAM,
    HuggingSAM2,
    HuggingSAM3,
    HuggingViTDet,
    HuggingVideo,
)
