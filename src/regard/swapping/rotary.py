"""Hosts whose rotary positions turn the halves of a head's channels; Regard's layer turns neighbours, as timm's do."""

from torch import Tensor, nn

from regard.core import Mixer
from regard.mixers.shared.heads import HeadMixer


def interleaved(x: Tensor) -> Tensor:
    """Channels 0, d/2, 1, d/2 + 1, ...: what a rotation by halves turns together become neighbours."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


class Interleaved(nn.Module):
    """`interleaved` queries and keys: products of both are as before."""

    def forward(self, x: Tensor) -> Tensor:
        return interleaved(x)


def turn_halves(mixer: Mixer) -> None:
    """Interleave the queries and keys of a mixer, so that an `interleaved` rotation turns what the host's does."""
    if isinstance(mixer, HeadMixer):
        for role in set("qk") & set(mixer.config.roles):
            setattr(mixer, f"{role}_norm", Interleaved())
