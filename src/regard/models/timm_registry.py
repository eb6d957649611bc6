"""Registering Regard's models with timm under the names `regard_*`, on request only."""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .catalog import HOSTS, has_option, make_regard_model

IGNORED = (
    "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir",
)  # timm.create_model passes these even if they are not set  # fmt: skip


def register_timm() -> list[str]:
    """Add Regard's hosts to timm's registry, so that `timm.create_model("regard_vit_desk")` makes them.

    Nothing is registered before this call; a second one changes nothing. Returns the names.
    """
    import timm
    from timm.models import register_model

    module = sys.modules[__name__]
    names = []
    for name in HOSTS:
        entry = f"regard_{name}"
        names.append(entry)
        if not timm.is_model(entry):
            function = _entry(name, entry)
            setattr(module, entry, function)
            register_model(function)
    return names


def _entry(name: str, entry: str) -> Callable[..., nn.Module]:
    def make(pretrained: bool = False, **options: Any) -> nn.Module:
        options = {key: value for key, value in options.items() if key not in IGNORED or value is not None}
        if pretrained:
            if not has_option(HOSTS[name], "pretrained"):
                raise ValueError(f"{entry} has no pretrained weights; leave pretrained=True out")
            options["pretrained"] = pretrained
        return make_regard_model(name, **options)

    make.__name__ = make.__qualname__ = entry
    make.__module__ = __name__
    return make
