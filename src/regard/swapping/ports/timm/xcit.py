"""Port of timm's cross-covariance attention: XCiT and EdgeNeXt."""

from typing import ClassVar

from timm.models.edgenext import CrossCovarianceAttn
from timm.models.xcit import XCA as XCiTAttention
from torch import Tensor

from regard.swapping.layer import Port


class TimmXCiT(Port):
    """The cross-covariance blocks of XCiT and EdgeNeXt; XCiT's two class-attention blocks are left unchanged."""

    replaces: ClassVar[tuple[type, ...]] = (XCiTAttention, CrossCovarianceAttn)
    watch: ClassVar[str] = "patch_embed.proj|convs.0"
    parameter_names: ClassVar[dict[str, str]] = {"temperature": "operator.temperature"}

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


PORTS: tuple[type[Port], ...] = (TimmXCiT,)
