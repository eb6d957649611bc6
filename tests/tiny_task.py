"""A small classification task in a plain timm network, for tests of the loop."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.core import MixerConfig
from regard.lab.tasks import Classification


@dataclass(frozen=True, kw_only=True)
class Tiny(Classification):
    """digits in a ViT of width 16 and depth 1."""

    host: str = "tiny"
    data: str = "digits"
    size: tuple[int, int] = (8, 8)
    limit: int = 128
    dropout: float = 0.1
    colours: int = 1

    def network(self, mixer: MixerConfig | None, removed: bool, record: Any = None) -> nn.Module:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(
            img_size=8,
            patch_size=2,
            in_chans=self.colours,
            num_classes=self.outputs,
            embed_dim=16,
            depth=1,
            num_heads=2,
            proj_drop_rate=self.dropout,
            class_token=False,
            global_pool="avg",
        )
