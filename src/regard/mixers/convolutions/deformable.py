"""Deformable convolution: the taps of every cell move by predicted offsets (Zhu et al. 2019, Eq. 4; Dai et al. 2017).

    y_q = sum over taps p of W_p m_{q,p} x(q + p + o_q(p)) + b,   x(a) = sum_k prod_n max(0, 1 - |a_n - k_n|) x_k

Version 1 has m = 1; version 2 (Zhu et al. 2019b) predicts it. Samples beyond the border are zero. On sequences offsets
lie along the sequence; a causal tap goes no further than the query, so that no later cell is touched. It may go left of
the first token, where it sees zero.
Extra tokens are never sampled; they get the mean of the cells' outputs, or zero (`extra`).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, ConfigError, Cost, ShapeError, Site, UnsupportedError, check_accounting
from regard.mixers.shared.native_build import takes_native
from regard.mixers.shared.precision import exact_products, wide

from .deformable_native import sample_native
from .sampling import (
    TapsConfig,
    TapsMixer,
    check_groups,
    grouped,
    line_reference,
    margins,
    sample_line,
    sample_maps,
    sample_rows,
)

__all__ = ["DeformableConv", "deformable_conv", "deformable_conv_reference"]

Pair = int | tuple[int, int]
GIVEN = ("kernel", "axes", "causal", "dilation", "extra")  # what a convolution that is replaced says itself


class Frame(NamedTuple):
    """Where the taps lie before they move: sizes of kernel and output, stride, padding, dilation; offset groups."""

    kernel: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def deformable_conv_reference(
    x: Float[Tensor, "B C h w"],
    weight: Float[Tensor, "O c kh kw"],
    offsets: Float[Tensor, "B P hh ww"],
    *,
    mask: Float[Tensor, "B Q hh ww"] | None = None,
    bias: Float[Tensor, " O"] | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
) -> Float[Tensor, "B O hh ww"]:
    """Every sample is a sum over all cells, each with its weight in the bilinear kernel."""
    frame = check_offsets(x, weight, offsets, mask, bias, stride, padding, dilation)
    points = positions(offsets, frame)  # (B, g, K, hh, ww, 2)
    near = [
        F.relu(1 - (points[..., axis, None] - torch.arange(side, device=x.device)).abs())
        for axis, side in enumerate(x.shape[2:])
    ]
    near = [part.to(x.dtype) for part in near]
    seen = torch.einsum("bgcij,bgkhwi,bgkhwj->bgckhw", x.unflatten(1, (frame.groups, -1)), *near)
    if mask is not None:
        seen = seen * mask.unflatten(1, (frame.groups, -1))[:, :, None].to(x.dtype)
    return grouped(weight, seen.flatten(1, 2), bias)


def deformable_conv(
    x: Float[Tensor, "B C h w"],
    weight: Float[Tensor, "O c kh kw"],
    offsets: Float[Tensor, "B P hh ww"],
    *,
    mask: Float[Tensor, "B Q hh ww"] | None = None,
    bias: Float[Tensor, " O"] | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    execution: str = "auto",
) -> Float[Tensor, "B O hh ww"]:
    """The same, sampled. Orders are those of `torchvision.ops.deform_conv2d`, whose kernel runs on CUDA.

    offsets: P = 2 groups taps channels: group of contiguous input channels, tap (rows first), (dy, dx); in cells, in
    float32 or better (bfloat16 is off by a quarter of a cell at 64). mask: Q = groups taps factors of the samples.
    weight: c = C / weight groups, which are independent of the offsets' groups. Pairs are (rows, columns).
    execution: "eager", "native" (compiled code for the CPU; needs a C++ compiler once, cannot be differentiated twice)
    or "auto", which is torchvision's kernel on CUDA and else eager, or native if REGARD_NATIVE=1 is in the environment.
    Raises: ShapeError for tensors that do not fit; ConfigError for an unknown execution; UnsupportedError where
    compiled code cannot run.
    """
    if execution not in ("auto", "eager", "native"):
        raise ConfigError(f"execution is auto, eager or native, not {execution!r}")
    frame = check_offsets(x, weight, offsets, mask, bias, stride, padding, dilation)
    if x.device.type == "cuda" and execution == "auto":
        return _kernel(x, weight, offsets, mask, bias, frame)
    points = positions(offsets, frame)
    factors = None if mask is None else mask.unflatten(1, (frame.groups, -1))
    take = sample_rows if x.dtype in (torch.bfloat16, torch.float16) else sample_maps
    if takes_native("deformable_conv", execution, x):
        take = sample_native
    seen = take(x, points, factors)  # (B, C, K, L)
    return _weighted(weight, seen, bias).unflatten(-1, frame.out)


def check_offsets(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Frame:
    """The door of both functions."""
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
    steps, around, apart = (_pair(value) for value in (stride, padding, dilation))
    if min(*steps, *apart) < 1 or min(around) < 0:
        raise ConfigError(
            f"stride and dilation are at least 1, padding at least 0, not {stride}, {dilation}, {padding}"
        )
    sides = (
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(x.shape[2:], around, apart, kernel, steps, strict=True)
    )
    out = cast(tuple[int, int], tuple(sides))
    if min(out) < 1:
        raise ShapeError(
            f"deformable_conv: {'x'.join(map(str, kernel))} taps, {dilation} apart, do not fit a map of "
            f"{x.shape[2]}x{x.shape[3]} cells with padding {padding}"
        )
    wanted = {"offsets": (offsets, 2 * groups * taps), "mask": (mask, groups * taps)}
    for name, (value, number) in wanted.items():
        if value is not None and tuple(value.shape) != (x.shape[0], number, *out):
            raise ShapeError(
                f"deformable_conv: {name} {tuple(value.shape)}; expected {(x.shape[0], number, *out)} for this stride, "
                "padding and dilation"
            )
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise ShapeError(f"deformable_conv: bias has shape {tuple(bias.shape)}; expected ({outputs},)")
    return Frame(cast(tuple[int, int], tuple(kernel)), out, steps, around, apart, groups)


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def positions(offsets: Tensor, frame: Frame) -> Float[Tensor, "B g K hh ww 2"]:
    """Where the taps look, (y, x) in cells, in float32 or better."""
    moved = wide(offsets).unflatten(1, (frame.groups, -1, 2)).movedim(3, -1)
    starts = []
    for axis, (kernel, out) in enumerate(zip(frame.kernel, frame.out, strict=True)):
        tap = torch.arange(kernel, device=offsets.device) * frame.dilation[axis] - frame.padding[axis]
        cell = torch.arange(out, device=offsets.device) * frame.stride[axis]
        starts.append(tap[:, None] + cell)  # (k, out)
    y, x = starts[0][:, None, :, None], starts[1][None, :, None, :]
    shape = (*frame.kernel, *frame.out)
    start = torch.stack([y.expand(shape), x.expand(shape)], -1).flatten(0, 1)  # (K, hh, ww, 2)
    return start + moved


def _weighted(weight: Tensor, seen: Float[Tensor, "B C K L"], bias: Tensor | None) -> Float[Tensor, "B O L"]:
    """One product of matrices a weight group; depth-wise weights are multiplied and summed."""
    number = seen.shape[1] // weight.shape[1]
    if weight.shape[1] == 1 and number > 1:
        weights = weight.flatten(1).unflatten(0, (number, -1))  # (C, O / C, K)
        out = (seen[:, :, None] * weights[..., None]).sum(3).flatten(1, 2)
    elif number == 1 and seen.stride(1) == 1:  # rows of channels
        flat = weight.flatten(2).permute(0, 2, 1).flatten(1)  # (O, K C)
        out = (seen.permute(0, 3, 2, 1).flatten(2) @ flat.mT).mT
    elif number == 1:
        out = weight.flatten(1) @ seen.flatten(1, 2)
    else:
        flat = weight.flatten(1).unflatten(0, (number, -1))  # (number, O', c K)
        out = (flat @ seen.unflatten(1, (number, -1)).flatten(2, 3)).flatten(1, 2)
    return out if bias is None else out + bias[:, None].to(out.dtype)


def _kernel(x: Tensor, weight: Tensor, offsets: Tensor, mask: Tensor | None, bias: Tensor | None, f: Frame) -> Tensor:
    """torchvision's kernel, in float32 for half precision. Its backward pass adds in any order."""
    from torchvision.ops import deform_conv2d

    with exact_products(x.device):
        work = wide(x)
        others = [None if t is None else t.to(work.dtype) for t in (offsets, weight, bias, mask)]
        out: Tensor = deform_conv2d(work, *others[:3], f.stride, f.padding, f.dilation, others[3])
    return out.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class DeformableConv(TapsConfig):
    """kernel, axes, causal, extra: of the taps. version: 2 also predicts a factor for every sample.

    groups: of contiguous channels with offsets of their own. dilation: cells between taps at rest. offset_kernel: of
    the predictor: 1 is the paper's, the published code has the kernel's size. mask_init: the factor is
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

    card: ClassVar[Card] = Card(
        title="Deformable convolution",
        source="Zhu et al. 2019, Eq. 4; Dai et al. 2017 (v1); Zhu et al. 2019b (v2)",
        formula="sum_p W_p m_{q,p} x(q + p + o_q(p))",
        complexity="O(N C^2 N_k)",
        query_content=True,
        key_content=False,
        relative_position=True,
        dynamic="one-step",
        scaling=frozenset({"routing"}),
        expert_type="linear layer on N_k points",
        expert_count="N",
        construction="offset prediction",
        topology="N x one-to-one",
        conditions="Q",
        prefix="never sampled; the mean of the cells' outputs, or zero",
        row_maps=False,
    )
    samples: ClassVar[tuple[str, ...]] = (
        "DeformableConv(groups=2)",
        "DeformableConv(version=2, offset_kernel=1, dilation=2, mask_init=0.5)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.groups, self.dilation, self.offset_kernel) < 1:
            numbers = f"groups={self.groups}, dilation={self.dilation}, offset_kernel={self.offset_kernel}"
            raise ConfigError(f"groups, dilation and offset_kernel are at least 1, not {numbers}")
        if self.offset_kernel % 2 == 0 and not self.causal:
            raise ConfigError(f"offset_kernel is odd (any where causal), not {self.offset_kernel}")
        if not 0 < self.mask_init <= 1:
            raise ConfigError(f"mask_init is the factor at the start, above 0 and at most 1, not {self.mask_init}")
        if self.version == 1 and self.mask_init != DeformableConv.mask_init:
            raise ConfigError(f"mask_init={self.mask_init} is of factors, which version=1 has not; give version=2")

    def build(self, site: Site, shared: nn.Module | None = None) -> "DeformableConvMixer":
        check_groups("DeformableConv", self.groups, site)
        return DeformableConvMixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Paper: N C^2 N_k. Executed: also the predictor. Interpolation, products one by one, is `interpolation`."""
        check_accounting(accounting)
        n, dim = site.grid.cells, site.dim
        weight = dim * dim * self.taps
        each = self.axes + (self.version == 2)  # numbers that move and scale one tap
        outputs = each * self.groups * self.taps
        inputs = dim * self.offset_kernel**self.axes
        params = weight + dim * site.out_bias + outputs * (inputs + 1)
        return Cost(params, n * (weight + (outputs * inputs if accounting == "executed" else 0)))

    def interpolation(self, site: Site) -> int:
        """Products of samples with their weights: 2^axes cells for each tap of each channel."""
        return 2**self.axes * self.taps * site.grid.cells * site.dim


class DeformableConvMixer(TapsMixer):
    """conv: the deformable convolution."""

    output: ClassVar[str] = "conv"
    config: DeformableConv

    def __init__(self, config: DeformableConv, site: Site) -> None:
        super().__init__(config, site)
        self.conv: DeformableConv1d | DeformableConv2d
        if config.axes == 1:
            self.conv = DeformableConv1d(site.dim, config, site.out_bias)
        else:
            around = config.dilation * (config.kernel // 2)
            self.conv = DeformableConv2d(
                site.dim, site.dim, config.kernel, padding=around, dilation=config.dilation, bias=site.out_bias,
                options=config,
            )  # fmt: skip

    def mix(self, cells: Tensor, valid: Tensor | None, plain: bool) -> Tensor:
        return cast(Tensor, self.conv(cells, plain))


class DeformableConv2d(nn.Conv2d):
    """A convolution of maps whose taps move, anywhere in a network: weight and bias are named as in `nn.Conv2d`.

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
        around = [
            p + d * (side - k) // 2 for p, d, k in zip(_pair(padding), self.dilation, self.kernel_size, strict=True)
        ]
        if min(around) < 0 or any((side - k) * d % 2 for k, d in zip(self.kernel_size, self.dilation, strict=True)):
            raise ConfigError(f"offset_kernel={side} gives another size than kernel {kernel} with padding {padding}")
        outs = (1 + options.version) * options.groups * math.prod(self.kernel_size)
        apart, steps = _pair(dilation), _pair(stride)
        self.offset = ZeroConv(inputs, outs, side, steps, (around[0], around[1]), apart)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, options: "DeformableConv | None" = None) -> "DeformableConv2d":
        """With the weights of a convolution, which it equals until the offsets move (and for mask_init=1).

        Weights that were frozen stay so. kernel, dilation, padding and stride are the convolution's: of options only
        version, groups, offset_kernel and mask_init are read.
        Raises: UnsupportedError for another padding than a number of zeros, or another module than a plain `nn.Conv2d`
        (a subclass or a reparametrisation may compute something else); ConfigError for other options.
        """
        options = options or DeformableConv()
        told = [name for name in GIVEN if getattr(options, name) != getattr(DeformableConv(), name)]
        if told:
            said = ", ".join(f"{name}={getattr(options, name)!r}" for name in told)
            raise ConfigError(f"{said}: these come from the convolution that is replaced; leave them at their defaults")
        if type(conv) is not nn.Conv2d or set(conv.state_dict()) - {"weight", "bias"}:
            keys = ", ".join(conv.state_dict())
            raise UnsupportedError(f"a plain nn.Conv2d is replaced, not a {type(conv).__name__} with {keys}")
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise UnsupportedError(f"zero padding by numbers is needed, not {conv.padding_mode!r}, {conv.padding!r}")
        made = cls(
            conv.in_channels, conv.out_channels, cast(Pair, conv.kernel_size), stride=cast(Pair, conv.stride),
            padding=cast(Pair, conv.padding), dilation=cast(Pair, conv.dilation), weight_groups=conv.groups,
            bias=conv.bias is not None, options=options,
        ).to(conv.weight)  # fmt: skip
        made.load_state_dict(conv.state_dict(), strict=False)
        for name, parameter in conv.named_parameters():
            made.get_parameter(name).requires_grad_(parameter.requires_grad)
        return made

    def lr_scale(self) -> dict[str, float]:
        """Local names of parameters -> factor of the learning rate (Zhu et al. 2019): 0.1 for the predictor."""
        return {f"offset.{name}": 0.1 for name, _ in self.offset.named_parameters()}

    def moves(
        self, x: Float[Tensor, "B C h w"]
    ) -> tuple[Float[Tensor, "B P hh ww"], Float[Tensor, "B Q hh ww"] | None]:
        """The offsets and, for version 2, the factors that `deformable_conv` takes."""
        found = predicted(x, self.offset)
        if self.options.version == 1:
            return found, None
        offsets, mask = found.split([found.shape[1] // 3 * 2, found.shape[1] // 3], 1)
        return offsets, 2 * self.options.mask_init * mask.sigmoid()

    def forward(self, x: Float[Tensor, "B C h w"], plain: bool = False) -> Float[Tensor, "B O hh ww"]:
        """plain: the reference form."""
        offsets, mask = self.moves(x)
        call = deformable_conv_reference if plain else deformable_conv
        places = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return call(x, self.weight, offsets, mask=mask, bias=self.bias, **places)  # type: ignore[arg-type]


class DeformableConv1d(nn.Conv2d):
    """The same on maps of one row, where taps move along it; stride 1, as many outputs as inputs."""

    def __init__(self, width: int, options: "DeformableConv", bias: bool = True) -> None:
        super().__init__(width, width, options.sides, dilation=(1, options.dilation), bias=bias)
        self.options = options
        outs, apart = options.version * options.groups * options.taps, (1, options.dilation)
        self.offset = ZeroConv(width, outs, (1, options.offset_kernel), dilation=apart)

    def lr_scale(self) -> dict[str, float]:
        """Local names of parameters -> factor of the learning rate: 0.1 for the predictor."""
        return {f"offset.{name}": 0.1 for name, _ in self.offset.named_parameters()}

    def forward(self, x: Float[Tensor, "B C 1 n"], plain: bool = False) -> Float[Tensor, "B C 1 n"]:
        """plain: the reference form."""
        config, length = self.options, x.shape[-1]
        padded = F.pad(x, margins((1, config.offset_kernel), config.dilation, config.causal))
        found = predicted(padded, self.offset)[:, :, 0]  # (B, g K, n)
        moved, mask = found, None
        if config.version == 2:
            moved, mask = found.chunk(2, 1)
            mask = (2 * config.mask_init * mask.sigmoid()).unflatten(1, (config.groups, -1))
        left = margins(config.sides, config.dilation, config.causal)[0]
        query = torch.arange(length, device=x.device)
        start = torch.arange(config.kernel, device=x.device)[:, None] * config.dilation - left + query
        points = start + moved.unflatten(1, (config.groups, -1))  # (B, g, K, n)
        if config.causal:
            points = torch.where(points > query, query, points)
        parts = x[:, :, 0].unflatten(1, (config.groups, -1))
        seen = (line_reference if plain else sample_line)(parts, points)
        seen = (seen if mask is None else seen * mask[:, :, None].to(x.dtype)).flatten(1, 2)  # (B, C, K, n)
        if plain:
            return grouped(self.weight, seen[..., None, :], self.bias)
        return _weighted(self.weight, seen, self.bias)[:, :, None]


def predicted(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A convolution in float32 or better: offsets in half precision are off by up to a quarter of a cell at 64."""
    with exact_products(x.device):
        bias = None if conv.bias is None else wide(conv.bias)
        return F.conv2d(wide(x), wide(conv.weight), bias, conv.stride, conv.padding, conv.dilation)


class ZeroConv(nn.Conv2d):
    """The predictor of offsets and factors: starts at zero."""

    def reset_parameters(self) -> None:
        """Zero weight and bias."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
