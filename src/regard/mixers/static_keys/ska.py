"""Static key attention: A = softmax(q K^T), K learned per head and token instead of projected (SKA, Sec. 4.1).

Sec. 4.1 and Algorithm 1 have no scale; the authors' code has d^-0.5, which is the default here (`scale`).
Queries and values come from the input; a key belongs to a position. So SKA is not permutation equivariant, and its keys
belong to one grid: on another grid they are resampled, or windows of the trained grid cover it; the keys of prefix and
suffix tokens, a parameter of their own, stay. In windows a patch token attends to the prefix and suffix tokens and to
its own window; a prefix or suffix token attends to all keys, repeated.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    NO_MASK,
    Card,
    Cost,
    Grid,
    Inputs,
    Mask,
    Site,
    UnsupportedError,
    attention_cost,
    hide,
    operator_function,
)
from regard.core.errors import ConfigError, ShapeError, nearest
from regard.core.view import View
from regard.mixers.shared.sdpa import sdpa
from regard.mixers.shared.tiles import join_tokens, split_tokens

from .grids import in_windows, join_windows, repeat_window, windows_on
from .keys import ACTIVATIONS, StaticConfig, StaticOperator, weigh

__all__ = ["SKA", "ska", "ska_reference"]


@operator_function
def ska_reference(
    q: Float[Tensor, "B H N d"], keys: Float[Tensor, "H M d"], v: Float[Tensor, "B H M e"], *,
    scale: float | None = None, mask: Mask | None = None, activation: str = "softmax",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """activation(scale q keys^T + bias) v; scale None = d^-0.5. A forbidden key has the weight 0 for any activation."""
    v = hide(v, mask)
    logits = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return weigh((mask or NO_MASK).add_to(logits), activation).to(v.dtype) @ v


@operator_function
def ska(
    q: Float[Tensor, "B H N d"], keys: Float[Tensor, "H M d"], v: Float[Tensor, "B H M e"], *,
    scale: float | None = None, mask: Mask | None = None, activation: str = "softmax",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same by fused attention on the expanded keys.

    activation "none" runs in linear time as q (keys^T v) unless there is a causal mask or a bias. Values hidden by
    padding, even NaN, have no effect.
    Raises: ShapeError if q, keys and v do not fit together; ConfigError for an unknown activation.
    """
    _check(q, keys, v, activation)
    mask, v = mask or NO_MASK, hide(v, mask)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if activation == "none" and mask.kinds <= {"padding"}:
        return q @ (keys.mT @ v) * factor
    if activation != "softmax":
        return weigh(mask.add_to(q @ keys.mT * factor), activation, masked=bool(mask.kinds)).to(v.dtype) @ v
    dense = mask.dense(q, keys.shape[-2])
    return sdpa(q, keys.expand(q.shape[0], -1, -1, -1), v, attn_mask=dense, scale=scale)


def ska_macs(queries: int, keys: int, site: Site, activation: str, biased: bool = False) -> int:
    """MACs of `ska` at a site. biased: whether its mask has a bias, with which "none" does not run in linear time."""
    if activation == "none" and not biased:
        return (queries + keys) * site.inner * site.width
    return attention_cost(queries, keys, site.inner).macs


@dataclass(frozen=True, kw_only=True)
class SKA(StaticConfig):
    """scale, init, resize, activation, heads, normalise: see `StaticConfig`.

    init="paper" draws keys with standard deviation 1. activation="none" runs in linear time.
    """

    card = Card(
        title="Static key attention", source="Static Key Attention in Vision, Sec. 4.1",
        formula="softmax(q K^T) v with learned K; by default times d^-0.5, as the authors' code", complexity="O(N^2 C)",
        query_content=True, key_content=False, dynamic="one-step", expert_type="MLP of width N, keys static",
        expert_count="1", construction="learned keys", topology="all-to-one",
        prefix="queries like any other; their keys are parameters of their own and are not resampled",
    )  # fmt: skip
    depth = True
    samples = (
        "SKA()", "SKA(scale=1.0, dwc=5)", 'SKA(resize="window")', "SKA(projection=IdentityQuery())",
        'SKA(activation="none", normalise="1/N")',
    )  # fmt: skip

    def operator(self, site: Site) -> "SKAOperator":
        if self.resize == "window" and site.grid.depth > 1:
            raise UnsupportedError(f"windows of static keys are of one image, not of {site.grid}; take another resize=")
        return SKAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        n, m = site.grid.tokens, (site.memory or site.grid).tokens
        return Cost(m * site.inner, ska_macs(n, m, site, self.activation))


class SKAOperator(StaticOperator):
    """keys (H, patch tokens, d) on the build grid, row by row; extra_keys (H, prefix + suffix, d) or None.

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
        """Use these keys, in token order on the build grid."""
        self.freeze(None)
        extra, cells = split_tokens(keys, self.grid)
        self.keys.copy_(cells)
        if self.extra_keys is not None:
            self.extra_keys.copy_(extra)

    def constants(self, grid: Grid) -> dict[str, Tensor]:
        return {"keys": join_tokens(self.extra_keys, self.resample_keys(self.keys, grid), grid)}

    def keys_on(self, grid: Grid) -> Float[Tensor, "H M d"]:
        """All keys in token order for a grid; on another grid bicubic, antialiased, computed in float32 or better.

        With resize="window" those of one window. Raises: GridError as `on`.
        """
        return self.on(grid)["keys"]

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, v, memory = inputs.q, inputs.v, inputs.key_grid
        keys = self.keys_on(memory).to(q.dtype)
        if self.runs_in_windows(memory):
            return self._plain_windows(inputs, keys) if plain else self._windows(inputs, keys)
        return self._attention(q, keys, self.share(v, memory.tokens), inputs.mask, plain)

    def views(self, inputs: Inputs) -> tuple[View, ...]:
        """How alike the static key of each token's place is to those of the others, by their cosine."""
        if inputs.memory is not None or self.runs_in_windows(inputs.grid):
            return ()
        keys = F.normalize(self.keys_on(inputs.grid), dim=-1)
        return (View("how alike its static key is to others", keys @ keys.mT),)

    def _attention(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask | None, plain: bool) -> Tensor:
        form = ska_reference if plain else ska
        return form(q, keys, v, scale=self.config.scale, mask=mask, activation=self.config.activation)

    def _windows(self, inputs: Inputs, keys: Tensor) -> Tensor:
        """Patch tokens window by window, then prefix and suffix tokens with the keys of all windows."""
        grid, memory, mask, v = inputs.grid, inputs.key_grid, inputs.mask, inputs.v
        extra, cells = split_tokens(inputs.q, grid)
        grids, windows = (grid, memory), (self.site_grid, self.grid)
        part, values, hidden = in_windows(cells, self.share(v, self.grid.tokens), grids, windows, mask)
        out = join_windows(self._attention(part, keys, values, hidden, plain=False), grid, self.site_grid)
        if not grid.extra:
            return out
        v, keys = self.share(v, memory.tokens), repeat_window(keys, self.grid, memory)
        return join_tokens(self._attention(extra, keys, v, mask, plain=False), out, grid)

    def _plain_windows(self, inputs: Inputs, keys: Tensor) -> Tensor:
        """The keys of all windows side by side, and a bias that is -inf between windows."""
        q, grid, memory, mask = inputs.q, inputs.grid, inputs.key_grid, inputs.mask
        block = torch.zeros(grid.tokens, memory.tokens, dtype=q.dtype, device=q.device)
        rows, columns = _window_of(grid, self.site_grid, q), _window_of(memory, self.grid, q)
        block[grid.span, memory.span].masked_fill_(rows[:, None] != columns, -torch.inf)
        hidden = Mask(keep=None if mask is None else mask.keep, bias=block)
        out = self._attention(q, repeat_window(keys, self.grid, memory), inputs.v, hidden, plain=True)
        extra, cells = split_tokens(out, grid)
        return join_tokens(self.share(extra, memory.tokens), self.share(cells, self.grid.tokens), grid)


def _window_of(grid: Grid, window: Grid, q: Tensor) -> Tensor:
    """The index of the window of every patch token."""
    rows = torch.arange(grid.height, device=q.device) // window.height
    columns = torch.arange(grid.width, device=q.device) // window.width
    return (rows[:, None] * windows_on(grid, window)[1] + columns).flatten()


def _check(q: Tensor, keys: Tensor, v: Tensor, activation: str) -> None:
    expected = (q.shape[1], v.shape[-2], q.shape[-1])
    if tuple(keys.shape) != expected:
        raise ShapeError(f"ska: keys have shape {tuple(keys.shape)}; expected (heads, keys, width) = {expected}")
    if keys.dtype != q.dtype:
        raise ShapeError(f"ska: keys are {keys.dtype}, q is {q.dtype}; cast them to one dtype")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"ska has no activation {activation!r}; {nearest(activation, ACTIVATIONS)}")
