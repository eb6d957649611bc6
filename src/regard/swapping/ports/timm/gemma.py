"""Port of timm's vision tower of Gemma 4."""

from typing import Any, ClassVar

from timm.models.gemma4_vit import Gemma4Attention, apply_multidimensional_rope
from torch import Tensor

from regard.core import Grid, Inputs, Site, heads, merge
from regard.swapping.host_mixer import HostMixer, HostPort, host_parts
from regard.swapping.layer import Port, library_mask


class GemmaMixer(HostMixer):
    """Normalised queries, keys and values; rotary positions, given as (cosines, sines); no division by sqrt(d)."""

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        parts, width, (cos, sin) = self.around, self.site.width, extra
        q, k, v = (
            norm(heads(part(x), part.linear.out_features // width))
            for part, norm in ((parts.q_proj, parts.q_norm), (parts.k_proj, parts.k_norm), (parts.v_proj, parts.v_norm))
        )
        q, k = (apply_multidimensional_rope(role, cos, sin, unsqueeze_dim=1) for role in (q, k))
        k, v = (role.repeat_interleave(self.site.heads // role.shape[1], 1) for role in (k, v))
        return Inputs(q * width**0.5, k, v, grid)

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        return self.around.proj_drop(self.around.o_proj(merge(y)))  # type: ignore[no-any-return]


class TimmGemma(HostPort):
    """Gemma 4's vision tower: rotary positions of rows and columns, normalised queries, keys and values."""

    replaces: ClassVar[tuple[type, ...]] = (Gemma4Attention,)
    watch = "patch_embed"
    parameter_names = host_parts("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "v_norm", "proj_drop")
    mixer_class: ClassVar[type[HostMixer]] = GemmaMixer
    gets_more = True

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim = module.q_proj.linear.in_features
        return Site(dim=dim, heads=module.num_heads, grid=grid, width=module.head_dim, layer=layer, name=name)

    def forward(self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, False, x), (rope_cos, rope_sin))


PORTS: tuple[type[Port], ...] = (TimmGemma,)
