"""Static key attention: A = softmax(scale q K^T), K learned per head and token instead of projected (SKA, Sec. 4.1).

Queries and values come from the input; a key stands for a place. So SKA is not permutation equivariant, and its keys
belong to one grid: another grid resamples them, or is covered by windows of the trained grid, while the keys of extra
tokens, a parameter of their own, stay. In windows every cell sees the extra tokens and its own window; an extra token
sees all keys, tiled.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import NOTHING, Card, ConfigError, Cost, Grid, Mask, ShapeError, Site, attend, hide, nearest
from regard.mixers.shared.heads import check_heads
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.shared.tiles import join_tokens, split_tokens

from .grids import in_windows, join, tiled, windows_on
from .keys import ACTIVATIONS, StaticConfig, StaticOperator, weigh

__all__ = ["SKA", "ska", "ska_reference"]


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
    v = hide(v, mask)
    logits = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return weigh((mask or NOTHING).added(logits), activation) @ v


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

    activation "none" runs in linear time as q (keys^T v) unless there is a causal mask or a bias. What a value hidden
    by padding holds, even a NaN, does not matter.
    Raises: ShapeError if q, keys and v do not fit together; ConfigError for an unknown activation.
    """
    _check(q, keys, v, activation)
    mask, v = mask or NOTHING, hide(v, mask)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if activation == "none" and mask.kinds <= {"padding"}:
        return q @ (keys.mT @ v) * factor
    if activation != "softmax":
        return weigh(mask.added(q @ keys.mT * factor), activation, masked=bool(mask.kinds)) @ v
    dense = mask.dense(q, keys.shape[-2])
    return sdpa(q, keys.expand(q.shape[0], -1, -1, -1), v, attn_mask=dense, scale=scale)


def ska_macs(queries: int, keys: int, site: Site, activation: str, biased: bool = False) -> int:
    """MACs of `ska` at a site; biased: with a bias in its mask, which keeps "none" from running in linear time."""
    if activation == "none" and not biased:
        return (queries + keys) * site.inner * site.width
    return attend(queries, keys, site.inner).macs


@dataclass(frozen=True, kw_only=True)
class SKA(StaticConfig):
    """scale, init, resize, activation, heads, normalise: see `StaticConfig`.

    init="paper" has the standard deviation 1. activation="none" runs in linear time.
    """

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
    samples: ClassVar[tuple[str, ...]] = (
        "SKA()",
        "SKA(scale=1.0, dwc=5)",
        'SKA(resize="window")',
        "SKA(projection=IdentityQuery())",
        'SKA(activation="none", normalise="1/N")',
    )

    def operator(self, site: Site) -> "SKAOperator":
        return SKAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        n, m = site.grid.tokens, (site.memory or site.grid).tokens
        return Cost(m * site.inner, ska_macs(n, m, site, self.activation))


class SKAOperator(StaticOperator):
    """keys (H, cells, d) on the build grid, rows first; extra_keys (H, prefix + suffix, d) or None.

    The keys lie on the memory's grid in cross-attention.
    """

    config: SKA

    def __init__(self, config: SKA, site: Site) -> None:
        super().__init__(config, site)
        self.keys = nn.Parameter(torch.empty(site.heads, self.grid.cells, site.width))
        extra = torch.empty(site.heads, self.grid.extra, site.width)
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
        self.freeze(None)
        extra, cells = split_tokens(keys, self.grid)
        self.keys.copy_(cells)
        if self.extra_keys is not None:
            self.extra_keys.copy_(extra)

    def constants(self, grid: Grid) -> dict[str, Tensor]:
        cells = self.resampled(self.keys, grid)
        return {"keys": cells if self.extra_keys is None else join_tokens(self.extra_keys, cells, grid)}

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
        q, v = cast(Tensor, q), cast(Tensor, v)
        keys, memory = self.keys_on(memory or grid).to(q.dtype), memory or grid
        scale, activation = self.config.scale, self.config.activation
        if not self.windowed(memory):
            return ska(q, keys, self.share(v, memory.tokens), scale=scale, mask=mask, activation=activation)
        extra, cells = split_tokens(q, grid)
        grids, windows = (grid, memory), (self.site_grid, self.grid)
        part, values, hidden = in_windows(cells, self.share(v, self.grid.tokens), grids, windows, mask)
        made = ska(part, keys, values, scale=scale, mask=hidden, activation=activation)
        out = join(made, grid, self.site_grid)
        if not grid.extra:
            return out
        v, keys = self.share(v, memory.tokens), self._tiled(keys, memory)
        return join_tokens(ska(extra, keys, v, scale=scale, mask=mask, activation=activation), out, grid)

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
        keys, memory = self.keys_on(memory or grid).to(q.dtype), memory or grid
        scale, activation = self.config.scale, self.config.activation
        if not self.windowed(memory):
            return ska_reference(q, keys, self.share(v, memory.tokens), scale=scale, mask=mask, activation=activation)
        # tiled keys and a block mask
        block = torch.zeros(grid.tokens, memory.tokens, dtype=q.dtype, device=q.device)
        rows, columns = _window_of(grid, self.site_grid, q), _window_of(memory, self.grid, q)
        block[grid.span, memory.span].masked_fill_(rows[:, None] != columns, -torch.inf)
        hidden = Mask(keep=None if mask is None else mask.keep, bias=block)
        out = ska_reference(q, self._tiled(keys, memory), v, scale=scale, mask=hidden, activation=activation)
        extra, cells = split_tokens(out, grid)
        return join_tokens(self.share(extra, memory.tokens), self.share(cells, self.grid.tokens), grid)

    def _tiled(self, keys: Tensor, memory: Grid) -> Tensor:
        extra, cells = split_tokens(keys, self.grid)
        return join_tokens(extra, tiled(cells, self.grid, memory), memory)


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
