"""The catalog of models: Regard's own hosts by name, and the names that `create_model` takes."""

from collections.abc import Callable
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch import nn

from regard.core import Extra
from regard.core.validation import check_arguments
from regard.swapping.layer import Port

from .cait import cait_s_32
from .cvt import cvt_13, cvt_13_32
from .metaformer import cskaformer_b36, cskaformer_s18, metaformer, skaformer_b36, skaformer_desk, skaformer_s18
from .resnet import attended_resnet18, attended_resnet50
from .sequence_classifier import sequence_encoder
from .swin import swin_t_32
from .vit5 import vit5_base, vit5_large, vit5_small, vit5_xlarge
from .vit_desk import vit_desk
from .vit_desk_video import vit_desk_video
from .vit_spt import vit_s_32, vit_s_32_spt
from .xcit_desk import xcit_desk

HOSTS: dict[str, Callable[..., nn.Module]] = {
    "vit_desk": vit_desk, "xcit_desk": xcit_desk, "vit_s_32": vit_s_32, "vit_s_32_spt": vit_s_32_spt,
    "cait_s_32": cait_s_32, "swin_t_32": swin_t_32, "cvt_13": cvt_13, "cvt_13_32": cvt_13_32,
    "skaformer_desk": skaformer_desk, "skaformer_s18": skaformer_s18, "skaformer_b36": skaformer_b36,
    "cskaformer_s18": cskaformer_s18, "cskaformer_b36": cskaformer_b36, "attended_resnet18": attended_resnet18,
    "attended_resnet50": attended_resnet50, "vit5_small": vit5_small, "vit5_base": vit5_base, "vit5_large": vit5_large,
    "vit5_xlarge": vit5_xlarge,
}  # fmt: skip
"""Functions that build Regard's own models, which no library has, by name."""

OTHER_HOSTS: dict[str, Callable[..., nn.Module]] = {
    "sequence_encoder": sequence_encoder, "vit_desk_video": vit_desk_video,
}  # fmt: skip
"""Models that take token ids or clips instead of images, by name; they are not listed among the hosts of images."""


def own_models(extra: Extra = ()) -> dict[str, Callable[..., nn.Module]]:
    """Functions or classes that build models, by name: Regard's and the user's; the user's have precedence."""
    return {**HOSTS, **OTHER_HOSTS, **{item.__name__: item for item in extra if _is_model(item)}}


def _is_model(item: type | Callable[..., Any]) -> bool:
    """Whether an item of `extra` builds a model: it is not a port, a mechanism or a task."""
    return not (isinstance(item, type) and (issubclass(item, Port) or is_dataclass(item)))


def user_ports(extra: Extra) -> list[type[Port]]:
    """The ports in `extra`."""
    return [item for item in extra if isinstance(item, type) and issubclass(item, Port)]


def make_regard_model(name: str, extra: Extra = (), **options: Any) -> nn.Module:
    """Build one of `own_models`.

    features_only, out_indices: as in `timm.create_model`, for maps (B, D, h, w), not logits.
    Raises: TypeError for an option that the host does not have; ConfigError for a stage that does not exist.
    """
    make = own_models(extra)[name]
    if has_option(make, "features_only") or not options.pop("features_only", False):
        return make(**options)
    from .pyramids import feature_backbone

    indices = options.pop("out_indices", None)
    return feature_backbone(make(**options), indices)


def default_size(name: str, extra: Extra = ()) -> tuple[int, int] | None:
    """(height, width) of images that one of `own_models` takes by default; None if it has no such option."""
    make = own_models(extra).get(name.removeprefix("regard_"))
    if make is None:
        return None
    options = {**signature(metaformer).parameters, **signature(make).parameters}
    sides = (options[option].default for option in ("size", "img_size") if option in options)
    side = next((side for side in sides if isinstance(side, int | tuple)), None)  # `size` of MetaFormers is a letter
    if side is None:
        return None
    return (side, side) if isinstance(side, int) else (side[0], side[1])


@check_arguments
def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` takes and that match a glob: Regard's own first, then timm's."""
    import timm

    regard_names = [name for name in HOSTS if fnmatchcase(name, pattern) or fnmatchcase(f"regard_{name}", pattern)]
    return regard_names + [name for name in timm.list_models(pattern) if not name.startswith("regard_")]


def has_option(function: Callable[..., nn.Module], option: str) -> bool:
    """Whether the function of a host accepts an option of this name."""
    parameters = signature(function).parameters
    return option in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())
