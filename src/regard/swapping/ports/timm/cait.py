"""Port of timm's CaiT."""

from typing import ClassVar

from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn

from regard.core import Mixer, MixerConfig, Site
from regard.mixers.shared.heads import HeadMixer
from regard.swapping.layer import Port
from regard.swapping.talking_heads import TalkingHeads, logits_of, silent


class Talking(Port):
    """CaiT's patch layers: a mechanism with a map over all keys keeps the mixes of heads; others are refused."""

    library: ClassVar[tuple[type, ...]] = (TalkingHeadAttn,)
    watch: ClassVar[str] = "patch_embed.proj"
    names: ClassVar[dict[str, str]] = {"proj_l": "operator.proj_l", "proj_w": "operator.proj_w"}

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().built(config, site, shared)
        if isinstance(mixer, HeadMixer):
            inner = logits_of(mixer.config, mixer.site)
            bias = "proj_l.bias" in self.host_shapes
            mixer.operator = TalkingHeads(inner, mixer.site.heads, bias)
        elif config.uses:
            raise silent(config)
        return mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())
