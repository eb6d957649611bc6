"""The ports for attention classes of timm, torchvision and transformers; Regard's own models name theirs themselves."""

from regard.swapping.layer import Port

from .hugging_face import HuggingCLIP, HuggingDINOv3, HuggingSegformer, HuggingViT
from .timm.biased import TimmBeit, TimmSwin
from .timm.cait import TimmCaiT
from .timm.metaformer import TimmMetaFormer
from .timm.pvt import TimmPVT
from .timm.vit import TimmRope, TimmViT
from .timm.xcit import TimmXCiT
from .torchvision import TorchvisionViT

PORTS: tuple[type[Port], ...] = (
    TimmViT,
    TimmRope,
    TimmXCiT,
    TimmMetaFormer,
    TimmPVT,
    TimmSwin,
    TimmBeit,
    TimmCaiT,
    TorchvisionViT,
    HuggingViT,
    HuggingDINOv3,
    HuggingSegformer,
    HuggingCLIP,
)
