"""What timm's attention may have besides Regard's layer: normalisation and gate of the output, other channels."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Mixer, UnsupportedError
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.special_mixers import ResizingMixer


class ExtendedMixer(ResizingMixer):
    """proj(sigmoid(host_gate(x)) * norm(out)), with copies of the host's modules; proj may change the channels."""

    def __init__(self, mixer: HeadMixer, host: Any, shared: nn.Module | None) -> None:
        super().__init__(mixer.config, mixer.site, shared)
        self.norm = copy.deepcopy(getattr(host, "norm", None))
        self.host_gate = copy.deepcopy(getattr(host, "gate", None))
        self.proj = nn.Linear(mixer.site.inner, len(host.proj.weight), bias=mixer.site.out_bias)

    def project_output(self, x: Tensor, out: Tensor) -> Tensor:
        out = out if self.norm is None else self.norm(out)
        return super().project_output(x, out if self.host_gate is None else torch.sigmoid(self.host_gate(x)) * out)


def extended_mixer(mixer: Mixer, host: Any, shared: nn.Module | None) -> Mixer:
    """A mixer with the parts that timm's attention `host` has besides Regard's layer; itself if there are none.

    Raises: UnsupportedError if the mechanism has a layer of its own, which they do not fit.
    """
    site, kind, out = mixer.site, type(mixer.config).__name__, len(host.proj.weight)
    normalised = not isinstance(getattr(host, "norm", None), nn.Identity | None)
    changed = normalised or getattr(host, "gate", None) is not None
    if out == site.dim and not changed:
        return mixer
    if type(mixer) is HeadMixer and (not changed or site.inner == host.proj.weight.shape[1]):
        return ExtendedMixer(mixer, host, shared)
    if out != site.dim:
        raise UnsupportedError(
            f"{site.name} makes {out} channels of {site.dim}, which {kind} cannot; leave the layer out with where="
        )
    if mixer.config.uses:
        raise UnsupportedError(
            f"{site.name} normalises or gates its output, which {kind} cannot; leave the layer out with where="
        )
    return mixer
