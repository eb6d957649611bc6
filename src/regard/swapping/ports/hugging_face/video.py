"""Video models of transformers, which are refused with the reason."""

from typing import Any

from regard.swapping.layer import Port

from .base import HuggingPort


class HuggingVideo(HuggingPort):
    """VideoMAE, ViViT, TimeSformer and V-JEPA 2 are refused: their tokens lie in time, too."""

    class_paths = frozenset({
        "videomae.modeling_videomae.VideoMAEAttention", "vivit.modeling_vivit.VivitAttention",
        "timesformer.modeling_timesformer.TimeSformerAttention", "vjepa2.modeling_vjepa2.VJEPA2RopeAttention",
    })  # fmt: skip

    @classmethod
    def refusal(cls, module: Any) -> str:
        return "its tokens lie in height, width and time, and a Grid has no time"


PORTS: tuple[type[Port], ...] = (HuggingVideo,)
