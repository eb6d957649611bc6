"""The layer around an operator: projection, q/k normalisation, rotary, local convolution, gate, output projection."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import (
    ConfigError,
    Cost,
    Grid,
    Mask,
    Mixer,
    MixerConfig,
    Operator,
    ProjectionConfig,
    ShapeError,
    Site,
    UnsupportedError,
    check_accounting,
    linear,
    merge,
    only_kept,
)
from regard.projections.linear import LinearQKV


@dataclass(frozen=True, kw_only=True)
class HeadMixerConfig(MixerConfig):
    """What every mechanism on heads has: proj(SiLU(W_g x) * (mechanism(q, k, v) + dwc(v))).

    projection: how q, k and v are made. dwc: kernel of a depth-wise convolution of v on the grid, 0 = none (extra
    tokens get nothing from it, and tokens that a padding mask hides give nothing; it sees later cells, so that no mask
    is causal with it). gate: whether the SiLU gate is there.
    """

    projection: ProjectionConfig = LinearQKV()
    dwc: int = 0
    gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dwc < 0 or (self.dwc and self.dwc % 2 == 0):
            raise ConfigError(f"dwc is the odd kernel of a convolution or 0 for none, not {self.dwc}")
        if self.dwc and "causal" in self.masks:
            object.__setattr__(self, "masks", self.masks - {"causal"})

    @abstractmethod
    def operator(self, site: Site) -> Operator:
        """The mathematics, with its parameters, at a site."""

    @abstractmethod
    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Cost of the operator alone."""

    @property
    def roles(self) -> str:
        """The roles that are projected: those that the operator uses, and v where the convolution needs it."""
        return "".join(role for role in "qkv" if role in self.uses or (role == "v" and self.dwc))

    def shared(self) -> nn.Module | None:
        return self.projection.shared(self.roles)

    def build(self, site: Site, shared: nn.Module | None = None) -> "HeadMixer":
        return HeadMixer(self, site, shared)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> "CrossMixer":
        """The layer whose keys and values come from another input on site.memory.

        Raises: UnsupportedError if the mechanism needs one input for both.
        """
        if not self.cross:
            raise UnsupportedError(f"{type(self).__name__} has no cross-attention")
        return CrossMixer(self, site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        check_accounting(accounting)
        n, inner = site.grid.tokens, site.inner
        total = self.projection.cost(site, self.roles) + self.operator_cost(site, accounting)
        total += linear(n, inner, site.dim, site.out_bias)
        if self.dwc:
            total += Cost(inner * (self.dwc**2 + 1), site.grid.cells * inner * self.dwc**2)
        if self.gate:
            total += linear(n, site.dim, inner, site.qkv_bias)
        norm = {"": 0, "rms": site.width, "layer": 2 * site.width}[site.qk_norm]
        return total + Cost(norm * len(set(self.roles) & set("qk")), 0)


class HeadLayer(Mixer):
    """What self- and cross-attention share; children qkv, operator, proj and, where asked, dwc, gate and norms."""

    config: HeadMixerConfig

    def __init__(self, config: HeadMixerConfig, site: Site, shared: nn.Module | None = None) -> None:
        super().__init__(config, site)
        self.qkv = config.projection.build(site, config.roles, shared)
        self.operator = config.operator(site)
        inner = site.inner
        self.dwc = nn.Conv2d(inner, inner, config.dwc, padding=config.dwc // 2, groups=inner) if config.dwc else None
        self.gate = nn.Linear(site.dim, inner, bias=site.qkv_bias) if config.gate else None
        norm = {"": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[site.qk_norm]
        for role in "qk":
            self.add_module(f"{role}_norm", norm(site.width) if site.qk_norm and role in config.roles else None)
        self.proj = nn.Linear(inner, site.dim, bias=site.out_bias)

    def normalised(self, role: str, x: Tensor, grid: Grid, rope: Tensor | None) -> Tensor:
        """q or k after its normalisation and rotation; v as it is."""
        norm = None if role == "v" else getattr(self, f"{role}_norm")
        x = x if norm is None else norm(x).to(x.dtype)  # on CUDA, autocast runs LayerNorm in float32
        return x if rope is None or role == "v" else rotate(x, rope, grid)

    def check(self, x: Tensor, grid: Grid, mask: Mask | None, memory: Grid | None = None) -> None:
        """As of every mixer; the convolution of values and a causal mask exclude each other (UnsupportedError)."""
        config = self.config
        if self.dwc is not None and mask is not None and mask.causal and "causal" in replace(config, dwc=0).masks:
            raise UnsupportedError(
                f"{type(config).__name__}(dwc={config.dwc}) cannot apply a causal mask: the convolution of values sees "
                "later tokens; give dwc=0"
            )
        super().check(x, grid, mask, memory)

    def beside(self, x: Tensor, out: Tensor, v: Tensor | None, grid: Grid, mask: Mask | None) -> Tensor:
        """out (B, N, inner) of the operator plus the branches beside it: here the convolution of v (B, H, N, e)."""
        if self.dwc is None:
            return out
        keep = mask.keep if mask is not None else None
        extra, cells = grid.to_map(merge(only_kept(cast(Tensor, v), keep)))
        return out + grid.from_map(torch.zeros_like(extra), self.dwc(cells))

    def finish(self, x: Tensor, out: Tensor) -> Tensor:
        """Gate, output projection and dropout; out (B, N, inner)."""
        if self.gate is not None:
            out = F.silu(self.gate(x)) * out
        return F.dropout(self.proj(out), self.site.drop, self.training)


class HeadMixer(HeadLayer):
    """Self-attention at a site of a network, with any operator and any projection."""

    def forward(
        self, x: Float[Tensor, "B N C"], grid: Grid, mask: Mask | None = None, rope: Tensor | None = None
    ) -> Float[Tensor, "B N C"]:
        return self._apply_operator(x, grid, mask, rope, plain=False)

    def reference(
        self, x: Float[Tensor, "B N C"], grid: Grid, mask: Mask | None = None, rope: Tensor | None = None
    ) -> Float[Tensor, "B N C"]:
        return self._apply_operator(x, grid, mask, rope, plain=True)

    def roles(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        """q, k, v (B, H, N, d) as the operator gets them; None for a role that is not projected."""
        made = dict(zip(self.config.roles, self.qkv(x, self.config.roles), strict=True))
        return {role: self.normalised(role, made[role], grid, rope) if role in made else None for role in "qkv"}

    def memory_grid(self, grid: Grid) -> Grid | None:
        """The grid of keys and values; None, as here, if it is that of the queries."""
        return None

    def _apply_operator(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None, plain: bool) -> Tensor:
        memory = self.memory_grid(grid)
        self.check(x, grid, mask, memory)
        made = self.roles(x, grid, rope)
        operator = self.operator.reference if plain else self.operator
        out = merge(operator(made["q"], made["k"], made["v"], grid=grid, memory=memory, mask=mask))
        return self.finish(x, self.beside(x, out, made["v"], grid, mask))


class CrossMixer(HeadLayer):
    """Cross-attention: queries from x on grid, keys and values from memory on memory_grid."""

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B N C"],
        grid: Grid,
        mask: Mask | None = None,
        rope: Tensor | None = None,
        *,
        memory: Float[Tensor, "B M C"],
        memory_grid: Grid,
    ) -> Float[Tensor, "B N C"]:
        self.check(x, grid, mask, memory_grid)
        if memory.ndim != 3 or (memory.shape[0], memory.shape[-1]) != (x.shape[0], self.site.dim):
            expected = f"({x.shape[0]}, tokens, {self.site.dim})"
            raise ShapeError(f"the memory has shape {tuple(memory.shape)}; expected {expected}")
        memory_grid.check(memory)
        if self.dwc is not None and (grid.height, grid.width, grid.extra) != (
            memory_grid.height,
            memory_grid.width,
            memory_grid.extra,
        ):  # number by number: Dynamo cannot compare whole grids
            raise ShapeError("dwc adds values at their own place: cross-attention needs dwc=0")
        roles = self.config.roles
        made: dict[str, Tensor | None] = dict.fromkeys("qkv")
        if "q" in roles:
            made["q"] = self.normalised("q", self.qkv(x, "q")[0], grid, rope)
        others = "".join(role for role in roles if role != "q")
        for role, y in zip(others, self.qkv(memory, others), strict=True):
            made[role] = self.normalised(role, y, memory_grid, rope)
        out = merge(self.operator(made["q"], made["k"], made["v"], grid=grid, memory=memory_grid, mask=mask))
        return self.finish(x, self.beside(x, out, made["v"], grid, mask))


def rotate(x: Float[Tensor, "B H N d"], rope: Float[Tensor, "... n d2"], grid: Grid) -> Float[Tensor, "B H N d"]:
    """Rotary embedding; neighbouring channels are pairs; rope has sines then cosines.

    rope: a row for each cell, and extra tokens stay; or a row for each token.
    Raises: ShapeError if rope has neither as many rows as the grid has cells nor as it has tokens.
    """
    if rope.shape[-2] not in (grid.cells, grid.tokens):
        raise ShapeError(
            f"the rotary tensor has {rope.shape[-2]} rows, the grid {grid.cells} cells and {grid.tokens} tokens"
        )
    sin, cos = rope.to(x.dtype).chunk(2, -1)
    every = rope.shape[-2] == grid.tokens
    cells = x if every else x[..., grid.span, :]
    turned = torch.stack([-cells[..., 1::2], cells[..., ::2]], -1).flatten(-2)
    cells = cells * cos + turned * sin
    if every:
        return cells
    return torch.cat([x[..., : grid.prefix, :], cells, x[..., grid.prefix + grid.cells :, :]], -2)


def check_heads(name: str, **tensors: Tensor) -> None:
    """The door of an operator function. Raises: ShapeError unless all are (B, H, tokens, width), same B, H, dtype."""
    first_name, first = next(iter(tensors.items()))
    for label, x in tensors.items():
        if x.ndim != 4:
            raise ShapeError(f"{name}: {label} has shape {tuple(x.shape)}; expected (batch, heads, tokens, width)")
        if x.shape[:2] != first.shape[:2]:
            raise ShapeError(
                f"{name}: {label} has batch and heads {tuple(x.shape[:2])}, {first_name} has {tuple(first.shape[:2])}"
            )
        if x.dtype != first.dtype:
            raise ShapeError(f"{name}: {label} is {x.dtype}, {first_name} is {first.dtype}; cast them to one dtype")


def check_qkv(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`check_heads` of q, k, v; also q and k must have one width and k and v one number of tokens."""
    check_heads(name, q=q, k=k, v=v)
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"{name}: q has width {q.shape[-1]}, k has {k.shape[-1]}; they must be equal")
    if k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"{name}: k has {k.shape[-2]} tokens, v has {v.shape[-2]}; they must be equal")
