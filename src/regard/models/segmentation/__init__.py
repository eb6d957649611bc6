"""Networks for semantic segmentation: an encoder with any mechanism, and the heads of the papers."""

from .conv_head import ConvHead
from .heads import CBT, Depict, LinearHead, MaskTransformer
from .segmenter import HEADS, VOID, Segmenter, make_segmenter

__all__ = ["CBT", "HEADS", "VOID", "ConvHead", "Depict", "LinearHead", "MaskTransformer", "Segmenter", "make_segmenter"]
