"""Ports of Regard's own hosts and of CaiT: what stands around their attention stays around the new mechanism."""

from typing import Any, ClassVar

import torch
from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Mask, Mixer, MixerConfig, Site, UnsupportedError
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.models.cait import LooseTalkingAttention, TalkingAttention
from regard.models.cvt import ConvAttention, DepthwiseProjection, coarser, convolved
from regard.models.vit_spt import KeptLocalityAttention, LocalityAttention
from regard.projections.linear import LinearProjection
from regard.swapping.layer import Hosted, additive
from regard.swapping.separate_qkv import SeparateProjection, biased
from regard.swapping.talking_heads import TalkingHeads, logits_of, silent


class LocalityViT(Hosted):
    """The locality self-attention of vit_s_32_spt; its temperature and diagonal mask go with it."""

    library: ClassVar[tuple[type, ...]] = (LocalityAttention,)
    watch: ClassVar[str] = "patch_embed.proj"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.mixer(x, self.grid(), additive(attn_mask, is_causal, x))


class KeptLocality(LocalityViT):
    """vit_s_32_spt(keep_lsa=True): the temperature stands for d^-0.5, and a token still does not attend to itself."""

    library: ClassVar[tuple[type, ...]] = (KeptLocalityAttention,)
    sends: ClassVar[frozenset[str]] = frozenset({"bias"})
    names: ClassVar[dict[str, str]] = {"temperature": "q_norm.temperature"}

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer = super().built(config, site, shared)
        if isinstance(mixer, HeadMixer) and "q" in mixer.config.roles:
            mixer.q_norm = Temperature(site.width)
        return mixer

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        bias = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).masked_fill(itself, -torch.inf)
        return self.mixer(x, self.grid(), Mask(bias=bias))


class Temperature(nn.Module):
    """q exp(t) sqrt(d): after a mechanism's factor d^-0.5, the logits are scaled by exp(t). temperature (): t."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.temperature = nn.Parameter(torch.tensor(float(width) ** -0.5).log())

    def forward(self, q: Tensor) -> Tensor:
        return q * (self.temperature.exp() * self.width**0.5)


class Talking(Hosted):
    """CaiT's patch layers: a mechanism with a map over all keys keeps the mixes of heads; others are refused."""

    library: ClassVar[tuple[type, ...]] = (TalkingHeadAttn, TalkingAttention)
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


class LooseTalking(Hosted):
    """cait_s_32(keep_talking=False): the mixes of heads go with the softmax between them."""

    library: ClassVar[tuple[type, ...]] = (LooseTalkingAttention,)
    watch: ClassVar[str] = "patch_embed.proj"

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, self.grid())


class CvTPort(Hosted):
    """CvT's attention: its convolutions and the grid of its keys stay.

    A mechanism's `scale` is the factor of its logits; where it is None or missing, its d^-0.5 gives way to the host's.
    """

    library: ClassVar[tuple[type, ...]] = (ConvAttention,)
    watch: ClassVar[str] = "embed.proj"
    names: ClassVar[dict[str, str]] = {"proj_q": "qkv.q", "proj_k": "qkv.k", "proj_v": "qkv.v"}

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        return Site(
            dim=module.proj.out_features,
            heads=module.num_heads,
            grid=grid,
            qkv_bias=module.proj_q.bias is not None,
            layer=layer,
            memory=coarser(grid, module.kv_stride) if module.kv_stride > 1 else None,
            name=name,
        )

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        if not isinstance(config, HeadMixerConfig):
            return super().built(config, site, shared)
        if site.memory is not None and not config.cross:
            raise UnsupportedError(
                f"{type(config).__name__} needs keys on the grid of the queries; make the host with kv_stride=1"
            )
        if site.memory is not None and config.dwc:
            raise ConfigError("dwc adds values at their own place: it needs a host with kv_stride=1")
        made = super().built(config, site, shared)
        if type(made) is not HeadMixer:
            raise UnsupportedError(
                f"{type(config).__name__} has a layer of its own around its operator ({type(made).__name__}: a branch, "
                "gate or norm), and CvT's convolutions need the plain one; take options without it, or another host"
            )
        return ConvMixer(config, made.site, shared, self.host)  # its site: a mechanism may have heads of its own

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        return self.mixer(x, Grid(height, width, self.prefix))


class ConvMixer(HeadMixer):
    """The layer around an operator in CvT: depth-wise convolutions before the projection, keys on a coarser grid."""

    def __init__(self, config: HeadMixerConfig, site: Site, shared: nn.Module | None, host: Any) -> None:
        super().__init__(config, site, shared)
        roles = config.roles
        if isinstance(self.qkv, LinearProjection):
            biases = biased(q=host.proj_q, k=host.proj_k, v=host.proj_v)
            self.qkv = SeparateProjection(site, roles, biases)
        self.stride = host.kv_stride
        given = getattr(config, "scale", None) is not None
        self.factor = 1.0 if given else host.scale * site.width**0.5
        for name, _ in host.named_children():
            if name.startswith("conv_") and set(name[5:]) & set(roles):
                self.add_module(name, DepthwiseProjection(site.dim, 1 if name == "conv_q" else host.kv_stride))

    def memory_grid(self, grid: Grid) -> Grid | None:
        return coarser(grid, self.stride) if self.stride > 1 else None

    def roles(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        made: dict[str, Tensor | None] = dict.fromkeys("qkv")
        for role in self.config.roles:
            made[role] = self.normalised(role, self.qkv(convolved(self, role, x, grid), role)[0], grid, rope)
        if made["q"] is not None and self.factor != 1.0:
            made["q"] = made["q"] * self.factor
        return made
