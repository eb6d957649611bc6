"""Networks for semantic segmentation: an encoder with any mechanism, and the heads of the papers."""

from .cells import CellScores, make_cell_scores
from .conv_head import ConvHead
from .heads import CBT, Depict, LinearHead, MaskTransformer
from .segmenter import HEADS, VOID, Segmenter, make_segmenter, pixel_loss

__all__ = [
    "CBT", "HEADS", "VOID", "CellScores", "ConvHead", "Depict", "LinearHead", "MaskTransformer", "Segmenter",
    "make_cell_scores", "make_segmenter", "pixel_loss",
]  # fmt: skip
