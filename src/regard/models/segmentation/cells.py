"""CellScores: a host with a mechanism as the encoder, and a linear layer that gives the classes of its tokens."""

from jaxtyping import Float
from torch import Tensor

from regard.core import Extra, MixerConfig

from .segmenter import Segmenter, make_segmenter


class CellScores(Segmenter):
    """Scores (B, K, h, w) of the tokens of images (B, c, H, W), one token a cell; (B, K, T h, w), the frames below one
    another, of clips (B, c, T, H, W)."""

    def forward(self, images: Float[Tensor, "B c *T H W"]) -> Tensor:  # type: ignore[override]
        scores: Tensor = self.head(self.encoder(images)[-1])
        return scores


def make_cell_scores(
    host: str, mixer: MixerConfig | None, *, classes: int, size: tuple[int, int], frames: int = 1,
    removed: bool = False, pretrained: bool = True, extra: Extra = (),
) -> CellScores:  # fmt: skip
    """As `make_segmenter` with a linear head, for grey images, or clips of several frames.

    Raises: the errors of `make_segmenter`.
    """
    made = make_segmenter(
        host, mixer, "linear", classes=classes, size=size, channels=1, frames=frames, removed=removed,
        pretrained=pretrained, extra=extra,
    )  # fmt: skip
    return CellScores(made.encoder, made.head)
