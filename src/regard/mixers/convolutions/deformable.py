"""Deformable convolution: predicted offsets move the taps of every query (Zhu et al. 2019, Eq. 4; Dai et al. 2017).

    y_q = sum over taps p of W_p m_{q,p} x(q + p + o_q(p)) + b,   x(a) = sum_k prod_n max(0, 1 - |a_n - k_n|) x_k

Version 1 has m = 1; version 2 (Zhu et al. 2019b) predicts it. Samples beyond the border are zero. On sequences offsets
lie along the sequence; a causal tap moves no further than the query, so that no later token is read. Left of the first
token it reads zero.
Prefix and suffix tokens are never sampled; their output is the mean of the patch tokens' outputs, or zero (`extra`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    Card,
    ConfigError,
    Cost,
    Grid,
    Mask,
    ShapeError,
    Site,
    UnsupportedError,
    check_accounting,
    operator_function,
)
from regard.core.view import Samples
from regard.mixers.shared.executions import Situation, check_execution, choose
from regard.mixers.shared.native import runs_native
from regard.mixers.shared.precision import upcast, without_autocast

from . import sampling
from .deformable_native import sample_native
from .sampling import TapsConfig, TapsMixer

__all__ = ["DeformableConv", "deformable_conv", "deformable_conv_reference"]

Pair = int | tuple[int, int]
FROM_CONV = ("kernel", "axes", "causal", "dilation", "extra")  # fields that `from_conv` takes from the convolution


class Frame(NamedTuple):
    """Positions of the taps before they move: sizes of kernel and output, stride, padding, dilation; offset groups."""

    kernel: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


@operator_function
def deformable_conv_reference(
    x: Float[Tensor, "B C h w"], weight: Float[Tensor, "O c kh kw"], offsets: Float[Tensor, "B P hh ww"], *,
    mask: Float[Tensor, "B Q hh ww"] | None = None, bias: Float[Tensor, " O"] | None = None, stride: Pair = 1,
    padding: Pair = 0, dilation: Pair = 1,
) -> Float[Tensor, "B O hh ww"]:  # fmt: skip
    """Every sample is a sum over the whole map with the weights of the bilinear kernel."""
    frame = check_offsets(x, weight, offsets, mask, bias, stride, padding, dilation)
    points = positions(offsets, frame)  # (B, g, K, hh, ww, 2)
    weights = [
        sampling.tent(points[..., axis, None] - torch.arange(side, device=x.device)).to(x.dtype)
        for axis, side in enumerate(x.shape[2:])
    ]
    samples = torch.einsum("bgcij,bgkhwi,bgkhwj->bgckhw", x.unflatten(1, (frame.groups, -1)), *weights)
    if mask is not None:
        samples = samples * mask.unflatten(1, (frame.groups, -1))[:, :, None].to(x.dtype)
    return sampling.grouped_product(weight, samples.flatten(1, 2), bias)


@operator_function
def deformable_conv(
    x: Float[Tensor, "B C h w"], weight: Float[Tensor, "O c kh kw"], offsets: Float[Tensor, "B P hh ww"], *,
    mask: Float[Tensor, "B Q hh ww"] | None = None, bias: Float[Tensor, " O"] | None = None, stride: Pair = 1,
    padding: Pair = 0, dilation: Pair = 1, execution: str = "auto",
) -> Float[Tensor, "B O hh ww"]:  # fmt: skip
    """The same by sampling. Channels are ordered as in `torchvision.ops.deform_conv2d`, whose kernel runs on CUDA.

    offsets: P = 2 groups taps channels: group of contiguous input channels, tap (row by row), (dy, dx); in grid cells,
    in float32 or better (bfloat16 is off by a quarter of a cell at 64). mask: Q = groups taps factors of the samples.
    At whole positions, where samples bend, gradients of offsets are the derivatives towards larger ones.
    weight: c = C / weight groups, which are independent of the offsets' groups. Pairs are (rows, columns).
    execution: "torchvision" (its operator), "native" (a compiled kernel for the CPU, which cannot be differentiated
    twice), "eager", or "auto", which follows the table in docs/mechanisms.md.
    Raises: ShapeError for tensors that do not fit; ConfigError for an unknown execution; UnsupportedError where
    the compiled kernel cannot run.
    """
    check_execution(execution, ("torchvision", "native", "eager"))
    frame = check_offsets(x, weight, offsets, mask, bias, stride, padding, dilation)
    native = runs_native("deformable_conv", execution, x)
    facts = frozenset(["native"] * native)
    size = math.prod(frame.out)
    situation = Situation(device=x.device, dtype=x.dtype, tokens=size, keys=x.shape[2:].numel(), facts=facts)
    execution = choose("DeformableConv", execution, situation)
    if execution == "torchvision":
        return _kernel(x, weight, offsets, mask, bias, frame)
    points = positions(offsets, frame)
    factors = None if mask is None else mask.unflatten(1, (frame.groups, -1))
    sample = sampling.sample_rows if x.dtype in (torch.bfloat16, torch.float16) else sampling.sample_maps
    if execution == "native":
        sample = sample_native
    samples = sample(x, points, factors)  # (B, C, K, L)
    return _weighted_sum(weight, samples, bias).unflatten(-1, frame.out)


def check_offsets(
    x: Tensor, weight: Tensor, offsets: Tensor, mask: Tensor | None, bias: Tensor | None, stride: Pair, padding: Pair,
    dilation: Pair,
) -> Frame:  # fmt: skip
    """Check the inputs of `deformable_conv` and its reference; returns the positions of the taps.

    Raises: ShapeError, ConfigError.
    """
    if not x.ndim == weight.ndim == offsets.ndim == 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, offsets))
        raise ShapeError(f"deformable_conv: x, weight, offsets have shapes {shapes}; expected four axes each")
    channels, (outputs, width, *kernel) = x.shape[1], weight.shape
    if channels % width or outputs % (channels // width):
        raise ShapeError(
            f"deformable_conv: weight {tuple(weight.shape)} does not fit {channels} channels; "
            "its second axis is channels / weight groups, its first a multiple of the groups"
        )
    taps = math.prod(kernel)
    groups, rest = offsets.shape[1] // (2 * taps), offsets.shape[1] % (2 * taps)
    if rest or not groups or channels % groups:
        raise ShapeError(
            f"deformable_conv: offsets have {offsets.shape[1]} channels; expected 2 x {taps} taps x groups, "
            f"the groups dividing {channels} channels"
        )
    strides, paddings, dilations = (_pair(value) for value in (stride, padding, dilation))
    if min(*strides, *dilations) < 1 or min(paddings) < 0:
        raise ConfigError(f"stride, dilation are at least 1, padding at least 0, not {stride}, {dilation}, {padding}")
    sides = (
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(x.shape[2:], paddings, dilations, kernel, strides, strict=True)
    )
    out = cast(tuple[int, int], tuple(sides))
    if min(out) < 1:
        raise ShapeError(
            f"deformable_conv: {'x'.join(map(str, kernel))} taps with dilation {dilation} do not fit a map of "
            f"{x.shape[2]}x{x.shape[3]} cells with padding {padding}"
        )
    predictions = {"offsets": (offsets, 2 * groups * taps), "mask": (mask, groups * taps)}
    for name, (value, number) in predictions.items():
        if value is not None and tuple(value.shape) != (x.shape[0], number, *out):
            raise ShapeError(
                f"deformable_conv: {name} {tuple(value.shape)}; expected {(x.shape[0], number, *out)} for this stride, "
                "padding and dilation"
            )
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise ShapeError(f"deformable_conv: bias has shape {tuple(bias.shape)}; expected ({outputs},)")
    return Frame(cast(tuple[int, int], tuple(kernel)), out, strides, paddings, dilations, groups)


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def positions(offsets: Tensor, frame: Frame) -> Float[Tensor, "B g K hh ww 2"]:
    """The positions that the taps read, (y, x) in grid cells, in float32 or better."""
    moves = upcast(offsets).unflatten(1, (frame.groups, -1, 2)).movedim(3, -1)
    starts = []
    for axis, (kernel, out) in enumerate(zip(frame.kernel, frame.out, strict=True)):
        tap = torch.arange(kernel, device=offsets.device) * frame.dilation[axis] - frame.padding[axis]
        cell = torch.arange(out, device=offsets.device) * frame.stride[axis]
        starts.append(tap[:, None] + cell)  # (k, out)
    y, x = starts[0][:, None, :, None], starts[1][None, :, None, :]
    shape = (*frame.kernel, *frame.out)
    start = torch.stack([y.expand(shape), x.expand(shape)], -1).flatten(0, 1)  # (K, hh, ww, 2)
    return start + moves


def _weighted_sum(weight: Tensor, samples: Float[Tensor, "B C K L"], bias: Tensor | None) -> Float[Tensor, "B O L"]:
    """One matrix product per weight group; depth-wise weights are multiplied and summed."""
    groups = samples.shape[1] // weight.shape[1]
    if weight.shape[1] == 1 and groups > 1:
        weights = weight.flatten(1).unflatten(0, (groups, -1))  # (C, O / C, K)
        out = (samples[:, :, None] * weights[..., None]).sum(3).flatten(1, 2)
    elif groups == 1 and samples.stride(1) == 1:  # channels last in memory
        flat = weight.flatten(2).permute(0, 2, 1).flatten(1)  # (O, K C)
        out = (samples.permute(0, 3, 2, 1).flatten(2) @ flat.mT).mT
    elif groups == 1:
        out = weight.flatten(1) @ samples.flatten(1, 2)
    else:
        flat = weight.flatten(1).unflatten(0, (groups, -1))  # (groups, O', c K)
        out = (flat @ samples.unflatten(1, (groups, -1)).flatten(2, 3)).flatten(1, 2)
    return out if bias is None else out + bias[:, None].to(out.dtype)


def _kernel(x: Tensor, weight: Tensor, offsets: Tensor, mask: Tensor | None, bias: Tensor | None, f: Frame) -> Tensor:
    """torchvision's kernel, in float32 for half precision. Its backward pass is not deterministic."""
    from torchvision.ops import deform_conv2d

    with without_autocast(x.device):
        work = upcast(x)
        tensors = [None if t is None else t.to(work.dtype) for t in (offsets, weight, bias, mask)]
        out: Tensor = deform_conv2d(work, *tensors[:3], f.stride, f.padding, f.dilation, tensors[3])
    return out.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class DeformableConv(TapsConfig):
    """kernel, axes, causal, extra: see `TapsConfig`. version: 2 also predicts a factor for every sample.

    groups: of contiguous channels with offsets of their own. dilation: step between taps in grid cells before they
    move. offset_kernel: side of the convolution that predicts the offsets. The paper's Eq. 4 has w_m^T x_q, one linear
    map of the query: that is offset_kernel=1 without its bias, which the equation does not have and the predictor here
    always has. The published code has the kernel's size, as the default here. mask_init: the factor is
    2 mask_init sigmoid(.) and starts at mask_init; 0.5 is the published code's, which halves a trained convolution.
    Offsets start at zero: a regular convolution. Their predictor learns at a tenth of the rate (`lr_scale`).
    Raises: ConfigError for impossible numbers or mask_init without version=2; building, for groups that do not divide
    the channels.
    """

    version: Literal[1, 2] = 1
    groups: int = 1
    dilation: int = 1
    offset_kernel: int = 3
    mask_init: float = 1.0

    card = Card(
        title="Deformable convolution", source="Zhu et al. 2019, Eq. 4; Dai et al. 2017 (v1); Zhu et al. 2019b (v2)",
        formula="sum_p W_p m_{q,p} x(q + p + o_q(p))", complexity="O(N C^2 N_k)", query_content=True, key_content=False,
        relative_position=True, dynamic="one-step", scaling=frozenset({"routing"}),
        expert_type="linear layer on N_k points", expert_count="N", construction="offset prediction",
        topology="N x one-to-one", conditions="Q",
        prefix="never sampled; the mean of the patch tokens' outputs, or zero", row_maps=False,
    )  # fmt: skip
    samples = ("DeformableConv(groups=2)", "DeformableConv(version=2, offset_kernel=1, dilation=2, mask_init=0.5)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.groups, self.offset_kernel) < 1:
            raise ConfigError(f"groups and offset_kernel are at least 1, not {self.groups} and {self.offset_kernel}")
        sampling.check_dilation(self.dilation)
        if self.offset_kernel % 2 == 0 and not self.causal:
            raise ConfigError(f"offset_kernel is odd (any where causal), not {self.offset_kernel}")
        if not 0 < self.mask_init <= 1:
            raise ConfigError(f"mask_init is the first factor of a sample, above 0 and at most 1, not {self.mask_init}")
        if self.version == 1 and self.mask_init != DeformableConv.mask_init:
            raise ConfigError(f"version=1 has no factors, so no mask_init={self.mask_init}; give version=2")

    def build(self, site: Site, shared: nn.Module | None = None) -> "DeformableConvMixer":
        sampling.check_groups("DeformableConv", self.groups, site)
        return DeformableConvMixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Paper: N C^2 N_k. Executed: also the predictor. The products of the interpolation are not counted."""
        check_accounting(accounting)
        n, dim = site.grid.cells, site.dim
        weight = dim * dim * self.taps
        outputs = (self.axes + (self.version == 2)) * self.groups * self.taps  # offsets, and factors in version 2
        inputs = dim * self.offset_kernel**self.axes
        params = weight + dim * site.out_bias + outputs * (inputs + 1)
        return Cost(params, n * (weight + (outputs * inputs if accounting == "executed" else 0)))

    def interpolation(self, site: Site) -> int:
        """Products of the bilinear interpolation: 2^axes for each tap of each channel."""
        return 2**self.axes * self.taps * site.grid.cells * site.dim


class DeformableConvMixer(TapsMixer):
    """conv: the deformable convolution."""

    output = "conv"
    config: DeformableConv

    def __init__(self, config: DeformableConv, site: Site) -> None:
        super().__init__(config, site)
        self.conv: DeformableConv1d | DeformableConv2d
        if config.axes == 1:
            self.conv = DeformableConv1d(site.dim, config, site.out_bias)
        else:
            padding = config.dilation * (config.kernel // 2)
            self.conv = DeformableConv2d(
                site.dim, site.dim, config.kernel, padding=padding, dilation=config.dilation, bias=site.out_bias,
                options=config,
            )  # fmt: skip

    def mix(self, x: Tensor, valid: Tensor | None, plain: bool) -> Tensor:
        return cast(Tensor, self.conv(x, plain))

    def samples(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any) -> Samples | None:
        """The taps of each group, alike or by their factors; None for sequences. Other tokens sample nothing."""
        if not isinstance(self.conv, DeformableConv2d):
            return None
        _, image, _ = self.split(x, grid, mask)
        points, factors = self.conv.samples(image[:1])
        shares = factors / factors.sum(2, keepdim=True)
        points, shares = points[0].flatten(2, 3).transpose(1, 2), shares[0].flatten(2).mT
        pad = (0, 0, grid.prefix, grid.suffix)
        return Samples(F.pad(points, (0, 0, *pad)), F.pad(shares, pad))


class DeformableConv2d(nn.Conv2d):
    """A deformable convolution of maps for any place in a network; weight and bias are named as in `nn.Conv2d`.

    The child `offset` predicts offsets, and factors for version 2 (the last third of its channels), with the stride and
    dilation of the convolution. Fields as in `DeformableConv`. Raises: ConfigError for groups that do not divide the
    channels, or an offset kernel that the padding does not allow.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: Pair, *, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1,
        weight_groups: int = 1, bias: bool = True, options: "DeformableConv | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(inputs, outputs, _pair(kernel), stride, padding, dilation, weight_groups, bias)
        self.options = options = options or DeformableConv()
        if inputs % options.groups:
            raise ConfigError(f"{options.groups} groups of offsets do not divide {inputs} channels")
        side = options.offset_kernel
        paddings = [
            p + d * (side - k) // 2 for p, d, k in zip(_pair(padding), self.dilation, self.kernel_size, strict=True)
        ]
        if min(paddings) < 0 or any((side - k) * d % 2 for k, d in zip(self.kernel_size, self.dilation, strict=True)):
            raise ConfigError(f"offset_kernel={side} gives another size than kernel {kernel} with padding {padding}")
        outs = (1 + options.version) * options.groups * math.prod(self.kernel_size)
        self.offset = ZeroConv(inputs, outs, side, _pair(stride), (paddings[0], paddings[1]), _pair(dilation))

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, options: "DeformableConv | None" = None) -> "DeformableConv2d":
        """With the weights of a convolution, which it equals until the offsets move (and for mask_init=1).

        Weights that were frozen stay so. kernel, dilation, padding and stride are the convolution's: of options only
        version, groups, offset_kernel and mask_init are read.
        Raises: UnsupportedError for another padding than a number of zeros, or another module than a plain `nn.Conv2d`
        (a subclass or a reparametrisation may compute something else); ConfigError for other options.
        """
        options = options or DeformableConv()
        changed = [name for name in FROM_CONV if getattr(options, name) != getattr(DeformableConv(), name)]
        if changed:
            fields = ", ".join(f"{name}={getattr(options, name)!r}" for name in changed)
            raise ConfigError(f"{fields}: these come from the replaced convolution; leave them at their defaults")
        if type(conv) is not nn.Conv2d or set(conv.state_dict()) - {"weight", "bias"}:
            keys = ", ".join(conv.state_dict())
            raise UnsupportedError(f"only a plain nn.Conv2d can be replaced, not a {type(conv).__name__} with {keys}")
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise UnsupportedError(f"zero padding by numbers is needed, not {conv.padding_mode!r}, {conv.padding!r}")
        layer = cls(
            conv.in_channels, conv.out_channels, cast(Pair, conv.kernel_size), stride=cast(Pair, conv.stride),
            padding=cast(Pair, conv.padding), dilation=cast(Pair, conv.dilation), weight_groups=conv.groups,
            bias=conv.bias is not None, options=options,
        ).to(conv.weight)  # fmt: skip
        layer.load_state_dict(conv.state_dict(), strict=False)
        for name, parameter in conv.named_parameters():
            layer.get_parameter(name).requires_grad_(parameter.requires_grad)
        return layer

    def lr_scale(self) -> dict[str, float]:
        """Local names of parameters -> factor of the learning rate (Zhu et al. 2019): 0.1 for the predictor."""
        return {f"offset.{name}": 0.1 for name, _ in self.offset.named_parameters()}

    def moves(self, x: Float[Tensor, "B C h w"]) -> tuple[Float[Tensor, "B P y x"], Float[Tensor, "B Q y x"] | None]:
        """The offsets and, for version 2, the factors that `deformable_conv` takes."""
        offsets = predict_offsets(x, self.offset)
        if self.options.version == 1:
            return offsets, None
        offsets, mask = offsets.split([offsets.shape[1] // 3 * 2, offsets.shape[1] // 3], 1)
        return offsets, 2 * self.options.mask_init * mask.sigmoid()

    def samples(
        self, x: Float[Tensor, "B C h w"]
    ) -> tuple[Float[Tensor, "B g K hh ww 2"], Float[Tensor, "B g K hh ww"]]:
        """Where each group samples the map for an output, (y, x) in cells, and with which factor."""
        offsets, mask = self.moves(x)
        frame = check_offsets(
            x, self.weight, offsets, mask, self.bias, self.stride, self.padding, self.dilation  # type: ignore[arg-type]
        )  # fmt: skip
        points = positions(offsets, frame)
        factors = points.new_ones(points.shape[:-1]) if mask is None else mask.unflatten(1, (frame.groups, -1))
        return points, factors

    def forward(self, x: Float[Tensor, "B C h w"], plain: bool = False) -> Float[Tensor, "B O hh ww"]:
        """plain: the reference form."""
        offsets, mask = self.moves(x)
        form = deformable_conv_reference if plain else deformable_conv
        frame = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return form(x, self.weight, offsets, mask=mask, bias=self.bias, **frame)  # type: ignore[arg-type]


class DeformableConv1d(nn.Conv2d):
    """The same on maps of one row, where taps move along it; stride 1, as many outputs as inputs."""

    def __init__(self, width: int, options: "DeformableConv", bias: bool = True) -> None:
        super().__init__(width, width, options.sides, dilation=(1, options.dilation), bias=bias)
        self.options = options
        outs = options.version * options.groups * options.taps
        self.offset = ZeroConv(width, outs, (1, options.offset_kernel), dilation=(1, options.dilation))

    def lr_scale(self) -> dict[str, float]:
        """Local names of parameters -> factor of the learning rate: 0.1 for the predictor."""
        return {f"offset.{name}": 0.1 for name, _ in self.offset.named_parameters()}

    def forward(self, x: Float[Tensor, "B C 1 n"], plain: bool = False) -> Float[Tensor, "B C 1 n"]:
        """plain: the reference form."""
        config, length = self.options, x.shape[-1]
        padded = F.pad(x, sampling.margins((1, config.offset_kernel), config.dilation, config.causal))
        offsets, mask = predict_offsets(padded, self.offset)[:, :, 0], None  # (B, g K, n)
        if config.version == 2:
            offsets, mask = offsets.chunk(2, 1)
            mask = (2 * config.mask_init * mask.sigmoid()).unflatten(1, (config.groups, -1))
        left = sampling.margins(config.sides, config.dilation, config.causal)[0]
        query = torch.arange(length, device=x.device)
        start = torch.arange(config.kernel, device=x.device)[:, None] * config.dilation - left + query
        points = start + offsets.unflatten(1, (config.groups, -1))  # (B, g, K, n)
        if config.causal:
            points = torch.where(points > query, query, points)
        sample = sampling.line_reference if plain else sampling.sample_line
        samples = sample(x[:, :, 0].unflatten(1, (config.groups, -1)), points)
        samples = (samples if mask is None else samples * mask[:, :, None].to(x.dtype)).flatten(1, 2)  # (B, C, K, n)
        if plain:
            return sampling.grouped_product(self.weight, samples[..., None, :], self.bias)
        return _weighted_sum(self.weight, samples, self.bias)[:, :, None]


def predict_offsets(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A convolution in float32 or better: offsets in half precision are off by up to a quarter of a grid cell at 64."""
    with without_autocast(x.device):
        bias = None if conv.bias is None else upcast(conv.bias)
        return F.conv2d(upcast(x), upcast(conv.weight), bias, conv.stride, conv.padding, conv.dilation)


class ZeroConv(nn.Conv2d):
    """The predictor of offsets and factors: starts at zero."""

    def reset_parameters(self) -> None:
        """Zero weight and bias."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
