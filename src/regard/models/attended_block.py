"""A residual block with a slot for attention, and the port of that slot (Zhu et al. 2019, Figure 2a).

    1x1 conv, norm, ReLU -> 3x3 conv (regular or deformable), norm, ReLU -> x + gamma Attn(x) -> 1x1 conv, norm -> add

In a parallel slot attention gets the input of the 3x3 convolution instead: Conv(x) + gamma Attn(x), where both have one
shape, that is in all blocks of a stage but the first.
gamma is initialised with zero, so that a trained network computes the same as before. In a basic block (ResNet-18 and
-34) attention follows the norm and ReLU of the first 3x3 convolution: those of the second come after the addition.
A block becomes an instance of a subclass of its own class, with one more child, `attn`; all other names are unchanged.
The child is a `Slot`, which `swap`, `remove` and `restore` treat as any attention.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet

from regard.core import Grid, MixerConfig, Site
from regard.swapping.host_names import MIXER_CHILD
from regard.swapping.layer import Port


class Attended(Port):
    """x + gamma Attn(x) in a slot, on a map of any size; a removed mixer gives x itself and has no gamma."""

    gamma: nn.Parameter | None

    def __init__(self, host: Any, config: MixerConfig, site: Site, shared: nn.Module | None) -> None:
        super().__init__(host, config, site, shared)
        gamma = nn.Parameter(self.placeholder.new_full((1,), host.initial_gamma))  # FSDP2 shards no scalar
        self.register_parameter("gamma", gamma if config.uses else None)

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        """Queries, keys and values have no bias, as in the paper; the output has one."""
        return Site(dim=module.dim, heads=module.heads, grid=grid, qkv_bias=False, layer=layer, name=name)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        return Grid(*module.grid_size)

    def restored_attention(self) -> nn.Module:
        """The empty slot; the next mechanism in it starts with the current gamma, 0 if attention was removed."""
        host = cast("Slot", super().restored_attention())
        host.initial_gamma = 0.0 if self.gamma is None else float(self.gamma.detach())
        return host

    def no_weight_decay(self) -> set[str]:
        """gamma, and the vectors u and t of the terms E3 and E4 of `Factors`."""
        names = {name for name, _ in self.mixer.named_parameters()} & {"operator.u", "operator.t"}
        vectors = {f"{MIXER_CHILD}.{name}" for name in names}
        return vectors | ({"gamma"} if self.gamma is not None else set())

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        gamma = state_dict.get(f"{prefix}gamma")
        if gamma is not None and gamma.ndim == 0:  # in older checkpoints gamma has no dimension
            state_dict[f"{prefix}gamma"] = gamma.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, x: Float[Tensor, "B C h w"], before: Float[Tensor, "B D y x"] | None = None
    ) -> Float[Tensor, "B C h w"]:
        """before: the input of the 3x3 convolution, which a parallel slot attends to where it has the shape of x."""
        cast("Slot", self.host).record_grid(x)
        if self.gamma is None:
            return x
        parallel = cast("Slot", self.host).parallel and before is not None and before.shape == x.shape
        source = cast(Tensor, before) if parallel else x
        height, width = x.shape[-2:]
        out = self.mixer(source.flatten(2).mT, Grid(height, width))
        return x + self.gamma * out.mT.unflatten(-1, (height, width))


class Slot(nn.Module):
    """An empty slot for attention on maps of `dim` channels: the identity.

    initial_gamma: the initial gamma of the next mechanism in the slot. grid_size: (height, width) of the last map.
    parallel: attention gets the input of the 3x3 convolution instead of its output.
    """

    port = Attended

    placeholder: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads, self.initial_gamma = dim, heads, 0.0
        self.grid_size = (1, 1)
        self.parallel = False
        self.register_buffer("placeholder", torch.zeros(()), persistent=False)

    def record_grid(self, x: Tensor) -> None:
        """Record the grid of a forward pass, for a later swap."""
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or not isinstance(x, Tensor)  # torch.fx
        if not tracing:
            self.grid_size = (x.shape[-2], x.shape[-1])

    def forward(
        self, x: Float[Tensor, "B C h w"], before: Float[Tensor, "B D y x"] | None = None
    ) -> Float[Tensor, "B C h w"]:
        self.record_grid(x)
        return x


# blocks: the forward passes of the libraries, with attention added


class TorchvisionBasic(torchvision_resnet.BasicBlock):
    """torchvision's block of ResNet-18 and -34."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.attn(self.relu(self.bn1(self.conv1(x))), x)
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class TorchvisionBottleneck(torchvision_resnet.Bottleneck):
    """torchvision's block of ResNet-50 and larger, ResNeXt and Wide ResNet."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.attn(self.relu(self.bn2(self.conv2(out))), out)
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class TimmBasic(timm_resnet.BasicBlock):
    """timm's block of ResNet-18 and -34; attention comes after its anti-aliasing."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))  # type: ignore[misc]
        out = self.bn2(self.conv2(self.attn(out, x)))
        return _add_timm(self, x, out, self.act2)


class TimmBottleneck(timm_resnet.Bottleneck):
    """timm's block of ResNet-50 and larger; attention comes after its anti-aliasing."""

    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        before = self.act1(self.bn1(self.conv1(x)))
        out = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(before)))))  # type: ignore[misc]
        out = self.bn3(self.conv3(self.attn(out, before)))
        return _add_timm(self, x, out, self.act3)


def _add_timm(block: TimmBasic | TimmBottleneck, x: Tensor, out: Tensor, act: nn.Module) -> Tensor:
    out = out if block.se is None else block.se(out)
    out = out if block.drop_path is None else block.drop_path(out)
    out += x if block.downsample is None else block.downsample(x)
    return cast(Tensor, act(out))


BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    torchvision_resnet.BasicBlock: TorchvisionBasic, torchvision_resnet.Bottleneck: TorchvisionBottleneck,
    timm_resnet.BasicBlock: TimmBasic, timm_resnet.Bottleneck: TimmBottleneck,
}  # fmt: skip
