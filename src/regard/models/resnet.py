"""ResNets of timm and torchvision with attention in their residual blocks (see `attended_block`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import timm
from timm.layers import freeze_batch_norm_2d
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet

from regard.core import ConfigError, MixerConfig, SwapError
from regard.core.validation import check_arguments
from regard.mixers.convolutions.deformable import DeformableConv, DeformableConv2d
from regard.mixers.spelling import parse_mixer, spell
from regard.swapping.inspect import example_input
from regard.swapping.shared_state import refresh_shared_state
from regard.swapping.swap import plan_layers

from .attended_block import BLOCKS, Attended, Slot


@check_arguments
def attend(
    model: nn.Module, mixer: MixerConfig | str | None, stages: Sequence[int] = (3, 4),
    deformable: bool | str | DeformableConv = False, *, heads: int = 8, parallel: bool = False,
    example: Tensor | None = None,
) -> nn.Module:  # fmt: skip
    """Put attention into the residual blocks of a ResNet of torchvision or timm, in place; returns the model.

    The ResNet may be a part of the model, such as the backbone of a feature pyramid or detector. mixer: a
    configuration, its spelling, or None for empty slots. stages: numbers of `layer1` to `layer4`; the paper's conv4 and
    conv5 are 3 and 4. deformable: True replaces the 3x3 convolution before attention by a deformable one with the same
    weights and offsets of zero; its options (version, groups, offset_kernel, mask_init) may be given as a configuration
    or its spelling; `lr_scale()` of the layer gives the lower learning rate of its offsets. False leaves the
    convolution unchanged. parallel: attention beside the 3x3 convolution instead of after it. example: an input (1, C,
    H, W) that gives the mechanisms their first grid; other sizes may follow; by default of the size that the model
    names, or 224x224.
    With attention alone the model's first output is bit-identical; with deformable convolutions it is equal up to
    rounding of coordinates in float32: about 1e-6 of its size on maps of 14 cells, 3e-6 of 84, 3e-5 of 1333.
    torchvision's `create_feature_extractor` needs tracer_kwargs={"leaf_modules": [Attended, DeformableConv2d]}.
    Blocks that have attention already get the new mechanism (with weights that fit, as `swap` does), the new number of
    heads, or an empty slot for None. Deformable convolutions keep their options.
    Raises: SwapError if the model does not have these stages, or has other blocks or deformable convolutions with other
    options; ConfigError for stages that are not numbers, heads that do not divide the channels and options that the
    convolution sets itself; UnsupportedError for a convolution that a deformable one cannot replace; the errors of
    `plan_swap`. The model is unchanged after an error.
    """
    convolution = parse_mixer(deformable) if isinstance(deformable, str) else deformable
    if not isinstance(convolution, bool | DeformableConv):
        raise ConfigError(f"deformable is True, False or a DeformableConv with its options, not {deformable!r}")
    config = parse_mixer(mixer) if isinstance(mixer, str) else mixer
    if config is not None and not isinstance(config, MixerConfig):
        raise ConfigError(f"mixer is a configuration, its spelling or None for empty slots, not {mixer!r}")
    blocks = blocks_of(model, stages)
    for name, block in blocks:
        if type(heads) is not int or heads < 1 or _width(block) % heads:
            raise ConfigError(f"{name} has {_width(block)} channels, not a multiple of {heads}; give another heads=")
    with _unchanged_on_error([block for _, block in blocks]):
        for name, block in blocks:
            _add_slot(block, name, heads, convolution)
            _slot(block).parallel = parallel
        if config is not None:
            example = example_input(model, default=(224, 224)) if example is None else example
            plan_layers(model, config, [f"{name}.attn" for name, _ in blocks], example).apply()
    if config is None:
        for _, block in blocks:
            if isinstance(block.attn, Attended):
                block.attn = block.attn.restored_attention()
        refresh_shared_state(model)
    return model


@contextmanager
def _unchanged_on_error(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what `_add_slot` changed in these blocks after any exception, Ctrl-C too."""
    before = [(block, type(block), _spatial(block), _heads_of(block), _is_parallel(block)) for block in blocks]
    try:
        yield
    except BaseException:
        for block, kind, conv, heads, parallel in before:
            if kind in BLOCKS:
                block.__class__ = kind
                block._modules.pop("attn", None)
            else:
                _slot(block).heads, _slot(block).parallel = heads, parallel
            setattr(block, _spatial_name(block), conv)
        raise


def blocks_of(model: nn.Module, stages: Sequence[int]) -> list[tuple[str, nn.Module]]:
    """Names and blocks of some stages of the ResNet in a model.

    Raises: ConfigError for stages that are not numbers; SwapError for stages or blocks that the model does not have.
    """
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not all(type(stage) is int for stage in stages):
        raise ConfigError(f"stages are numbers of layer1 to layer4, such as (3, 4), not {stages!r}")
    blocks_by_stage: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in ("layer1", "layer2", "layer3", "layer4"):
            blocks_by_stage.setdefault(int(last[-1]), []).extend(
                (f"{name}.{child}", block) for child, block in module.named_children()
            )
    missing = sorted(set(stages) - set(blocks_by_stage))
    if missing or not stages:
        numbers = ", ".join(map(str, sorted(blocks_by_stage)))
        has = f"it has {numbers}" if blocks_by_stage else "it has no layer1 to layer4: not a ResNet"
        wrong = ", ".join(map(str, missing)) if missing else "named: stages is empty"
        raise SwapError(f"{type(model).__name__} has no stage {wrong}; {has}")
    blocks = [pair for stage in sorted(set(stages)) for pair in blocks_by_stage[stage]]
    for name, block in blocks:
        if type(block) not in (*BLOCKS, *BLOCKS.values()):
            kinds = ", ".join(sorted({f"{kind.__module__}.{kind.__name__}" for kind in BLOCKS}))
            raise SwapError(f"{name} is a {type(block).__name__}; attention goes into blocks of {kinds}")
    return blocks


def _spatial_name(block: nn.Module) -> str:
    """The 3x3 convolution before attention."""
    return "conv1" if isinstance(block, (torchvision_resnet.BasicBlock, timm_resnet.BasicBlock)) else "conv2"


def _spatial(block: nn.Module) -> nn.Conv2d:
    return cast(nn.Conv2d, getattr(block, _spatial_name(block)))


def _width(block: nn.Module) -> int:
    return _spatial(block).out_channels


def _slot(block: nn.Module) -> Slot:
    """The slot of an attended block; a port keeps it as its host."""
    attn = cast(nn.Module, block.attn)
    return cast(Slot, attn.host if isinstance(attn, Attended) else attn)


def _heads_of(block: nn.Module) -> int:
    return 0 if type(block) in BLOCKS else _slot(block).heads


def _is_parallel(block: nn.Module) -> bool:
    return type(block) not in BLOCKS and _slot(block).parallel


def _add_slot(block: nn.Module, name: str, heads: int, deformable: bool | DeformableConv) -> None:
    """Add a slot for this number of heads, and the deformable convolution, to a block, in place."""
    conv = _spatial(block)
    if type(block) in BLOCKS:
        block.__class__ = BLOCKS[type(block)]
        block.attn = Slot(conv.out_channels, heads).to(conv.weight).train(block.training)
    _slot(block).heads = heads
    if isinstance(conv, DeformableConv2d):
        if isinstance(deformable, DeformableConv) and deformable != conv.options:
            raise SwapError(
                f"{name}.{_spatial_name(block)} is a {spell(conv.options)} already; as {spell(deformable)} its offsets "
                "would be lost: give deformable=True to keep it, or use a new model"
            )
    elif deformable:
        options = deformable if isinstance(deformable, DeformableConv) else DeformableConv()
        setattr(block, _spatial_name(block), DeformableConv2d.from_conv(conv, options).train(conv.training))


def attended_resnet18(
    *, stages: Sequence[int] = (3, 4), deformable: bool | str = False, mixer: str | None = None, heads: int = 8,
    parallel: bool = False, stem: int = 4, frozen: bool = False, img_size: int | tuple[int, int] = 224, **options: Any,
) -> nn.Module:  # fmt: skip
    """timm's ResNet-18 with empty slots for attention. Options as in `attended_resnet`."""
    return attended_resnet("resnet18", stages, deformable, mixer, heads, parallel, stem, frozen, img_size, options)


def attended_resnet50(
    *, stages: Sequence[int] = (3, 4), deformable: bool | str = False, mixer: str | None = None, heads: int = 8,
    parallel: bool = False, stem: int = 4, frozen: bool = False, img_size: int | tuple[int, int] = 224, **options: Any,
) -> nn.Module:  # fmt: skip
    """timm's ResNet-50, the paper's backbone, with empty slots for attention. Options as in `attended_resnet`."""
    return attended_resnet("resnet50", stages, deformable, mixer, heads, parallel, stem, frozen, img_size, options)


def attended_resnet(
    name: str, stages: Sequence[int], deformable: bool | str, mixer: str | None, heads: int, parallel: bool,
    stem: int, frozen: bool, img_size: int | tuple[int, int], options: dict[str, Any],
) -> nn.Module:  # fmt: skip
    """A ResNet of timm whose `stages` have slots, for `create_model(..., mixer)` or a study's row.

    mixer: the spelling of the mechanism in the slots; None leaves them empty. deformable: True, or the spelled options.
    heads, parallel: as in `attend`. stem: stride in pixels before the first stage; 4 is timm's own, 1 and 2 are one 3x3
    convolution without pooling, for small images. frozen: the stem, the first stage and all batch normalisation keep
    their weights and statistics, as in detectors that begin with published weights. img_size: gives mechanisms their
    first grid; the network takes any size. options: of timm, such as pretrained, num_classes, in_chans, channels,
    features_only.
    Raises: ConfigError for sizes or options that do not fit; the errors of `attend`.
    """
    if stem not in (1, 2, 4) or (stem != 4 and (options.get("features_only") or options.get("pretrained"))):
        raise ConfigError(f"stem is 4, or 1 or 2 for classifiers without pretrained weights, not {stem} with {options}")
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ConfigError(f"img_size is one side in pixels or (height, width), not {img_size!r}")
    model: Any = timm.create_model(name, **options)
    model.img_size = size
    if stem != 4:
        old = model.conv1
        model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, stem, 1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    if frozen:
        freeze_batch_norm_2d(model)
        for part in (model.conv1, model.layer1):
            part.requires_grad_(False)
    return attend(model, mixer, stages, deformable, heads=heads, parallel=parallel)
