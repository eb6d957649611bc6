"""Hosts: models of timm, torchvision and our own, and how a mixer gets into them."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn

from .vit_desk import vit_desk
from .vit_spt import vit_s_32, vit_s_32_spt

# models that no library has
HOSTS: dict[str, Callable[..., nn.Module]] = {
    "vit_desk": vit_desk,
    "vit_s_32": vit_s_32,
    "vit_s_32_spt": vit_s_32_spt,
}


def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` takes and that match a glob: Regard's own first, then timm's."""
    import timm

    return [name for name in HOSTS if fnmatchcase(name, pattern)] + timm.list_models(pattern)
