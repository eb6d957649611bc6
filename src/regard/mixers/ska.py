"""Static key attention: A = softmax(scale q K^T), K learned per head and token instead of projected (SKA, Sec. 4.1).

Queries and values come from the input; a key stands for a place. So SKA is not permutation equivariant, and its keys
belong to one grid: another grid resamples them, or is covered by windows of the trained grid, while the keys of extra
tokens, a parameter of their own, stay. In windows every cell sees the extra tokens and its own window; an extra token
sees all keys, tiled.
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
    Mask,
    ShapeError,
    Site,
    attend,
    nearest,
    softmax_rows,
)

from .heads import CrossMixer, HeadMixer, check_heads
from .sdpa import sdpa
from .static import StaticConfig, StaticOperator, apart, in_windows, join, tiled, tokens_of, windows_on
from .static import resample as resample


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
class SKA(StaticConfig):
    """scale, init, resize: see `StaticConfig`; init="paper" has the standard deviation 1.

    activation: "softmax", or "relu", "gelu", "starrelu" (SKA Table 4) or "none" (linear time).
    heads: number of heads of the host's width, 0 = as many as the host. The paper's models "b" have more, to be as
    large as the model that they are compared with.
    windows: in a host that brings windows in the batch (Swin), 1 is one key for all windows; the paper's Swin has a key
    for each of its windows, of which a call's batch must be a multiple. With more than 1 the only mask is a bias.
    """

    activation: Literal["softmax", "relu", "gelu", "starrelu", "none"] = "softmax"
    heads: int = 0
    windows: int = 1

    card: ClassVar[Card] = Card(
        title="Static key attention",
        source="Static Key Attention in Vision, Sec. 4.1",
        formula="softmax(q K^T / sqrt(d)) v with learned K",
        complexity="O(N^2 C)",
        query_content=True,
        key_content=False,
        dynamic="one-step",
        expert_type="MLP of width N, keys static",
        expert_count="1",
        construction="learned keys",
        topology="all-to-one",
        prefix="a query like any other; its key is learned apart and is not resampled",
    )

    @property
    def masks(self) -> frozenset[str]:  # type: ignore[override]
        """The kinds of mask."""
        return frozenset({"causal", "padding", "bias"} if self.windows == 1 else {"bias"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options({"activation": ACTIVATIONS})
        if self.heads < 0 or self.windows < 1:
            raise ConfigError(
                "SKA has at least one head, or 0 for the host's number, and at least one window, "
                f"not heads={self.heads}, windows={self.windows}"
            )

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
        return Cost(m * site.inner * self.windows) + (
            linear_time if self.activation == "none" else attend(n, m, site.inner)
        )


class SKAOperator(StaticOperator):
    """keys (windows * H, cells, d) on the build grid, rows first; extra_keys (windows * H, prefix + suffix, d) or None.

    The keys lie on the memory's grid in cross-attention.
    """

    config: SKA

    def __init__(self, config: SKA, site: Site) -> None:
        super().__init__(config, site)
        images = config.windows * site.heads
        self.keys = nn.Parameter(torch.empty(images, self.grid.cells, site.width))
        extra = torch.empty(images, self.grid.extra, site.width)
        self.extra_keys = nn.Parameter(extra) if self.grid.extra else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all keys as `config.init` says."""
        self.freeze(None)
        for keys in self.parameters():
            if self.config.init == "paper":
                nn.init.normal_(keys)
            else:
                nn.init.trunc_normal_(keys, std=0.02)

    @torch.no_grad()
    def set_keys(self, keys: Float[Tensor, "H M d"]) -> None:
        """Take these keys, in token order on the build grid."""
        extra, cells = apart(keys, self.grid)
        self.keys.copy_(cells)
        if self.extra_keys is not None:
            self.extra_keys.copy_(extra)

    def means(self, k: Float[Tensor, "B H M d"]) -> Float[Tensor, "H2 M d"]:
        return self._fold(k).mean(0)

    def constants(self, grid: Grid) -> dict[str, Tensor]:
        cells = self.resampled(self.keys, grid)
        return {"keys": cells if self.extra_keys is None else tokens_of(cells, self.extra_keys, grid)}

    def keys_on(self, grid: Grid) -> Float[Tensor, "H M d"]:
        """All keys in token order for a grid: bicubic, antialiased, in float32 at least where the grid is another.

        With resize="window" those of one window. Raises: GridError as `on`.
        """
        return self.on(grid)["keys"]

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
        q, v, mask = self._fold(cast(Tensor, q)), self._fold(cast(Tensor, v)), self._fold_mask(mask, cast(Tensor, q))
        keys, memory = self.keys_on(memory or grid).to(q.dtype), memory or grid
        scale, activation = self.config.scale, self.config.activation
        if not self.windowed(memory):
            return self._unfold(ska(q, keys, v, scale=scale, mask=mask, activation=activation))
        extra, cells = apart(q, grid)
        grids, windows = (grid, memory), (self.site_grid, self.grid)
        part, values, hidden = in_windows(cells, v, grids, windows, mask)
        made = ska(part, keys, values, scale=scale, mask=hidden, activation=activation)
        out = join(made, grid, self.site_grid)
        if not grid.extra:
            return self._unfold(out)
        first = ska(extra, self._tiled(keys, memory), v, scale=scale, mask=mask, activation=activation)
        return self._unfold(tokens_of(out, first, grid))

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
        q, v, mask = self._fold(cast(Tensor, q)), self._fold(cast(Tensor, v)), self._fold_mask(mask, cast(Tensor, q))
        keys, memory = self.keys_on(memory or grid).to(q.dtype), memory or grid
        scale, activation = self.config.scale, self.config.activation
        if not self.windowed(memory):
            return self._unfold(ska_reference(q, keys, v, scale=scale, mask=mask, activation=activation))
        # tiled keys and a block mask
        keys = self._tiled(keys, memory)
        block = torch.ones(grid.tokens, memory.tokens, dtype=torch.bool, device=q.device)
        rows, columns = _window_of(grid, self.site_grid, q), _window_of(memory, self.grid, q)
        block[grid.span, memory.span] = rows[:, None] == columns
        if activation == "softmax":
            bias = torch.zeros_like(block, dtype=q.dtype).masked_fill_(~block, -torch.inf)
            hidden = Mask(keep=None if mask is None else mask.keep, bias=bias)
            return self._unfold(ska_reference(q, keys, v, scale=scale, mask=hidden))
        eye = torch.eye(memory.tokens, dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        a = ska_reference(q, keys, eye, scale=scale, mask=mask, activation=activation)
        return self._unfold((a * block) @ v)

    def _tiled(self, keys: Tensor, memory: Grid) -> Tensor:
        extra, cells = apart(keys, self.grid)
        return tokens_of(tiled(cells, self.grid, memory), extra, memory)

    def _fold(self, x: Tensor) -> Tensor:
        """The host's windows from the batch into the heads."""
        if self.config.windows == 1:
            return x
        if len(x) % self.config.windows:
            raise ShapeError(
                f"a batch of {len(x)} windows does not divide into images of {self.config.windows} windows; "
                "SKA(windows=1) shares one key"
            )
        return x.unflatten(0, (-1, self.config.windows)).flatten(1, 2)

    def _unfold(self, x: Tensor) -> Tensor:
        return x if self.config.windows == 1 else x.unflatten(1, (self.config.windows, -1)).flatten(0, 1)

    def _fold_mask(self, mask: Mask | None, q: Tensor) -> Mask | None:
        if mask is None or mask.bias is None or self.config.windows == 1:
            return mask
        bias = mask.bias.expand(len(q), q.shape[1], *mask.bias.shape[-2:])
        return Mask(bias=self._fold(bias))


def _window_of(grid: Grid, window: Grid, q: Tensor) -> Tensor:
    """The number of the window of every cell."""
    rows = torch.arange(grid.height, device=q.device) // window.height
    columns = torch.arange(grid.width, device=q.device) // window.width
    return (rows[:, None] * windows_on(grid, window)[1] + columns).flatten()


def _check(q: Tensor, keys: Tensor, v: Tensor, activation: str) -> None:
    check_heads("ska", q=q, v=v)
    expected = (q.shape[1], v.shape[-2], q.shape[-1])
    if tuple(keys.shape) != expected:
        raise ShapeError(f"ska: keys have shape {tuple(keys.shape)}; expected (heads, keys, width) = {expected}")
    if keys.dtype != q.dtype:
        raise ShapeError(f"ska: keys are {keys.dtype}, q is {q.dtype}; cast them to one dtype")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"ska has no activation {activation!r}; {nearest(activation, ACTIVATIONS)}")
