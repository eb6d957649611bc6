"""Test-time training as attention: a small model learns v from k in one step, per image, and is applied to q (ViT3).

Inner loss of a head: -<f_W(k), v> a / N with a = 1/3; W <- W - lr g / (|g| + 1), |g| the length of a column, and the
output is f_W(q). f(k) is (k W1) * silu(k W2), or k W (then, without clipping and from W = 0, unnormalised linear
attention). One more head of width d has a 3x3 depth-wise convolution of the grid as its f (Han et al. 2025, ViT^3).
TTT (Sun et al. 2024) takes a step for each mini-batch of tokens, in their order, and learns by reconstruction:
|f_W(k) - v|^2 a / (2 b) for b tokens. Here the last W answers all queries, since tokens of an image have no order in
time; its rates that are learned, and the normalisation in its f, are left out.
Prefix and suffix tokens are training data and queries like all others; the convolution gives them zeros.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Card, Grid, Mask, Mixer, MixerConfig, Site, heads, merge, operator_function
from regard.core.cost import Cost, check_accounting, linear_cost
from regard.core.errors import ConfigError, ShapeError, UnsupportedError

from .convolutions.sampling import own_kernels
from .shared.heads import apply_rotary
from .shared.precision import upcast, without_autocast

__all__ = ["ViT3", "ttt", "ttt_conv", "ttt_conv_reference", "ttt_reference"]

SCALE = 9**-0.5  # of the inner loss, the same for every width


@operator_function
def ttt_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], w1: Float[Tensor, "H d e"],
    w2: Float[Tensor, "H d e"] | None = None, *, lr: float = 1.0, clip: bool = True, scale: float = SCALE,
    batch: int = 0, squared: bool = False,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Steps of gradient descent on the inner loss by automatic differentiation, then f of q."""
    weights = tuple(w.expand(q.shape[0], -1, -1, -1) for w in (w1, w2) if w is not None)

    def loss(weights: tuple[Tensor, ...], k: Tensor, v: Tensor) -> Tensor:
        f = _inner(k, *weights)
        return ((f - v).square().sum() / 2 if squared else -(f * v).sum()) * scale / k.shape[-2]

    for keys, values in zip(k.split(batch or k.shape[-2], -2), v.split(batch or k.shape[-2], -2), strict=True):
        steps = torch.func.grad(loss)(weights, keys, values)
        if clip:
            steps = tuple(g / (g.square().sum(-2, keepdim=True).sqrt() + 1) for g in steps)
        weights = tuple(w - lr * g for w, g in zip(weights, steps, strict=True))
    return _inner(q, *weights)


def _inner(x: Tensor, w1: Tensor, w2: Tensor | None = None) -> Tensor:
    """The inner model."""
    return x @ w1 if w2 is None else x @ w1 * F.silu(x @ w2)


@operator_function
def ttt(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"], w1: Float[Tensor, "H d e"],
    w2: Float[Tensor, "H d e"] | None = None, *, lr: float = 1.0, clip: bool = True, scale: float = SCALE,
    batch: int = 0, squared: bool = False,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same with an explicit gradient. The steps are computed in float32 for half precision.

    w2 None: the linear inner model. batch: tokens of a step, 0 = all. squared: the loss is the squared distance of f(k)
    from v, instead of their product. Raises: ShapeError for tensors that do not fit or a negative batch.
    """
    expected = (q.shape[1], q.shape[-1], v.shape[-1])
    for label, w in (("w1", w1), ("w2", w2)):
        if w is not None and tuple(w.shape) != expected:
            raise ShapeError(f"ttt: {label} has shape {tuple(w.shape)}; expected (heads, width, values) = {expected}")
    if k.shape[-2] != v.shape[-2] or k.shape[-1] != q.shape[-1]:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise ShapeError(f"ttt: q, k and v have shapes {shapes}; k needs q's width and as many tokens as v")
    if batch < 0:
        raise ShapeError(f"ttt: batch={batch}; give the number of tokens of a step, 0 for all")
    size = batch or k.shape[-2]
    with without_autocast(q.device):
        learned = tuple(upcast(w) for w in (w1, w2) if w is not None)
        for keys, values in zip(upcast(k).split(size, -2), upcast(v).split(size, -2), strict=True):
            learned = _learn(keys, values, learned, lr, clip, scale, squared)
        return _inner(q, *(w.to(q.dtype) for w in learned))


def _learn(
    keys: Tensor, values: Tensor, weights: tuple[Tensor, ...], lr: float, clip: bool, scale: float, squared: bool
) -> tuple[Tensor, ...]:
    """The weights after one step on these tokens."""
    factor = scale / keys.shape[-2]
    if len(weights) == 1:
        error = (keys @ weights[0] - values) * factor if squared else values * -factor  # d loss / d f
        return (_step(weights[0], keys.mT @ error, lr, clip),)
    first, second = (keys @ w for w in weights)
    gate = second.sigmoid()
    error = (first * second * gate - values) * factor if squared else values * -factor
    slope = gate * (1 + second * (1 - gate))  # of silu
    steps = keys.mT @ (error * second * gate), keys.mT @ (error * first * slope)
    return tuple(_step(w, g, lr, clip) for w, g in zip(weights, steps, strict=True))


def _step(weight: Tensor, gradient: Tensor, lr: float, clip: bool) -> Tensor:
    if clip:
        gradient = gradient / (gradient.square().sum(-2, keepdim=True).clamp_min(1e-30).sqrt() + 1)
    return weight - lr * gradient


@operator_function
def ttt_conv_reference(
    q: Float[Tensor, "B d h w"], k: Float[Tensor, "B d h w"], v: Float[Tensor, "B d h w"],
    weight: Float[Tensor, "d 3 3"], *, lr: float = 1.0, clip: bool = True, scale: float = SCALE,
) -> Float[Tensor, "B d h w"]:  # fmt: skip
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
    q: Float[Tensor, "B d h w"], k: Float[Tensor, "B d h w"], v: Float[Tensor, "B d h w"],
    weight: Float[Tensor, "d 3 3"], *, lr: float = 1.0, clip: bool = True, scale: float = SCALE,
) -> Float[Tensor, "B d h w"]:  # fmt: skip
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

    lr: of the inner steps. clip: whether the inner gradient is divided by its length plus 1. batch: tokens of a step,
    0 = one step on all, as in ViT^3. loss: "dot" or "squared", TTT's; TTT is
    `ViT3(inner="linear", local=False, clip=False, batch=16, loss="squared")`. A swap does not use a host's
    projections: they mean something else here, and with local=True their shapes differ.
    Raises: ConfigError for an unknown inner model, an lr that is not positive, a negative batch, or TTT's loss or
    mini-batches with the head that convolves; building, UnsupportedError for
    normalised q, k.
    """

    inner: Literal["swiglu", "linear"] = "swiglu"
    local: bool = True
    lr: float = 1.0
    clip: bool = True
    batch: int = 0
    loss: Literal["dot", "squared"] = "dot"

    card = Card(
        title="Test-time training block", source="Han et al. 2025 (ViT^3); Sun et al. 2024 (TTT)",
        formula="f_W'(q),  W' = W - lr clip(grad_W of -<f_W(k), v> / (3 N))", complexity="O(N d C)", query_content=True,
        key_content=True, relative_position=True, dynamic="two-step", scaling=frozenset({"compression"}),
        expert_type="arbitrary module", expert_count="1", construction="test-time training", topology="all-to-one",
        conditions="K, V", prefix="training data and queries like all tokens; 0 in the head that convolves",
        row_maps=False,
    )  # fmt: skip
    samples = (
        "ViT3()", 'ViT3(inner="linear", local=False, clip=False)',
        'ViT3(inner="linear", local=False, clip=False, batch=5, loss="squared")',
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr <= 0:
            raise ConfigError(f"lr must be positive, not {self.lr}")
        if self.batch < 0:
            raise ConfigError(f"ViT3: batch is the number of tokens of a step, 0 for all, not {self.batch}")
        if self.local and (self.batch or self.loss != "dot"):
            given = f"batch={self.batch}" if self.batch else f"loss={self.loss!r}"
            raise ConfigError(f"ViT3: {given} is for heads without a convolution of the whole map: give local=False")

    def build(self, site: Site, shared: nn.Module | None = None) -> "ViT3Mixer":
        if site.qk_norm:
            raise UnsupportedError("ViT3 learns from keys without normalisation: the host normalises q and k")
        return ViT3Mixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Projections and products: two forward, two of the steps, two with q; "linear" has one of steps and q each.

        The squared loss needs the linear model's forward product.
        """
        check_accounting(accounting)
        n, d, inner = site.grid.tokens, site.width, site.inner
        width = inner + d * self.local
        total = linear_cost(n, site.dim, 3 * width, site.qkv_bias) + linear_cost(n, width, site.dim, site.out_bias)
        matrices = 2 if self.inner == "swiglu" else 1
        products = 6 if self.inner == "swiglu" else 2 + (self.loss == "squared")
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
        self.proj_drop = nn.Dropout(site.drop)

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        site, lr, clip = self.site, self.config.lr, self.config.clip
        projected = self.qkv(x)
        q, k, v = (heads(y, site.heads) for y in projected[..., : 3 * site.inner].chunk(3, -1))
        if rope is not None:
            q, k = apply_rotary(q, rope, grid), apply_rotary(k, rope, grid)
        form, batch, squared = ttt_reference if plain else ttt, self.config.batch, self.config.loss == "squared"
        out = merge(form(q, k, v, self.inner.w1, self.inner.w2, lr=lr, clip=clip, batch=batch, squared=squared))
        if self.inner.w3 is not None:
            extra, cells = grid.to_map(projected[..., 3 * site.inner :])
            q, k, v = cells.chunk(3, 1)
            local = (ttt_conv_reference if plain else ttt_conv)(q, k, v, self.inner.w3, lr=lr, clip=clip)
            out = torch.cat([out, grid.from_map(torch.zeros_like(extra[..., : site.width]), local)], -1)
        return cast(Tensor, self.proj_drop(self.proj(out)))


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
