"""Port of timm's CAFormer."""

from typing import ClassVar

from timm.models.metaformer import Attention as MetaFormerAttention
from torch import Tensor

from regard.swapping.layer import Port


class TimmMetaFormer(Port):
    """The attention of CAFormer; each stage has its own grid."""

    replaces: ClassVar[tuple[type, ...]] = (MetaFormerAttention,)
    watch: ClassVar[str] = "downsample"

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


PORTS: tuple[type[Port], ...] = (TimmMetaFormer,)
