"""Converts linear projections to two-layer ones, to start from pretrained weights, and two-layer ones to linear ones.

ReLU(a) - ReLU(-a) = a: with 2 D hidden units W1 = [W; -W], W2 = [I, -I] represent W exactly. With h < 2 D units and
biases, W1 = B, b1 = m, W2 = A, b2 = b - A m represent the map A B of rank h while no unit of any token falls below -m;
A B is W itself at h = D and its best approximation (truncated SVD) below.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Projection, ShapeError, Site, UnsupportedError

from .linear import fused_linear

LIFT = 8.0  # standard deviations of a hidden unit on tokens with uncorrelated channels of variance 1


class LayeredProjection(Projection):
    """The attributes of a projection that conversion uses; a parameter may be None or absent."""

    config: Any
    roles: str
    channels: int
    inner: int
    heads: int
    weight1: nn.Parameter
    bias1: nn.Parameter | None
    weight2: nn.Parameter
    bias2: nn.Parameter | None


@torch.no_grad()
def warm_start(
    projection: LayeredProjection, weight: Float[Tensor, "R_inner C"], bias: Float[Tensor, " R_inner"] | None, *,
    tokens: Float[Tensor, "*batch C"] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Set an SNE or P-SNE projection, in place, so that it starts as a fused linear one; roles in the same order.

    tokens: inputs for which no hidden unit may be below 0; by default biases are raised by 8 standard deviations of
    tokens with unit variance. Hidden units that the map does not need keep their first layer and get zeros in the
    second. Returns for each role |W - W'| / |W| (Frobenius, biases included): 0 where the conversion is exact.
    Raises: UnsupportedError for F-SNE (its roles share both layers) and for more than two layers, ShapeError if weight
    or bias do not fit, ConfigError if the projection has no bias for `bias` or fewer than two units.
    """
    name, number, inner = type(projection.config).__name__, len(projection.roles), projection.inner
    if "svd" not in projection.config.inits or getattr(projection, "weight3", None) is not None:
        raise UnsupportedError(f"{name}: only SNE and P-SNE of at most two layers can start from a linear projection")
    _check(name, weight, bias, (number * inner, projection.channels))
    last = getattr(projection, "bias2" if hasattr(projection, "weight2") else "bias1")
    if bias is not None and last is None:
        raise ConfigError(f"{name} was built without biases and cannot take that of a linear projection; qkv_bias=True")
    w = weight.double().unflatten(0, (number, inner))  # (R, inner, C)
    b = w.new_zeros(number, inner) if bias is None else bias.double().unflatten(0, (number, inner))
    if not hasattr(projection, "weight2"):
        _put(projection.weight1, w.flatten(0, 1))
        _put(last, b.flatten())
        return dict.fromkeys(projection.roles, 0.0)
    return _two_layers(projection, w, b, tokens)


def _two_layers(projection: LayeredProjection, w: Tensor, b: Tensor, tokens: Tensor | None) -> dict[str, float]:
    """w (R, inner, C), b (R, inner), double."""
    number, inner, _ = w.shape
    hidden = projection.weight2.shape[1]
    common = projection.weight2.shape[0] == inner  # one second layer for all roles
    activation, lifts = projection.config.activation, False
    rank = hidden
    if activation != "none":
        lifts = activation == "relu" and hidden < 2 * inner and projection.bias1 is not None
        rank = hidden if lifts else hidden // 2
    if rank < 1:
        raise ConfigError(f"{type(projection.config).__name__}(width={hidden}) cannot hold a linear map; width=2 can")
    a, v = _factors(w, rank, common)
    rank = a.shape[-1]
    c, last = v.new_zeros(number, rank), b
    if common:  # one bias for all roles: the rest goes through the hidden layer
        last = b.mean(0, keepdim=True).expand_as(b)
        if projection.bias1 is not None:
            c = torch.linalg.vecdot(a.mT, (b - last)[:, None])
    m = _lift(v, c, tokens, common) if lifts else torch.zeros_like(c)
    first = projection.weight1.double().unflatten(0, (number, hidden))
    first_bias = v.new_zeros(number, hidden)
    second = v.new_zeros(number, inner, hidden)
    first[:, :rank], first_bias[:, :rank], second[..., :rank] = v, c + m, a
    if not lifts and activation != "none":
        two = slice(rank, 2 * rank)
        first[:, two], first_bias[:, two], second[..., two] = -v, -c, -a
    rows = slice(0, 1 if common else number)
    _put(projection.weight1, first.flatten(0, 1))
    _put(projection.bias1, first_bias.flatten())
    _put(projection.weight2, second[rows].flatten(0, 1))
    _put(projection.bias2, (last - torch.linalg.vecdot(a, m[:, None]))[rows].flatten())
    result = torch.cat([a @ v, (torch.linalg.vecdot(a, c[:, None]) + last)[..., None]], -1)
    target = torch.cat([w, b[..., None]], -1)
    errors = (target - result).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1).clamp_min(1e-300)
    return dict(zip(projection.roles, errors.tolist(), strict=True))


def _factors(w: Tensor, rank: int, common: bool) -> tuple[Tensor, Tensor]:
    """A (R, inner, r) and B (R, r, C): A B approximates W best for r <= rank. common: one A for all roles."""
    number, inner, _ = w.shape
    if rank >= inner:
        return torch.eye(inner, dtype=w.dtype, device=w.device).expand(number, -1, -1), w
    if common:
        u = torch.linalg.svd(torch.cat(list(w), 1), full_matrices=False)[0][:, :rank]
        return u.expand(number, -1, -1), u.mT @ w
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    root = s[:, :rank].sqrt()
    return u[..., :rank] * root[:, None], root[..., None] * vh[:, :rank]


def _lift(v: Tensor, c: Tensor, tokens: Tensor | None, common: bool) -> Tensor:
    """The increase of the hidden biases (R, r) with which no unit is below 0."""
    if tokens is None:
        m = LIFT * v.norm(dim=-1) + c.abs()
    else:
        x = tokens.detach().double().flatten(0, -2)
        m = -(torch.einsum("nc,rhc->nrh", x, v) + c).amin(0).clamp_max(0)
        m = m + 1e-3 * v.norm(dim=-1)
    return m.amax(0, keepdim=True).expand_as(m) if common else m


def _check(name: str, weight: Tensor, bias: Tensor | None, expected: tuple[int, int]) -> None:
    for label, value, shape in (("weight", weight, expected), ("bias", bias, expected[:1])):
        if value is not None and tuple(value.shape) != shape:
            raise ShapeError(f"{name}: a linear projection's {label} is {shape} here, not {tuple(value.shape)}")


def _put(parameter: Tensor | None, value: Tensor) -> None:
    if parameter is not None:
        parameter.copy_(value)


@torch.no_grad()
def fuse(projection: LayeredProjection) -> nn.Linear:
    """The equivalent linear projection of an embedding without activation (any number of layers).

    The new module shares no parameter. Raises: UnsupportedError if there is an activation between two layers.
    """
    config = projection.config
    if config.activation != "none" and hasattr(projection, "weight2"):
        raise UnsupportedError(
            f"{type(config).__name__}(activation={config.activation!r}) is not linear; only activation='none' is fused"
        )
    example, channels = projection.weight1, projection.channels
    basis = torch.cat([example.new_zeros(1, channels), torch.eye(channels).to(example)]).double()[None]
    outputs = torch.cat([y.transpose(1, 2).flatten(2)[0] for y in _double(projection)(basis, projection.roles)], -1)
    biased = example.shape[1] != channels or any(name.startswith("bias") for name, _ in projection.named_parameters())
    width = projection.inner // projection.heads
    site = Site(dim=channels, heads=projection.heads, width=width, grid=Grid(1, 1), qkv_bias=biased)
    fused = fused_linear(site, projection.roles).to(example.device, example.dtype)
    _put(fused.weight, (outputs[1:] - outputs[0]).mT)
    _put(fused.bias, outputs[0])
    return fused.train(projection.training)


def _double(projection: LayeredProjection) -> LayeredProjection:
    """A copy in double precision, with its shared codes."""
    duplicate = copy.deepcopy(projection).double()
    for shared in duplicate.__dict__.get("_shared") or ():
        shared.double()
    return duplicate
