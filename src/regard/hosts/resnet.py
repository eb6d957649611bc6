"""Attended residual blocks: attention inside a ResNet's blocks (Zhu et al. 2019, Figure 2a).

    1x1 conv, norm, ReLU -> 3x3 conv (regular or deformable), norm, ReLU -> x + gamma Attn(x) -> 1x1 conv, norm -> add

gamma is zero at first, so that a trained network computes what it did. In a basic block (ResNet-18 and -34) attention
follows the norm and ReLU of the first 3x3 convolution: those of the second come after the addition.
A block becomes an instance of a subclass of its own class, with one more child, `attn`; all other names stay. The child
is a `Slot`, which `swap` fills, removes and restores like any attention.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet

from regard.core import ConfigError, Grid, MixerConfig, Site, SwapError
from regard.mixers.deform import DeformableConv, DeformableConv2d
from regard.mixers.spell import parse_mixer, spell

from .hosted import CHILD, Hosted


class Slot(nn.Module):
    """An empty place for attention on maps of `dim` channels: the identity. start: gamma of what is put here."""

    like: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads, self.start = dim, heads, 0.0
        self.cells = (1, 1)
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def note(self, x: Tensor) -> None:
        """Remember the grid of a pass, for a later swap."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or not isinstance(x, Tensor)  # torch.fx
        if not traced:
            self.cells = (x.shape[-2], x.shape[-1])

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        self.note(x)
        return x


class Attended(Hosted):
    """x + gamma Attn(x) in a slot, on whatever grid the map has; without a mixer x itself, and no gamma."""

    library: ClassVar[tuple[type, ...]] = (Slot,)

    gamma: nn.Parameter | None

    def __init__(self, host: Any, config: MixerConfig, site: Site, shared: nn.Module | None) -> None:
        super().__init__(host, config, site, shared)
        gamma = nn.Parameter(self.like.new_full((1,), host.start))  # FSDP2 shards no tensor without dimensions
        self.register_parameter("gamma", gamma if config.uses else None)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        """Queries, keys and values have no bias, as in the paper; the output has one."""
        return Site(dim=module.dim, heads=module.heads, grid=grid, qkv_bias=False, layer=layer, name=name)

    @classmethod
    def grid_of(cls, module: Any) -> Grid:
        return Grid(*module.cells)

    def grid(self) -> Grid:
        return self.grid_of(self.host)

    def release(self) -> nn.Module:
        """The empty slot; what is put there next goes on with the present gamma."""
        host = cast(Slot, super().release())
        host.start = 0.0 if self.gamma is None else float(self.gamma.detach())
        return host

    def no_weight_decay(self) -> set[str]:
        """gamma, and the vectors u and t of E3 and E4."""
        vectors = {
            f"{CHILD}.{name}" for name, _ in self.mixer.named_parameters() if name in ("operator.u", "operator.t")
        }
        return vectors | ({"gamma"} if self.gamma is not None else set())

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        gamma = state_dict.get(f"{prefix}gamma")
        if gamma is not None and gamma.ndim == 0:  # as it was before FSDP2 could shard it
            state_dict[f"{prefix}gamma"] = gamma.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        cast(Slot, self.host).note(x)
        if self.gamma is None:
            return x
        height, width = x.shape[-2:]
        out = self.mixer(x.flatten(2).mT, Grid(height, width))
        return x + self.gamma * out.mT.unflatten(-1, (height, width))


# blocks: the forward passes of the libraries, with one more step


class TorchvisionBasic(torchvision_resnet.BasicBlock):
    """torchvision's block of ResNet-18 and -34."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.attn(self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class TorchvisionBottleneck(torchvision_resnet.Bottleneck):
    """torchvision's block of ResNet-50 and larger, ResNeXt and Wide ResNet."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.attn(self.relu(self.bn2(self.conv2(out))))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class TimmBasic(timm_resnet.BasicBlock):
    """timm's block of ResNet-18 and -34; attention comes after its anti-aliasing."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))  # type: ignore[misc]
        out = self.bn2(self.conv2(self.attn(out)))
        return _add_timm(self, x, out, self.act2)


class TimmBottleneck(timm_resnet.Bottleneck):
    """timm's block of ResNet-50 and larger; attention comes after its anti-aliasing."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(out)))))  # type: ignore[misc]
        out = self.bn3(self.conv3(self.attn(out)))
        return _add_timm(self, x, out, self.act3)


def _add_timm(block: TimmBasic | TimmBottleneck, x: Tensor, out: Tensor, act: nn.Module) -> Tensor:
    out = out if block.se is None else block.se(out)
    out = out if block.drop_path is None else block.drop_path(out)
    out += x if block.downsample is None else block.downsample(x)
    return cast(Tensor, act(out))


BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    torchvision_resnet.BasicBlock: TorchvisionBasic,
    torchvision_resnet.Bottleneck: TorchvisionBottleneck,
    timm_resnet.BasicBlock: TimmBasic,
    timm_resnet.Bottleneck: TimmBottleneck,
}
BASIC = (TorchvisionBasic, TimmBasic)


def attend(
    model: nn.Module,
    mixer: MixerConfig | str | None,
    stages: Sequence[int] = (3, 4),
    deformable: bool | str | DeformableConv = False,
    *,
    heads: int = 8,
    example: Tensor | None = None,
) -> nn.Module:
    """Put attention into the residual blocks of a ResNet of torchvision or timm, in place; returns the model.

    The model may contain the ResNet, such as a feature pyramid or a detector's backbone. mixer: a configuration, its
    spelling, or None for empty slots. stages: numbers of `layer1` to `layer4`; the paper's conv4 and conv5 are 3 and 4.
    deformable: the 3x3 convolution before attention becomes a deformable one with the same weights and offsets of zero
    (True, or the options, which may be spelled: version, groups, offset_kernel, mask_init); `lr_scale()` of that layer
    tells the slower rate of its offsets. False leaves the convolution as it is. example: an input that tells
    mechanisms their first grid; other sizes may follow. Without one: the size that the model names, or 224x224.
    With attention alone the model's output is bit-identical at first, with deformable convolutions it is equal up to
    rounding of coordinates in float32: about 1e-6 of its size on maps of 14 cells, 3e-6 of 84, 3e-5 of 1333.
    torchvision's `create_feature_extractor` needs tracer_kwargs={"leaf_modules": [Attended, DeformableConv2d]}.
    Blocks that were attended before get what is asked now: another mechanism (with weights that fit, as `swap` does),
    another number of heads, empty slots for None. Deformable convolutions keep their options.
    Raises: SwapError if the model has not these stages, or other blocks, or deformable convolutions with other options;
    ConfigError for stages that are no numbers, heads that do not divide the channels and options that a convolution
    has itself; UnsupportedError for a convolution that a deformable one cannot replace; the errors of `plan_swap`.
    The model is then as it was.
    """
    from .looking import example_of
    from .owners import tidy
    from .swap import plan_layers

    moving = parse_mixer(deformable) if isinstance(deformable, str) else deformable
    if not isinstance(moving, bool | DeformableConv):
        raise ConfigError(f"deformable is True, False or a DeformableConv with its options, not {deformable!r}")
    known = parse_mixer(mixer) if isinstance(mixer, str) else mixer
    if known is not None and not isinstance(known, MixerConfig):
        raise ConfigError(f"mixer is a configuration, its spelling or None for empty slots, not {mixer!r}")
    found = blocks_of(model, stages)
    before = [(block, type(block), _spatial(block), _heads_of(block)) for _, block in found]
    for name, block in found:
        if type(heads) is not int or heads < 1 or _width(block) % heads:
            raise ConfigError(
                f"{name} has {_width(block)} channels, not a multiple of {heads} heads; give another heads="
            )
    try:
        for name, block in found:
            _open(block, name, heads, moving)
        if known is not None:
            if example is None:
                example = example_of(model, default=(224, 224))
            plan_layers(model, known, [f"{name}.attn" for name, _ in found], example).apply()
    except Exception:
        for block, kind, conv, number in before:
            if kind in BLOCKS:
                block.__class__ = kind
                block._modules.pop("attn", None)
            else:
                _slot(block).heads = number
            setattr(block, _spatial_name(block), conv)
        raise
    if known is None:
        for _, block in found:
            if isinstance(block.attn, Attended):
                block.attn = block.attn.release()
        tidy(model)
    return model


def blocks_of(model: nn.Module, stages: Sequence[int]) -> list[tuple[str, nn.Module]]:
    """Names and blocks of some stages of the ResNet in a model. Raises: ConfigError for no numbers; SwapError."""
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not all(type(stage) is int for stage in stages):
        raise ConfigError(f"stages are numbers of layer1 to layer4, such as (3, 4), not {stages!r}")
    there: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in ("layer1", "layer2", "layer3", "layer4"):
            there.setdefault(int(last[-1]), []).extend(
                (f"{name}.{label}", block) for label, block in module.named_children()
            )
    missing = sorted(set(stages) - set(there))
    if missing or not stages:
        has = f"it has {', '.join(map(str, sorted(there)))}" if there else "it has no layer1 to layer4: not a ResNet"
        said = ", ".join(map(str, missing)) if missing else "named: stages is empty"
        raise SwapError(f"{type(model).__name__} has no stage {said}; {has}")
    found = [pair for stage in sorted(set(stages)) for pair in there[stage]]
    for name, block in found:
        if type(block) not in (*BLOCKS, *BLOCKS.values()):
            kinds = ", ".join(sorted({f"{kind.__module__}.{kind.__name__}" for kind in BLOCKS}))
            raise SwapError(f"{name} is a {type(block).__name__}; attention goes into blocks of {kinds}")
    return found


def _spatial_name(block: nn.Module) -> str:
    """The 3x3 convolution before attention."""
    return "conv1" if isinstance(block, (torchvision_resnet.BasicBlock, timm_resnet.BasicBlock)) else "conv2"


def _spatial(block: nn.Module) -> nn.Conv2d:
    return cast(nn.Conv2d, getattr(block, _spatial_name(block)))


def _width(block: nn.Module) -> int:
    return _spatial(block).out_channels


def _slot(block: nn.Module) -> Slot:
    """The slot of an attended block, which a port has inside."""
    attn = cast(nn.Module, block.attn)
    return cast(Slot, attn.host if isinstance(attn, Attended) else attn)


def _heads_of(block: nn.Module) -> int:
    return 0 if type(block) in BLOCKS else _slot(block).heads


def _open(block: nn.Module, name: str, heads: int, deformable: bool | DeformableConv) -> None:
    """A slot for so many heads, and the deformable convolution."""
    conv = _spatial(block)
    if type(block) in BLOCKS:
        block.__class__ = BLOCKS[type(block)]
        block.attn = Slot(conv.out_channels, heads).to(conv.weight).train(block.training)
    _slot(block).heads = heads
    if isinstance(conv, DeformableConv2d):
        if isinstance(deformable, DeformableConv) and deformable != conv.options:
            raise SwapError(
                f"{name}.{_spatial_name(block)} is a {spell(conv.options)} already; as {spell(deformable)} its offsets "
                "would be lost: give deformable=True to keep it, or attend to a new model"
            )
    elif deformable:
        options = deformable if isinstance(deformable, DeformableConv) else DeformableConv()
        setattr(block, _spatial_name(block), DeformableConv2d.from_conv(conv, options).train(conv.training))


def attended_resnet18(
    *,
    stages: Sequence[int] = (3, 4),
    deformable: bool | str = False,
    mixer: str | None = None,
    heads: int = 8,
    stem: int = 4,
    img_size: int | tuple[int, int] = 224,
    **options: Any,
) -> nn.Module:
    """timm's ResNet-18 with open slots for attention. Options as in `attended`."""
    return attended("resnet18", stages, deformable, mixer, heads, stem, img_size, options)


def attended_resnet50(
    *,
    stages: Sequence[int] = (3, 4),
    deformable: bool | str = False,
    mixer: str | None = None,
    heads: int = 8,
    stem: int = 4,
    img_size: int | tuple[int, int] = 224,
    **options: Any,
) -> nn.Module:
    """timm's ResNet-50, the paper's backbone, with open slots for attention. Options as in `attended`."""
    return attended("resnet50", stages, deformable, mixer, heads, stem, img_size, options)


def attended(
    name: str, stages: Sequence[int], deformable: bool | str, mixer: str | None, heads: int, stem: int,
    img_size: int | tuple[int, int], options: dict[str, Any],
) -> nn.Module:  # fmt: skip
    """A ResNet of timm whose `stages` have slots, which `create_model(..., mixer)` or a study's row fills.

    mixer: spelled, where the host itself shall have it. deformable: True, or the options spelled. stem: pixels of one
    cell before the first stage; 4 is timm's own, 1 and 2 are one 3x3 convolution without pooling, for small images.
    img_size: tells mechanisms their first grid; the network takes any size. options: timm's, such as
    pretrained, num_classes, in_chans, channels, features_only.
    Raises: ConfigError.
    """
    import timm

    if stem not in (1, 2, 4) or (stem != 4 and (options.get("features_only") or options.get("pretrained"))):
        raise ConfigError(
            f"stem is 4, or 1 or 2 for a classifier without pretrained weights, not {stem} with {options}"
        )
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
    return attend(model, mixer, stages, deformable, heads=heads)
