"""Ports: how the attention of each library is read and replaced."""

from regard.models.attended_block import Attended
from regard.models.vit5 import ViT5Port
from regard.swapping.layer import Hosted

from .hugging_face import CLIPPort, HuggingDINOv3, HuggingSegformer, HuggingViT
from .timm.biased import TimmBeit, TimmSwin, WindowKeySwin
from .timm.cait import CvTPort, KeptLocality, LocalityViT, LooseTalking, Talking
from .timm.vit import TimmMetaFormer, TimmPVT, TimmRope, TimmViT, TimmXCiT, TorchvisionViT

PORTS: tuple[type[Hosted], ...] = (
    TimmViT,
    TimmRope,
    TimmXCiT,
    TimmMetaFormer,
    TimmPVT,
    TimmSwin,
    TimmBeit,
    Talking,
    LooseTalking,
    LocalityViT,
    KeptLocality,
    WindowKeySwin,
    CvTPort,
    TorchvisionViT,
    HuggingViT,
    HuggingDINOv3,
    HuggingSegformer,
    CLIPPort,
    Attended,
    ViT5Port,
)
