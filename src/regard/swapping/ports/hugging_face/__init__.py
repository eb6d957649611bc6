"""Ports of Hugging Face's vision models (transformers >= 5.9), one file per kind of attention."""

from .base import HuggingPort as HuggingPort
from .base import config_of as config_of
from .base import mark_configuration as mark_configuration
from .detr import HuggingDETR as HuggingDETR
from .detr import HuggingRTDETR as HuggingRTDETR
from .hiera import HuggingHiera as HuggingHiera
from .maps import HuggingSAM as HuggingSAM
from .maps import HuggingSAM2 as HuggingSAM2
from .maps import HuggingViTDet as HuggingViTDet
from .reduced import HuggingPVT as HuggingPVT
from .reduced import HuggingSegformer as HuggingSegformer
from .rf_detr import HuggingRFDETR as HuggingRFDETR
from .video import HuggingVideo as HuggingVideo
from .vit import HuggingBeit as HuggingBeit
from .vit import HuggingCLIP as HuggingCLIP
from .vit import HuggingDINOv3 as HuggingDINOv3
from .vit import HuggingDPT as HuggingDPT
from .vit import HuggingViT as HuggingViT
from .vit import HuggingYOLOS as HuggingYOLOS
from .windows import HuggingData2Vec as HuggingData2Vec
from .windows import HuggingMaskFormerSwin as HuggingMaskFormerSwin
from .windows import HuggingSwin as HuggingSwin
from .windows import HuggingSwinV2 as HuggingSwinV2
