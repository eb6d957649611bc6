"""Rotary positions of hosts that rotate the two halves of a head's channels; Regard rotates neighbouring channels."""

from torch import Tensor, nn

from regard.core import Mixer
from regard.mixers.shared.heads import HeadMixer


def interleave(x: Tensor) -> Tensor:
    """Channels in the order 0, d/2, 1, d/2 + 1, ...: pairs that are rotated together become neighbours."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


class Interleaved(nn.Module):
    """`interleave`, after a normalisation if there is one, for queries and keys; their products do not change."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return interleave(x if self.norm is None else self.norm(x))


def rotate_halves(mixer: Mixer) -> None:
    """Interleave the queries and keys of a mixer, in place, so that `interleave` rotary angles fit them."""
    if isinstance(mixer, HeadMixer):
        for role in set("qk") & set(mixer.config.roles):
            norm = getattr(mixer, f"{role}_norm", None)
            if not isinstance(norm, Interleaved):
                setattr(mixer, f"{role}_norm", Interleaved(norm))
