"""Port of timm's XCiT."""

from typing import ClassVar

from timm.models.xcit import XCA as XCiTAttention
from torch import Tensor

from regard.swapping.layer import Port


class TimmXCiT(Port):
    """The cross-covariance blocks of XCiT; its two class-attention blocks are left unchanged."""

    replaces: ClassVar[tuple[type, ...]] = (XCiTAttention,)
    watch: ClassVar[str] = "patch_embed.proj"
    parameter_names: ClassVar[dict[str, str]] = {"temperature": "operator.temperature"}

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())
