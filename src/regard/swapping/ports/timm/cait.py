"""Port of timm's CaiT."""

from typing import ClassVar

from timm.models.cait import TalkingHeadAttn
from torch import nn

from regard.core import Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.layer import Port
from regard.swapping.talking_heads import TalkingHeads, logits_operator, no_logits_error


class TimmCaiT(Port):
    """CaiT's patch layers: mechanisms with logits over all keys keep the talking heads; others are refused."""

    replaces: ClassVar[tuple[type, ...]] = (TalkingHeadAttn,)
    watch = "patch_embed.proj"
    parameter_names = {"proj_l": "operator.proj_l", "proj_w": "operator.proj_w"}

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().build_mixer(config, site, shared)
        if isinstance(mixer, HeadMixer):
            inner = logits_operator(mixer.config, mixer.site)
            bias = "proj_l.bias" in self.host_shapes
            mixer.operator = TalkingHeads(inner, mixer.site.heads, bias)
        elif config.uses:
            raise no_logits_error(config)
        return mixer


PORTS: tuple[type[Port], ...] = (TimmCaiT,)
