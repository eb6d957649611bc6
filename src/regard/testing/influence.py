"""Items of the contract about which inputs may influence an output: other images, hidden tokens, order, other grids."""

import dataclasses
import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Mask, RegardError, UnsupportedError, merge
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig

from .subject import EXACT, ContractError, Subject, gap


def batch(s: Subject) -> str:
    """The output for an image depends neither on its position in the batch nor on the other images."""
    with torch.no_grad():
        out = s.layer(s.x, s.grid)
        s.same("a batch in another order", s.layer(s.x.flip(0), s.grid), out.flip(0))
        s.same("a sample alone", s.layer(s.x[1:2], s.grid), out[1:2])
    return ""


def images(s: Subject) -> str:
    """inf or NaN in one image changes neither the outputs of the others nor the gradients of their inputs."""
    grad_out = torch.randn_like(s.x)

    def rest_of_batch(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        out = s.layer(x, s.grid)
        return out[1:].detach(), torch.autograd.grad(out, x, grad_out)[0][1:]

    out, grad = rest_of_batch(s.x.clone())
    for value in (torch.inf, torch.nan):
        x = s.x.clone()
        x[0, s.grid.prefix + s.grid.cells // 2, 0] = value
        other_out, other_grad = rest_of_batch(x)
        s.same(f"outputs of the other images beside {value} in one", other_out, out)
        s.same(f"gradients of the other images beside {value} in one", other_grad, grad, 1e-11)
    return ""


def masks(s: Subject) -> str:
    """Every kind of mask is applied, or refused with an error that names it."""
    n = s.grid.tokens
    keep = torch.ones(s.batch, n, dtype=torch.bool)
    keep[0, n // 2 :] = False
    keep[1, 1::3] = False
    rows = torch.randn(s.heads, n, n, dtype=torch.float64)
    masks = {
        "causal": Mask(causal=True),
        "padding": Mask(keep=keep),
        "bias": Mask(bias=rows),
        "key bias": Mask(bias=rows[:, :1]),
        "product": Mask(product=(torch.randn(s.batch, s.heads, n, 3).double(), torch.randn(n, 3).double())),
    }
    for kind, mask in masks.items():
        if kind in s.config.masks or (kind in ("key bias", "product") and "bias" in s.config.masks):
            _applies(s, kind, mask)
        else:
            _refuses(s, kind.removeprefix("key "), mask)
    return ""


def order(s: Subject) -> str:
    """The output does not depend on the order of tokens, where a mechanism claims so."""
    if s.contract.positions:
        return "it depends on positions"
    if isinstance(s.config, HeadMixerConfig) and s.config.dwc:
        return "the depth-wise convolution depends on positions"
    order = torch.randperm(s.grid.tokens)
    with torch.no_grad():
        s.same("tokens in another order", s.layer(s.x[:, order], s.grid), s.layer(s.x, s.grid)[:, order])
    return ""


def geometry(s: Subject) -> str:
    """A kernel with one non-zero tap in the convolution beside the mechanism shifts the values by one row, or frame."""
    if not isinstance(s.config, HeadMixerConfig):
        return "no depth-wise convolution beside it"
    layer = cast(HeadMixer, s.make(dataclasses.replace(s.config, dwc=3, gate=False)))
    conv = cast(nn.Conv2d, layer.dwc)
    with torch.no_grad():
        conv.weight.zero_()
        cast(Tensor, conv.bias).zero_()
        before = layer(s.x, s.grid)
        conv.weight[:, :, 0].flatten(2)[:, :, 3 ** (conv.weight.ndim - 3) // 2] = 1
        v = cast(Tensor, layer.project_heads(s.x, s.grid)["v"])
        shifted = torch.zeros_like(merge(v))
        start, stop, far = s.grid.prefix, s.grid.prefix + s.grid.cells, math.prod(s.grid.sides[1:])
        shifted[:, start + far : stop] = merge(v)[:, start : stop - far]
        s.same(
            "a kernel with one tap and values shifted by one row",
            layer(s.x, s.grid) - before,
            F.linear(shifted, layer.proj.weight),
        )
    return ""


def local(s: Subject) -> str:
    """A patch token influences those within `reach` and no others."""
    reach = s.contract.reach
    if reach is None:
        return "not local"
    places = torch.stack(torch.meshgrid(*map(torch.arange, s.grid.sides), indexing="ij"), -1).flatten(0, -2)
    far = (places - torch.tensor(s.grid.sides) // 2).abs().amax(-1)
    changed = s.x.clone()
    changed[:, s.grid.prefix + int(far.argmin())] += 1
    with torch.no_grad():
        difference = (s.layer(changed, s.grid) - s.layer(s.x, s.grid))[:, s.grid.span].abs().amax((0, 2))
    near = far <= reach
    if (difference[~near] > EXACT).any():
        raise ContractError(f"a patch token influences others beyond {reach}: by {difference[~near].max():.3g}")
    if (near & (difference <= EXACT)).any():
        raise ContractError(f"a patch token does not influence all others within {reach}")
    return ""


def other_grid(s: Subject) -> str:
    """A forward pass on another grid works, or raises an error of the package."""
    grid = dataclasses.replace(s.grid, height=s.grid.height + 1, width=s.grid.width + 2)
    try:
        out = s.layer(s.draw(grid, 7), grid)
    except RegardError as error:
        return f"refused: {error}"
    if out.shape != (s.batch, grid.tokens, s.dim) or not out.isfinite().all():
        raise ContractError(f"{grid} gave {tuple(out.shape)} or values that are not finite")
    return ""


def _applies(s: Subject, kind: str, mask: Mask) -> None:
    """A mask is applied: hidden tokens have no effect, not even inf or NaN in padding, and both forms agree."""
    layer = s.layer
    with torch.no_grad():
        out = layer(s.x, s.grid, mask)
        s.same(f"fast and plain form with a {kind} mask", out, layer.reference(s.x, s.grid, mask))
        if mask.bias is not None or mask.product is not None:
            if gap(out, layer(s.x, s.grid)) < 1e-6:
                raise ContractError("a bias changes nothing")
            return
        kept = (
            mask.keep if mask.keep is not None else torch.arange(s.grid.tokens).expand(s.batch, -1) < s.grid.tokens // 2
        )
        replacements = [s.x.flip(0) + 1]
        if mask.keep is not None:  # padding is often uninitialised memory
            replacements += [torch.full_like(s.x, value) for value in (torch.inf, torch.nan)]
        for hidden in replacements:
            other = layer(torch.where(kept[..., None], s.x, hidden), s.grid, mask)
            s.same(f"outputs after a change of hidden tokens ({kind})", other[kept], out[kept], 1e-11)
    if mask.keep is not None:
        x = s.x.clone().requires_grad_()
        out = layer(x, s.grid, Mask(keep=torch.zeros_like(mask.keep)))
        (grad,) = torch.autograd.grad(out.sum(), x)
        if not (out.isfinite().all() and grad.isfinite().all()):
            raise ContractError("with every token hidden, outputs or gradients are not finite")


def _refuses(s: Subject, kind: str, mask: Mask) -> None:
    try:
        s.layer(s.x, s.grid, mask)
    except UnsupportedError as error:
        if kind not in str(error):
            raise ContractError(f"the error for a {kind} mask does not name it: {error}") from error
    else:
        raise ContractError(f"a {kind} mask is not in `masks` but was accepted")
