"""SKAFormer and CSKAFormer: timm's CAFormer with static keys in some of its four stages.

The tables of "Static Key Attention in Vision" leave open which stage is meant; here it is the second, which alone gives
the published size of CSKAFormer-B36 and is the best placement of Table 5. Any other is a choice of `mixers`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, load_state_dict
from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
from torch import Tensor, nn

from regard.core import ConfigError, MixerConfig, nearest
from regard.mixers.heads import HeadMixerConfig
from regard.mixers.spell import parse_mixer, spell
from regard.projections.identity import IdentityQuery
from regard.projections.linear import LinearQKV

SIZES: dict[str, dict[str, Any]] = {
    "s18": {"depths": (3, 3, 9, 3), "dims": (64, 128, 320, 512)},
    "b36": {"depths": (3, 12, 18, 3), "dims": (128, 256, 512, 768)},
    "desk": {"depths": (1, 1, 2, 1), "dims": (32, 64, 96, 128)},
}
QUERIES = ("linear", "identity")
SHORT = {"ska": "SKA", "cska": "CSKA"}
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
    """A small one for studies on a desk: widths 32 to 128, 5 blocks; no published model. Options as in `metaformer`."""
    return metaformer("desk", mixers, **options)


def metaformer(
    size: str,
    mixers: Sequence[str],
    *,
    img_size: int | tuple[int, int] = 224,
    resize: str | None = None,
    query: str = "linear",
    pretrained: bool | str = False,
    features_only: bool = False,
    **options: Any,
) -> nn.Module:
    """A MetaFormer of timm with "conv", "attn" or a mechanism in each of its four stages.

    mixers: four of "conv" (separable convolution), "attn" (timm's attention), "ska", "cska" or a spelled mechanism.
    img_size: the image whose grids the static keys have. resize: what they do on others, where it is not spelled.
    query: "linear", or "identity" for queries of the mechanisms that are the input itself, as in the authors' code:
    with static keys in stages 3 and 4 and width 32 a head its S18 has 23,565,336 parameters.
    pretrained: True takes timm's weights of caformer_<size> for every layer that keeps its shape; a string is the path
    of a checkpoint. options: timm's, such as num_classes, in_chans, drop_path_rate, out_indices.
    Raises: ConfigError if mixers are not four known ones, or query is neither or has no mechanism to apply to.
    """
    name = f"caformer_{size}"
    if isinstance(mixers, str) or len(mixers) != 4:
        raise ConfigError(
            f'mixers are four, one for each stage, such as ("conv", "ska", "attn", "attn"), not {mixers!r}'
        )
    configs = [_config(text, resize) for text in mixers]
    if query not in QUERIES:
        raise ConfigError(f"a metaformer has no query={query!r}; {nearest(query, QUERIES)}")
    if query == "identity":
        configs = _direct(configs)
    convolutions = [text == "conv" for text in mixers]
    indices = options.pop("out_indices", (0, 1, 2, 3))
    model: Any = build_model_with_cfg(
        MetaFormer,
        name,
        False,
        feature_cfg={"flatten_sequential": True, "out_indices": indices},
        features_only=features_only,
        token_mixers=[SepConv if conv else Attention for conv in convolutions],
        norm_layers=[LayerNorm2dNoBias if conv else LayerNormNoBias for conv in convolutions],
        **SIZES[size],
        **options,
    )
    if pretrained:
        load_fitting(model, load_state_dict(pretrained) if isinstance(pretrained, str) else _published(name))
    _fill(model, configs, img_size, options.get("in_chans", 3))
    return model


def load_fitting(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Copy the tensors of a checkpoint into every parameter of the same name and shape; returns the names left out.

    A 1x1 convolution and a matrix of the same numbers have the same shape here. Stages of a backbone made with
    features_only are found too.
    """
    own, left = model.state_dict(), []
    renamed = {key.replace("stages_", "stages."): value for key, value in own.items()}
    with torch.no_grad():
        for key, value in state.items():
            target = renamed.get(key)
            if target is None or _plain(target.shape) != _plain(value.shape):
                left.append(key)
            else:
                target.copy_(value.reshape(target.shape))
    return left


def _plain(shape: torch.Size) -> tuple[int, ...]:
    return tuple(shape[:-2]) if tuple(shape[2:]) == (1, 1) else tuple(shape)


def _published(name: str) -> dict[str, Tensor]:
    return timm.create_model(name, pretrained=True).state_dict()


def _config(text: str, resize: str | None) -> MixerConfig | None:
    if text in ("conv", "attn"):
        return None
    config = parse_mixer(SHORT.get(text, text))
    if config is not None and resize is not None:
        if "resize" not in {item.name for item in fields(config)}:
            raise ConfigError(f"{type(config).__name__} has no resize; leave resize= out")
        config = replace(config, resize=resize)  # type: ignore[call-arg]
    return config


def _direct(configs: Sequence[MixerConfig | None]) -> list[MixerConfig | None]:
    """The same mechanisms on queries that are the input."""
    made: list[MixerConfig | None] = []
    for config in configs:
        if isinstance(config, HeadMixerConfig) and config.projection == LinearQKV():
            config = replace(config, projection=IdentityQuery())
        elif config is not None:
            raise ConfigError(f"query='identity' takes the place of a linear query, which {spell(config)} has not")
        made.append(config)
    if not any(made):
        raise ConfigError("query='identity' is for stages with a mechanism such as 'ska'; \"attn\" keeps its own")
    return made


def _fill(model: nn.Module, configs: Sequence[MixerConfig | None], img_size: int | tuple[int, int], chans: int) -> None:
    from .looking import all_sites
    from .swap import plan_layers

    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    example = torch.zeros(1, chans, height, width)
    for stage, config in enumerate(configs):
        names = [name for name in all_sites(model) if (found := STAGE.search(name)) and int(found[1]) == stage]
        if config is not None and names:
            plan_layers(model, config, names, example).apply(faithful=False)
