"""SKAFormer and CSKAFormer: timm's CAFormer with static keys in some of its four stages.

The tables of "Static Key Attention in Vision" do not say which stage; here it is the second: only that gives the
published size of CSKAFormer-B36, and it is the best placement of Table 5. `mixers` sets any other.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import timm
import torch
from timm.models import build_model_with_cfg
from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
from torch import Tensor, nn

from regard.core import ConfigError, MixerConfig, StoreError, nearest
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.spelling import parse_mixer, spell
from regard.projections.identity import IdentityQuery
from regard.projections.linear import LinearQKV
from regard.swapping.host_parameters import read_tensors

from .pyramids import check_indices

SIZES: dict[str, dict[str, Any]] = {
    "s18": {"depths": (3, 3, 9, 3), "dims": (64, 128, 320, 512)},
    "b36": {"depths": (3, 12, 18, 3), "dims": (128, 256, 512, 768)},
    "desk": {"depths": (1, 1, 2, 1), "dims": (32, 64, 96, 128)},
}
QUERIES = ("linear", "identity")
SHORT_NAMES = {"ska": "SKA", "cska": "CSKA"}
STAGE = re.compile(r"stages[._](\d)\.")


def skaformer_s18(*, mixers: Sequence[str] = ("conv", "ska", "attn", "attn"), **options: Any) -> nn.Module:
    """26,555,922 parameters: static keys in stage 2. Options as in `metaformer`."""
    return metaformer("s18", mixers, **options)


def skaformer_b36(*, mixers: Sequence[str] = ("conv", "ska", "attn", "attn"), **options: Any) -> nn.Module:
    """100,074,550 parameters: static keys in stage 2. Options as in `metaformer`."""
    return metaformer("b36", mixers, **options)


def cskaformer_s18(*, mixers: Sequence[str] = ("conv", "cska", "attn", "attn"), **options: Any) -> nn.Module:
    """28,973,778 parameters: convolutional static keys in stage 2. Options as in `metaformer`."""
    return metaformer("s18", mixers, **options)


def cskaformer_b36(*, mixers: Sequence[str] = ("conv", "cska", "attn", "attn"), **options: Any) -> nn.Module:
    """119,417,398 parameters: convolutional static keys in stage 2. Options as in `metaformer`."""
    return metaformer("b36", mixers, **options)


def skaformer_desk(*, mixers: Sequence[str] = ("conv", "ska", "attn", "attn"), **options: Any) -> nn.Module:
    """A small model for the desk studies: widths 32 to 128, 5 blocks; not published. Options as in `metaformer`."""
    return metaformer("desk", mixers, **options)


def metaformer(
    size: str, mixers: Sequence[str], *, img_size: int | tuple[int, int] = 224, resize: str | None = None,
    query: str = "linear", heads: int = 0, pretrained: bool | str | os.PathLike[str] = False,
    features_only: bool = False, **options: Any,
) -> nn.Module:  # fmt: skip
    """A MetaFormer of timm with "conv", "attn" or a mechanism in each of its four stages.

    mixers: four of "conv" (separable convolution), "attn" (timm's attention), "ska", "cska" or a spelled mechanism.
    img_size: the image size that gives the grids of the static keys. resize: what the keys do on other grids, for
    mixers whose spelling does not set it. query: "linear", or "identity" for mechanisms whose queries are the input
    itself, as in the authors' code: S18 with static keys in stages 3 and 4 and heads of width 32 then has
    23,565,336 parameters. heads: number of heads of the mechanisms; 0 = heads of width 32. The authors' code has heads
    of width 16 in its CSKAFormer: 8 in stage 2 of S18, which then has 28,983,186 parameters.
    pretrained: True loads timm's weights of caformer_<size> into every layer of the same shape; else the path of a
    checkpoint of that, or of this model. A warning names the tensors of a checkpoint that the model does not have.
    options: of timm, such as num_classes, in_chans, drop_path_rate, out_indices.
    Raises: ConfigError if mixers are not four known names, query is unknown or no stage has a mechanism for it, heads
    do not divide a width, a stage does not exist, or a checkpoint is missing, cannot be read or has no tensor that
    fits.
    """
    name = f"caformer_{size}"
    configs = _stage_configs(mixers, resize, query)
    convolutions = [text == "conv" for text in mixers]
    indices = check_indices(options.pop("out_indices", range(4)), 4)
    state = _weights(name, pretrained) if pretrained else {}
    model: Any = build_model_with_cfg(
        MetaFormer, name, False, feature_cfg={"flatten_sequential": True, "out_indices": indices},
        features_only=features_only, token_mixers=[SepConv if conv else Attention for conv in convolutions],
        norm_layers=[LayerNorm2dNoBias if conv else LayerNormNoBias for conv in convolutions], **SIZES[size], **options,
    )  # fmt: skip
    unused = load_fitting(model, state)
    _swap_stages(model, configs, heads, img_size, options.get("in_chans", 3))
    if unused:  # a checkpoint of the same model has tensors of its mechanisms
        _warn_unused(load_fitting(model, {key: state[key] for key in unused}), len(state), name, pretrained)
    return model


def load_fitting(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Copy the tensors of a checkpoint into every parameter of the same name and shape; returns the unused names.

    A 1x1 convolution and a matrix of the same sizes count as the same shape. A backbone made with features_only, whose
    stages have other names, can be loaded too.
    """
    unused = []
    targets = {key.replace("stages_", "stages."): value for key, value in model.state_dict().items()}
    with torch.no_grad():
        for key, value in state.items():
            target = targets.get(key)
            if target is None or _without_kernel_axes(target.shape) != _without_kernel_axes(value.shape):
                unused.append(key)
            else:
                target.copy_(value.reshape(target.shape))
    return unused


def _without_kernel_axes(shape: torch.Size) -> tuple[int, ...]:
    """The shape without the two kernel axes of a 1x1 convolution."""
    return tuple(shape[:-2]) if tuple(shape[2:]) == (1, 1) else tuple(shape)


def _weights(name: str, pretrained: bool | str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The published weights of a timm model (True), or those in a file."""
    if isinstance(pretrained, bool):
        if not timm.is_model(name):
            raise ConfigError(f"there are no published weights of {name}; pass pretrained=PATH, of a checkpoint")
        return timm.create_model(name, pretrained=True).state_dict()
    try:
        return read_tensors(pretrained, "state_dict_ema", "model_ema", "state_dict", "model")
    except StoreError as error:
        raise ConfigError(f"pretrained={str(pretrained)!r} is not a readable checkpoint: {error}") from error


def _warn_unused(unused: Sequence[str], number: int, name: str, pretrained: bool | str | os.PathLike[str]) -> None:
    """Warn about tensors of a checkpoint that were not used. Raises: ConfigError if none was."""
    source = name if isinstance(pretrained, bool) else str(pretrained)
    if len(unused) == number:
        raise ConfigError(
            f"none of the {number} tensors of {source} fits, such as {', '.join(unused[:3])}; expected a checkpoint of "
            f"{name} or of this model"
        )
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        warnings.warn(
            f"{len(unused)} of the {number} tensors of {source} have no parameter in this model and were left out: "
            f"{', '.join(unused[:3])}{more}",
            stacklevel=4,
        )


def _stage_configs(mixers: Sequence[str], resize: str | None, query: str) -> list[MixerConfig | None]:
    """The mechanism of each stage, None for convolutions and timm's attention. Raises: ConfigError."""
    if isinstance(mixers, str) or len(mixers) != 4:
        raise ConfigError(f'mixers are four, one a stage, such as ("conv", "ska", "attn", "attn"), not {mixers!r}')
    configs = [_config(text, resize) for text in mixers]
    if query not in QUERIES:
        raise ConfigError(f"a metaformer has no query={query!r}; {nearest(query, QUERIES)}")
    return _with_identity_queries(configs) if query == "identity" else configs


def _config(text: str, resize: str | None) -> MixerConfig | None:
    if text in ("conv", "attn"):
        return None
    config = parse_mixer(SHORT_NAMES.get(text, text))
    if config is not None and resize is not None:
        if "resize" not in {item.name for item in fields(config)}:
            raise ConfigError(f"{type(config).__name__} has no resize; leave resize= out")
        config = replace(config, resize=resize)  # type: ignore[call-arg]
    return config


def _with_identity_queries(configs: Sequence[MixerConfig | None]) -> list[MixerConfig | None]:
    """The same mechanisms, with the input itself as queries."""
    changed: list[MixerConfig | None] = []
    for config in configs:
        if isinstance(config, HeadMixerConfig) and config.projection == LinearQKV():
            config = replace(config, projection=IdentityQuery())
        elif config is not None:
            raise ConfigError(f"query='identity' replaces a linear query, which {spell(config)} does not have")
        changed.append(config)
    if not any(changed):
        raise ConfigError("query='identity' is for stages with a mechanism such as 'ska'; \"attn\" keeps its own")
    return changed


def _swap_stages(
    model: nn.Module, configs: Sequence[MixerConfig | None], heads: int, img_size: int | tuple[int, int], channels: int,
) -> None:  # fmt: skip
    """Put the mechanism of each stage into its attention layers, in place. channels: of the images."""
    from regard.swapping.inspect import attention_layers
    from regard.swapping.swap import plan_layers

    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    example = torch.zeros(1, channels, height, width)
    for stage, config in enumerate(configs):
        names = [name for name in attention_layers(model) if (match := STAGE.search(name)) and int(match[1]) == stage]
        for name in names if config is not None and heads else ():
            _set_heads(cast(Attention, model.get_submodule(name)), heads)
        if config is not None and names:
            plan_layers(model, config, names, example).apply(faithful=False)


def _set_heads(attention: Attention, heads: int) -> None:
    """Set the number of heads that share the width, before a mechanism replaces the attention."""
    if attention.attention_dim % heads:
        raise ConfigError(f"{heads} heads do not divide a width of {attention.attention_dim}; change or omit heads")
    attention.num_heads, attention.head_dim = heads, attention.attention_dim // heads
    attention.scale = attention.head_dim**-0.5
