"""Test-time training as attention: a small model learns v from k in one step, per image, and is applied to q (ViT3).

Inner loss of a head: -<f_W(k), v> a / N with a = 1/3; W <- W - lr g / (|g| + 1), |g| the length of a column, and the
output is f_W(q). f(k) is (k W1) * silu(k W2), or k W (then, without clipping and from W = 0, unnormalised linear
attention). One more head of width d has a 3x3 depth-wise convolution of the grid as its f (Han et al. 2025, ViT^3).
Prefix and suffix tokens are training data and queries like all others; the convolution gives them zeros.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

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
    Mixer,
    MixerConfig,
    ShapeError,
    Site,
    UnsupportedError,
    check_accounting,
    heads,
    linear_cost,
    merge,
    operator_function,
)

from .convolutions.sampling import own_kernels
from .shared.checks import check_heads
from .shared.heads import apply_rotary
from .shared.precision import upcast, without_autocast

__all__ = ["ViT3", "ttt", "ttt_conv", "ttt_conv_reference", "ttt_reference"]

SCALE = 9**-0.5  # of the inner loss, the same for every width


@operator_function
def ttt_reference(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    w1: Float[Tensor, "H d e"],
    w2: Float[Tensor, "H d e"] | None = None,
    *,
    lr: float = 1.0,
    clip: bool = True,
    scale: float = SCALE,
) -> Float[Tensor, "B H N e"]:
    """One step of gradient descent on the inner loss by automatic differentiation, then f of q."""
    start = tuple(w.expand(q.shape[0], -1, -1, -1) for w in (w1, w2) if w is not None)

    def loss(weights: tuple[Tensor, ...]) -> Tensor:
        return -(_inner(k, *weights) * v).sum() * scale / k.shape[-2]

    steps = torch.func.grad(loss)(start)
    if clip:
        steps = tuple(g / (g.square().sum(-2, keepdim=True).sqrt() + 1) for g in steps)
    return _inner(q, *(w - lr * g for w, g in zip(start, steps, strict=True)))


def _inner(x: Tensor, w1: Tensor, w2: Tensor | None = None) -> Tensor:
    """The inner model."""
    return x @ w1 if w2 is None else x @ w1 * F.silu(x @ w2)


@operator_function
def ttt(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B H M d"],
    v: Float[Tensor, "B H M e"],
    w1: Float[Tensor, "H d e"],
    w2: Float[Tensor, "H d e"] | None = None,
    *,
    lr: float = 1.0,
    clip: bool = True,
    scale: float = SCALE,
) -> Float[Tensor, "B H N e"]:
    """The same with an explicit gradient. The step is computed in float32 for half precision.

    w2 None: the linear inner model. Raises: ShapeError for tensors that do not fit.
    """
    check_heads("ttt", q=q, k=k, v=v)
    expected = (q.shape[1], q.shape[-1], v.shape[-1])
    for label, w in (("w1", w1), ("w2", w2)):
        if w is not None and tuple(w.shape) != expected:
            raise ShapeError(f"ttt: {label} has shape {tuple(w.shape)}; expected (heads, width, values) = {expected}")
    if k.shape[-2] != v.shape[-2] or k.shape[-1] != q.shape[-1]:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise ShapeError(f"ttt: q, k and v have shapes {shapes}; k needs q's width and as many tokens as v")
    with without_autocast(q.device):
        keys, error = upcast(k), upcast(v) * (-scale / k.shape[-2])  # d loss / d f
        if w2 is None:
            learned: tuple[Tensor, ...] = (_step(upcast(w1), keys.mT @ error, lr, clip),)
        else:
            first, second = keys @ upcast(w1), keys @ upcast(w2)
            gate = second.sigmoid()
            slope = gate * (1 + second * (1 - gate))  # of silu
            steps = keys.mT @ (error * second * gate), keys.mT @ (error * first * slope)
            learned = tuple(_step(upcast(w), g, lr, clip) for w, g in zip((w1, w2), steps, strict=True))
        return _inner(q, *(w.to(q.dtype) for w in learned))


def _step(weight: Tensor, gradient: Tensor, lr: float, clip: bool) -> Tensor:
    if clip:
        gradient = gradient / (gradient.square().sum(-2, keepdim=True).clamp_min(1e-30).sqrt() + 1)
    return weight - lr * gradient


@operator_function
def ttt_conv_reference(
    q: Float[Tensor, "B d h w"],
    k: Float[Tensor, "B d h w"],
    v: Float[Tensor, "B d h w"],
    weight: Float[Tensor, "d 3 3"],
    *,
    lr: float = 1.0,
    clip: bool = True,
    scale: float = SCALE,
) -> Float[Tensor, "B d h w"]:
    """The inner model as a 3x3 depth-wise convolution, its step by automatic differentiation, image by image."""

    def inner(x: Tensor, w: Tensor) -> Tensor:
        shifts = [(i, j) for i in range(3) for j in range(3)]
        x = F.pad(x, (1, 1, 1, 1))
        rows, columns = x.shape[-2] - 2, x.shape[-1] - 2
        parts = [x[..., i : i + rows, j : j + columns] * w[..., i, j, None, None] for i, j in shifts]
        return torch.stack(parts).sum(0)

    def loss(w: Tensor) -> Tensor:
        return -(inner(k, w) * v).sum() * scale / (k.shape[-2] * k.shape[-1])

    start = weight.expand(q.shape[0], -1, -1, -1)
    step = torch.func.grad(loss)(start)
    if clip:
        step = step / (step.square().sum((-2, -1), keepdim=True).sqrt() + 1)
    return inner(q, start - lr * step)


@operator_function
def ttt_conv(
    q: Float[Tensor, "B d h w"],
    k: Float[Tensor, "B d h w"],
    v: Float[Tensor, "B d h w"],
    weight: Float[Tensor, "d 3 3"],
    *,
    lr: float = 1.0,
    clip: bool = True,
    scale: float = SCALE,
) -> Float[Tensor, "B d h w"]:
    """The same with the gradient as a product of patches and one grouped convolution for all images."""
    width, rows, columns = k.shape[1:]
    with without_autocast(q.device):
        error = upcast(v) * (-scale / (rows * columns))
        patches = F.unfold(upcast(k), 3, padding=1).unflatten(1, (width, 9))  # (B, d, 9, n)
        step = (patches @ error.flatten(2)[..., None])[..., 0]  # (B, d, 9)
        if clip:
            step = step / (step.square().sum(-1, keepdim=True).clamp_min(1e-30).sqrt() + 1)
        learned = (upcast(weight).flatten(1) - lr * step).to(q.dtype)
        return own_kernels(q, learned.view(k.shape[0], width, 3, 3))


@dataclass(frozen=True, kw_only=True)
class ViT3(MixerConfig):
    """inner: "swiglu" (the paper's) or "linear", one matrix per head. local: whether to add the head that convolves.

    lr: of the inner step. clip: whether the inner gradient is divided by its length plus 1. A swap
    does not use a host's projections: they mean something else here, and with local=True their shapes differ.
    Raises: ConfigError for an unknown inner model or an lr that is not positive; building, UnsupportedError for
    normalised q, k.
    """

    inner: Literal["swiglu", "linear"] = "swiglu"
    local: bool = True
    lr: float = 1.0
    clip: bool = True

    card: ClassVar[Card] = Card(
        title="Test-time training block",
        source="Han et al. 2025 (ViT^3); Sun et al. 2024 (TTT)",
        formula="f_W'(q),  W' = W - lr clip(grad_W of -<f_W(k), v> / (3 N))",
        complexity="O(N d C)",
        query_content=True,
        key_content=True,
        relative_position=True,
        dynamic="two-step",
        scaling=frozenset({"compression"}),
        expert_type="arbitrary module",
        expert_count="1",
        construction="test-time training",
        topology="all-to-one",
        conditions="K, V",
        prefix="training data and queries like all tokens; 0 in the head that convolves",
        row_maps=False,
    )
    samples: ClassVar[tuple[str, ...]] = (
        "ViT3()",
        'ViT3(inner="linear", local=False, clip=False)',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr <= 0:
            raise ConfigError(f"lr must be positive, not {self.lr}")

    def build(self, site: Site, shared: nn.Module | None = None) -> "ViT3Mixer":
        if site.qk_norm:
            raise UnsupportedError("ViT3 learns from keys without normalisation: the host normalises q and k")
        return ViT3Mixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Projections and products: two forward, two of the step, two with q; "linear" has one of step and q each."""
        check_accounting(accounting)
        n, d, inner = site.grid.tokens, site.width, site.inner
        width = inner + d * self.local
        total = linear_cost(n, site.dim, 3 * width, site.qkv_bias) + linear_cost(n, width, site.dim, site.out_bias)
        matrices = 2 if self.inner == "swiglu" else 1
        products = 6 if self.inner == "swiglu" else 2
        total += Cost(matrices * inner * d, products * n * d * inner)
        return total + (Cost(9 * d, 18 * site.grid.cells * d) if self.local else Cost())


class ViT3Mixer(Mixer):
    """qkv (3 C + 3 d, C) in the order q, k, v of the heads, then of the convolution; inner; proj (C, C + d)."""

    config: ViT3

    def __init__(self, config: ViT3, site: Site) -> None:
        super().__init__(config, site)
        width = site.inner + site.width * config.local
        self.qkv = nn.Linear(site.dim, 3 * width, bias=site.qkv_bias)
        self.inner = InnerModel(config, site)
        self.proj = nn.Linear(width, site.dim, bias=site.out_bias)

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        site, lr, clip = self.site, self.config.lr, self.config.clip
        projected = self.qkv(x)
        q, k, v = (heads(y, site.heads) for y in projected[..., : 3 * site.inner].chunk(3, -1))
        if rope is not None:
            q, k = apply_rotary(q, rope, grid), apply_rotary(k, rope, grid)
        out = merge((ttt_reference if plain else ttt)(q, k, v, self.inner.w1, self.inner.w2, lr=lr, clip=clip))
        if self.inner.w3 is not None:
            extra, cells = grid.to_map(projected[..., 3 * site.inner :])
            q, k, v = cells.chunk(3, 1)
            local = (ttt_conv_reference if plain else ttt_conv)(q, k, v, self.inner.w3, lr=lr, clip=clip)
            out = torch.cat([out, grid.from_map(torch.zeros_like(extra[..., : site.width]), local)], -1)
        return cast(Tensor, F.dropout(self.proj(out), site.drop, self.training))


class InnerModel(nn.Module):
    """w1, w2 (H, d, d), w3 (d, 3, 3): the inner model at the start of every image; w2 and w3 may be None."""

    def __init__(self, config: ViT3, site: Site) -> None:
        super().__init__()
        shape = (site.heads, site.width, site.width)
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape)) if config.inner == "swiglu" else None
        self.w3 = nn.Parameter(torch.empty(site.width, 3, 3)) if config.local else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal with standard deviation 0.02."""
        for weight in self.parameters():
            nn.init.trunc_normal_(weight, std=0.02)
