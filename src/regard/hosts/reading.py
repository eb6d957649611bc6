"""How a library's attention is read: its site, and what of it Regard's layer does not have."""

from typing import Any, Literal

from torch import nn

from regard.core import ConfigError, Grid, Site


def fused_site(module: Any, grid: Grid, name: str, layer: int) -> Site:
    """The site of an attention with children `qkv` and `proj`, as all of timm's have."""
    return Site(
        dim=module.qkv.in_features,
        heads=module.num_heads,
        grid=grid,
        width=module.qkv.out_features // (3 * module.num_heads),
        qkv_bias=module.qkv.bias is not None,
        out_bias=module.proj.bias is not None,
        qk_norm=normalisation(module, name),
        drop=module.proj_drop.p,
        layer=layer,
        name=name,
    )


def normalisation(module: nn.Module, name: str) -> Literal["", "layer", "rms"]:
    """The kind of q/k normalisation. Raises: ConfigError for a kind that Regard's layer does not have."""
    norm = getattr(module, "q_norm", None)
    if norm is None or isinstance(norm, nn.Identity):
        return ""
    kind = type(norm).__name__.lower()
    if "rms" in kind:
        return "rms"
    if "layernorm" in kind:
        return "layer"
    raise ConfigError(f"{name} normalises q and k by {type(norm).__name__}; Regard's layer knows LayerNorm and RMSNorm")


def fused_refuses(module: Any) -> str:
    """What timm's attention may have that Regard's layer has not."""
    if getattr(module, "gate", None) is not None:
        return "it gates its output by a sigmoid"
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        return "it normalises its output before the projection"
    if module.qkv is None:
        return "it has separate q, k and v"
    if module.proj.out_features != module.qkv.in_features:
        return "it changes the number of channels"
    return ""
