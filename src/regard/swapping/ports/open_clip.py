"""Port of open_clip's own attention class; its other image towers have PyTorch's attention or are models of timm.

The attention pool of a ModifiedResNet has one query, the mean of the image, and stays.
"""

from typing import Any, Literal

from torch import Tensor, nn

from regard.core import Grid, Site
from regard.swapping.layer import Port, library_mask

from .torch_attention import TorchAttention


class OpenCLIPAttention(Port):
    """The attention of open_clip's custom blocks, also with normalised queries and keys; text towers stay."""

    class_paths = frozenset({"open_clip.transformer.Attention"})
    watch = "conv1"
    only_watched = True
    parameter_names = {**TorchAttention.parameter_names, "ln_q": "q_norm", "ln_k": "k_norm", "out_drop": "proj_drop"}

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if module.logit_scale is not None or module.head_scale is not None:
            return "it has learned scales of its logits or heads"
        return "" if isinstance(module.ln_inner, nn.Identity) else "it normalises its output before the projection"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        norm: Literal["", "layer"] = "" if isinstance(module.ln_q, nn.Identity) else "layer"
        return Site(
            dim=module.out_proj.out_features, heads=module.num_heads, grid=grid,
            qkv_bias=module.in_proj_bias is not None, qk_norm=norm, drop=module.out_drop.p, layer=layer, name=name,
        )  # fmt: skip

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.mixer(x, self.grid(), library_mask(attn_mask, False, x))


PORTS: tuple[type[Port], ...] = (OpenCLIPAttention,)
