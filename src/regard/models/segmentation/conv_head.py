"""The convolutional head of ESA's segmentation network (Zhu et al. 2019, appendix), after CCNet.

    3x3 conv -> [attention] -> 3x3 conv -> with the head's input: 3x3 conv -> dropout 0.1 -> 1x1 conv

Each 3x3 convolution is followed by batch normalisation and ReLU and has a quarter of the last map's channels (512 of
2048). An auxiliary head on the map before it (conv4) is trained with weight 0.4.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.attended_block import Slot


def conv_block(channels: int, out: int) -> nn.Sequential:
    """A 3x3 convolution, batch normalisation and ReLU."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class ConvHead(nn.Module):
    """Score maps (B, K, h, w) from the last of several maps; `auxiliary` from the one before.

    channels: of the maps. attention: with a slot for attention of 8 heads between the first two convolutions, which
    `swap` fills like those of attended blocks.
    """

    def __init__(
        self, channels: Sequence[int], classes: int, attention: bool = False, heads: int = 8, dropout: float = 0.1
    ) -> None:
        super().__init__()
        before, last = channels[-2:]
        width = max(last // 4, 32)
        self.first = conv_block(last, width)
        self.attn = Slot(width, heads) if attention else nn.Identity()
        self.second = conv_block(width, width)
        self.fuse = conv_block(last + width, width)
        self.scores = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(width, classes, 1))
        self.auxiliary_scores = nn.Sequential(
            conv_block(before, width), nn.Dropout2d(dropout), nn.Conv2d(width, classes, 1)
        )

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B K h w"]:
        y = self.second(self.attn(self.first(x)))
        return self.scores(self.fuse(torch.cat([x, y], 1)))

    def auxiliary(self, x: Float[Tensor, "B D h w"]) -> Float[Tensor, "B K h w"]:
        """The auxiliary score maps, from the map before the last."""
        return self.auxiliary_scores(x)
