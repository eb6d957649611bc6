"""Static key attention: A = softmax(scale q K^T), K learned per head and token instead of projected (SKA, Sec. 4.1).

Queries and values come from the input; a key stands for a place. So SKA is not permutation equivariant, and its keys
belong to one grid: another grid resamples them, while the keys of extra tokens, a parameter of their own, stay.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    NOTHING,
    Card,
    ConfigError,
    Cost,
    Grid,
    GridError,
    Mask,
    Operator,
    ShapeError,
    Site,
    attend,
    nearest,
    softmax_rows,
)

from .heads import CrossMixer, HeadMixer, HeadMixerConfig, check_heads
from .sdpa import sdpa


def _star_relu(x: Tensor) -> Tensor:
    return 0.8944 * F.relu(x).square() - 0.4472  # MetaFormer's constants, not learned here


# what may stand in the place of the softmax (SKA Table 4); the weights of a row then do not sum to 1
_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "starrelu": _star_relu,
    "none": lambda x: x,
}
ACTIVATIONS = ("softmax", *_POINTWISE)


def ska_reference(
    q: Float[Tensor, "B H N d"],
    keys: Float[Tensor, "H M d"],
    v: Float[Tensor, "B H M e"],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    activation: str = "softmax",
) -> Float[Tensor, "B H N e"]:
    """activation(scale q keys^T + bias) v; scale None = d^-0.5. A forbidden key has the weight 0 for any activation."""
    mask = mask or NOTHING
    logits = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if activation == "softmax":
        return softmax_rows(mask.added(logits)) @ v
    a = _POINTWISE[activation](logits if mask.bias is None else logits + mask.bias)
    keep = mask.allowed(q.shape[-2], keys.shape[-2], q.device)
    return (a if keep is None else a.masked_fill(~keep, 0.0)) @ v


def ska(
    q: Float[Tensor, "B H N d"],
    keys: Float[Tensor, "H M d"],
    v: Float[Tensor, "B H M e"],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    activation: str = "softmax",
) -> Float[Tensor, "B H N e"]:
    """The same through fused attention on the expanded keys.

    activation "none" runs in linear time as q (keys^T v) unless there is a causal mask or a bias.
    Raises: ShapeError if q, keys and v do not fit together; ConfigError for an unknown activation.
    """
    _check(q, keys, v, activation)
    mask = mask or NOTHING
    if activation == "none" and mask.kinds <= {"padding"}:
        if mask.keep is not None:
            mask.allowed(q.shape[-2], keys.shape[-2], q.device)  # the door of the mask
            v = v * mask.keep[:, None, :, None]
        return q @ (keys.mT @ v) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if activation != "softmax":
        return ska_reference(q, keys, v, scale=scale, mask=mask, activation=activation)
    dense = mask.dense(q, keys.shape[-2])
    return sdpa(q, keys.expand(len(q), -1, -1, -1), v, attn_mask=dense, scale=scale)


@dataclass(frozen=True, kw_only=True)
class SKA(HeadMixerConfig):
    """scale: factor of the logits, None = d^-0.5 (the paper's Algorithm 1 has 1.0, its code d^-0.5).

    init: "trunc_normal" starts the keys with standard deviation 0.02, near the uniform average; "paper" with 1.
    resize: what a call on another grid does: "interpolate" resamples the keys, "error" refuses.
    activation: "softmax", or "relu", "gelu", "starrelu" (SKA Table 4) or "none" (linear time).
    heads: number of heads of the host's width, 0 = as many as the host. The paper's models "b" have more, to be as
    large as the model that they are compared with.
    """

    scale: float | None = None
    init: Literal["trunc_normal", "paper"] = "trunc_normal"
    resize: Literal["interpolate", "error"] = "interpolate"
    activation: Literal["softmax", "relu", "gelu", "starrelu", "none"] = "softmax"
    heads: int = 0

    card: ClassVar[Card] = Card(
        title="Static key attention",
        source="Static Key Attention in Vision, Sec. 4.1",
        formula="softmax(q K^T / sqrt(d)) v with learned K",
        complexity="O(N^2 C)",
        query_content=True,
        key_content=False,
        dynamic="one-step",
        expert_type="all keys, static",
        expert_count="1",
        construction="shared",
        topology="dense",
        prefix="a query like any other; its key is learned apart and is not resampled",
    )
    masks: ClassVar[frozenset[str]] = frozenset({"causal", "padding", "bias"})
    cross: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, options in (
            ("init", ("trunc_normal", "paper")),
            ("resize", ("interpolate", "error")),
            ("activation", ACTIVATIONS),
        ):
            value = getattr(self, name)
            if value not in options:
                raise ConfigError(f"SKA has no {name}={value!r}; {nearest(str(value), options)}")
        if self.heads < 0:
            raise ConfigError(f"SKA has at least one head, or 0 for the host's number, not heads={self.heads}")

    @property
    def uses(self) -> str:
        """No key is projected."""
        return "qv"

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        return super().build(self._widened(site), shared)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> CrossMixer:
        return super().build_cross(self._widened(site), shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        return super().cost(self._widened(site), accounting)

    def _widened(self, site: Site) -> Site:
        return replace(site, heads=self.heads) if self.heads else site

    def operator(self, site: Site) -> "SKAOperator":
        return SKAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        n, m = site.grid.tokens, (site.memory or site.grid).tokens
        linear_time = Cost(0, (n + m) * site.inner * site.width)
        return Cost(m * site.inner) + (linear_time if self.activation == "none" else attend(n, m, site.inner))


class SKAOperator(Operator):
    """keys (H, cells, d) on the build grid, rows first; extra_keys (H, prefix + suffix, d) or None.

    The keys lie on the memory's grid in cross-attention.
    """

    def __init__(self, config: SKA, site: Site) -> None:
        super().__init__()
        self.config, self.grid = config, site.memory or site.grid
        self.keys = nn.Parameter(torch.empty(site.heads, self.grid.cells, site.width))
        extra = torch.empty(site.heads, self.grid.extra, site.width)
        self.extra_keys = nn.Parameter(extra) if self.grid.extra else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all keys as `config.init` says."""
        for keys in self.parameters():
            if self.config.init == "paper":
                nn.init.normal_(keys)
            else:
                nn.init.trunc_normal_(keys, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to keep out of weight decay: under softmax it would only move the keys' free mean."""
        return {name for name, _ in self.named_parameters()}

    def keys_on(self, grid: Grid) -> Float[Tensor, "H M d"]:
        """All keys in token order for a grid: bicubic, antialiased, in float32 at least where the grid is another.

        Raises: GridError if the extra tokens are others than those of the build grid, or if resize is "error".
        """
        if (grid.prefix, grid.suffix) != (self.grid.prefix, self.grid.suffix):
            raise GridError(f"static keys were built for {self.grid}, not for {grid}; extra tokens must be the same")
        cells: Tensor = self.keys
        if grid.height != self.grid.height or grid.width != self.grid.width:  # Dynamo cannot compare whole grids
            if self.config.resize == "error":
                raise GridError(f"static keys lie on {self.grid}, not on {grid}; SKA(resize='interpolate') resamples")
            cells = resample(cells, self.grid, grid)
        if self.extra_keys is None:
            return cells
        first, last = self.extra_keys.split([grid.prefix, grid.suffix], dim=1)
        return torch.cat([first, cells, last], 1)

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q, v = cast(Tensor, q), cast(Tensor, v)
        keys = self.keys_on(memory or grid).to(q.dtype)
        return ska(q, keys, v, scale=self.config.scale, mask=mask, activation=self.config.activation)

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        q, v = cast(Tensor, q), cast(Tensor, v)
        keys = self.keys_on(memory or grid).to(q.dtype)
        return ska_reference(q, keys, v, scale=self.config.scale, mask=mask, activation=self.config.activation)


def resample(keys: Float[Tensor, "H cells d"], old: Grid, new: Grid) -> Float[Tensor, "H cells2 d"]:
    """Keys of the cells of `old`, bicubic and antialiased, on the cells of `new`; computed in float32 at least."""
    if old.height == new.height and old.width == new.width:
        return keys
    wide = torch.promote_types(keys.dtype, torch.float32)
    rows, columns = (_bicubic(a, b, wide, keys.device) for a, b in ((old.height, new.height), (old.width, new.width)))
    image = keys.mT.unflatten(-1, (old.height, old.width)).to(wide)
    return (rows @ image @ columns.mT).flatten(-2).mT.to(keys.dtype)


@torch.no_grad()
def _bicubic(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "new old"]:
    # The resampling is linear and separable. As a matrix it has a gradient under torch.compile at any size; that of
    # the interpolation itself fails there for a size that is not constant.
    # Two equal columns: torch 2.15 on the CPU resamples an image of one column wrongly.
    eye = torch.eye(old, dtype=dtype, device=device)[None, :, :, None].repeat(1, 1, 1, 2)
    return F.interpolate(eye, (new, 2), mode="bicubic", antialias=True, align_corners=False)[0, :, :, 0].mT


def _check(q: Tensor, keys: Tensor, v: Tensor, activation: str) -> None:
    check_heads("ska", q=q, v=v)
    expected = (q.shape[1], v.shape[-2], q.shape[-1])
    if tuple(keys.shape) != expected:
        raise ShapeError(f"ska: keys have shape {tuple(keys.shape)}; expected (heads, keys, width) = {expected}")
    if keys.dtype != q.dtype:
        raise ShapeError(f"ska: keys are {keys.dtype}, q is {q.dtype}; cast them to one dtype")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"ska has no activation {activation!r}; {nearest(activation, ACTIVATIONS)}")
