"""Real values at each position, such as depth, saliency or flow, or a few real numbers."""

from jaxtyping import Float
from torch import Tensor

from .judge import Change, Judge

FEW = 16
"""Values of an image below which its deviation says little: then images are compared with each other."""


class RealMaps(Judge):
    """(B, h, w), (B, 1, h, w), (B, 2, h, w); (B,) or (B, 1) numbers: the root of the mean squared difference, divided
    by the old map's deviation from its own mean; of a few numbers, by their deviation over all images.
    """

    kind = "map"
    distance = "error: root mean square of the difference, divided by the deviation of the old values"
    kept = "correlation with the old values"
    sentence = "gives values with a correlation of {} % to the model's own"
    shares = False

    def __init__(self, name: str = "", *, whole: bool = False) -> None:
        super().__init__(name)
        self.whole = whole

    def change(self, before: Float[Tensor, "n ..."], after: Float[Tensor, "n ..."]) -> Change:
        x, y = (value.reshape(len(value), -1).double() for value in (before, after))
        axis = 0 if self.whole else 1
        deviation = x - x.mean(axis, keepdim=True)
        spread = deviation.square().mean(axis, keepdim=True).sqrt()
        spread = spread.where(spread > 1e-12, 1.0)
        error = ((y - x) / spread).square().mean(1).sqrt()
        other = y - y.mean(axis, keepdim=True)
        norms = deviation.norm(dim=axis) * other.norm(dim=axis)
        correlation = (deviation * other).sum(axis) / norms.clamp_min(1e-12)
        correlation = correlation.where(norms > 1e-12, (x == y).all(axis).double())
        return error, correlation.mean().expand(len(x)) if self.whole else correlation
