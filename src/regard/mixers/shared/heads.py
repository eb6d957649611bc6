"""The layer around an operator: projection, q/k normalisation, rotary, local convolution, gate, output projection."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Inputs, Mask, Mixer, MixerConfig, Operator, ShapeError, Site, UnsupportedError, hide
from regard.core.contract import Contract
from regard.core.cost import Cost, check_accounting, linear_cost
from regard.core.projection import Projection, ProjectionConfig, merge
from regard.core.tensors import check_dtype, check_place, check_tensor
from regard.core.view import Samples
from regard.projections.linear import LinearQKV, project_roles

from .checks import check_odd_kernel


@dataclass(frozen=True, kw_only=True)
class HeadMixerConfig(MixerConfig):
    """The fields of every mechanism on heads: proj(SiLU(W_g x) * (mechanism(q, k, v) + dwc(v))).

    projection: how q, k and v are computed. dwc: kernel of a depth-wise convolution of v on the grid, 0 = none. It
    gives zeros for prefix and suffix tokens and ignores padding. Since it uses later tokens, a causal mask is refused.
    gate: whether the SiLU gate is used. MiTA's Table 2 prints no formula of its gate; we assume this one, on the
    output before its projection.
    host_bias: "drop" leaves out the position biases that a host such as Swin or BEiT adds to its logits, so that a
    mechanism that cannot add them goes into it all the same; the host's output then changes until it is trained.
    ordered: whether the mechanism itself depends on the order of tokens.
    """

    projection: ProjectionConfig = LinearQKV()
    dwc: int = 0
    gate: bool = False
    host_bias: Literal["keep", "drop"] = "keep"
    ordered: ClassVar[bool] = True

    @property
    def contract(self) -> Contract:
        skip = {"cross": self.refuses_cross} if self.refuses_cross else {}
        return Contract(positions=self.ordered or bool(self.dwc), skip=skip)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd_kernel(type(self).__name__, "dwc", self.dwc)
        if self.dwc and "causal" in self.masks:
            object.__setattr__(self, "masks", self.masks - {"causal"})

    @abstractmethod
    def operator(self, site: Site) -> Operator:
        """The operator for a site, with its parameters."""

    @abstractmethod
    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Cost of the operator alone."""

    @property
    def roles(self) -> str:
        """The roles that are projected: those that the operator uses, and v where the convolution needs it."""
        return self.uses + "v" if self.dwc and "v" not in self.uses else self.uses

    def shared(self) -> nn.Module | None:
        return self.projection.shared(self.roles)

    def build(self, site: Site, shared: nn.Module | None = None) -> "HeadMixer":
        return HeadMixer(self, site, shared)

    @property
    def refuses_cross(self) -> str:
        """Why this configuration has no cross-attention although its mechanism has it; "" where it has."""
        return ""

    def check_cross(self) -> None:
        """Raises UnsupportedError if the mechanism, or this configuration, needs one input for queries and keys."""
        if not self.cross or self.refuses_cross:
            reason = f": {self.refuses_cross}" if self.cross else ""
            raise UnsupportedError(f"{type(self).__name__} has no cross-attention{reason}")

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> "CrossMixer":
        """The layer whose keys and values come from another input on site.memory. Raises: as `check_cross`."""
        self.check_cross()
        return CrossMixer(self, site, shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        check_accounting(accounting)
        n, inner = site.grid.tokens, site.inner
        total = self.projection.cost(site, self.roles) + self.operator_cost(site, accounting)
        total += linear_cost(n, inner, site.dim, site.out_bias)
        if self.dwc:
            taps = self.dwc ** len(site.grid.sides)
            total += Cost(inner * (taps + 1), site.grid.cells * inner * taps)
        if self.gate:
            total += linear_cost(n, site.dim, inner, site.qkv_bias)
        norm = {"": 0, "rms": site.width, "layer": 2 * site.width}[site.qk_norm]
        return total + Cost(norm * len(set(self.roles) & set("qk")), 0)


def drops_bias(config: MixerConfig) -> bool:
    """Whether a mechanism leaves the position biases of its host out."""
    return isinstance(config, HeadMixerConfig) and config.host_bias == "drop"


def convolve(
    conv: nn.Module, cells: Float[Tensor, "B C ..."], run: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, "B C ..."]:
    """A convolution that was built for images or for clips, on a map (B, C, h, w) or (B, C, depth, h, w).

    run: what computes it; None = its call. Raises: UnsupportedError for a clip where it was built for images.
    """
    if cells.ndim == 5 and isinstance(conv, nn.Conv2d):
        raise UnsupportedError("a convolution that was built for images takes no frames: build the layer for a clip")
    if cells.ndim == 4 and isinstance(conv, nn.Conv3d):
        return (run or conv)(cells[:, :, None])[:, :, 0]
    return (run or conv)(cells)


class HeadLayer(Mixer):
    """The common part of self- and cross-attention; children qkv, operator, proj, proj_drop, maybe dwc, gate, norms.

    qkv_roles, qkv_by_head: of the rows of a fused `qkv`, of a host's too, as in `project_roles`.
    """

    config: HeadMixerConfig
    qkv_by_head = False

    def __init__(self, config: HeadMixerConfig, site: Site, shared: nn.Module | None = None) -> None:
        super().__init__(config, site)
        self.qkv, self.qkv_roles = config.projection.build(site, config.roles, shared), config.roles
        self.operator = config.operator(site)
        inner = site.inner
        conv = nn.Conv2d if site.grid.depth == 1 else nn.Conv3d
        self.dwc = conv(inner, inner, config.dwc, padding=config.dwc // 2, groups=inner) if config.dwc else None
        self.gate = nn.Linear(site.dim, inner, bias=site.qkv_bias) if config.gate else None
        norm = {"": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[site.qk_norm]
        for role in "qk":
            if role in config.roles:  # of another role, a normalisation that is set later would do nothing
                self.add_module(f"{role}_norm", norm(site.width) if site.qk_norm else None)
        self.proj = nn.Linear(inner, site.dim, bias=site.out_bias)
        self.proj_drop = nn.Dropout(site.drop)

    def project(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        """Some of the projected roles, such as "qv", in this order: as they come from `qkv`."""
        if isinstance(self.qkv, Projection):
            return cast(tuple[Tensor, ...], self.qkv(x, roles))
        return project_roles(self.qkv, x, self.qkv_roles, roles, self.site.heads, self.qkv_by_head)

    def role_heads(self, roles: str, x: Tensor, grid: Grid, rope: Tensor | None) -> dict[str, Tensor | None]:
        """Some roles (B, H, N, d) of tokens, normalised and rotated; None for one that is not projected."""
        heads: dict[str, Tensor | None] = dict.fromkeys(roles)
        if used := "".join(role for role in self.config.roles if role in roles):
            for role, y in zip(used, self.project(x, used), strict=True):
                heads[role] = self.normalise_and_rotate(role, y, grid, rope)
        return heads

    def normalise_and_rotate(self, role: str, x: Tensor, grid: Grid, rope: Tensor | None) -> Tensor:
        """q or k after its normalisation and rotation; v as it is."""
        if role == "v":
            return x
        norm = getattr(self, f"{role}_norm")
        x = x if norm is None else norm(x).to(x.dtype)  # on CUDA, autocast runs LayerNorm in float32
        return x if rope is None else apply_rotary(x, rope, grid)

    def check(self, x: Tensor, grid: Grid, mask: Mask | None, memory: Grid | None = None) -> None:
        """The checks of every mixer. Raises: also UnsupportedError for a causal mask with a convolution of values."""
        config = self.config
        if self.dwc is not None and mask is not None and mask.causal and "causal" in replace(config, dwc=0).masks:
            raise UnsupportedError(
                f"{type(config).__name__}(dwc={config.dwc}) cannot apply a causal mask: the convolution of values uses "
                "later tokens; give dwc=0"
            )
        super().check(x, grid, mask, memory)

    def add_branches(self, x: Tensor, out: Tensor, v: Tensor | None, grid: Grid, mask: Mask | None) -> Tensor:
        """The operator's output (B, N, inner) plus parallel branches: here the convolution of v (B, H, N, e)."""
        if self.dwc is None:
            return out
        extra, cells = grid.to_map(merge(hide(cast(Tensor, v), mask)))
        return out + grid.from_map(torch.zeros_like(extra), convolve(self.dwc, cells))

    def project_output(self, x: Tensor, out: Tensor) -> Tensor:
        """Gate, output projection and dropout; out (B, N, inner)."""
        if self.gate is not None:
            out = F.silu(self.gate(x)) * out
        return cast(Tensor, self.proj_drop(self.proj(out)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}qkv.weight1" in state_dict and not isinstance(getattr(self, "qkv", None), Projection):
            args[-1].append(  # the messages of errors
                f"{prefix}qkv.weight1 belongs to an embedding with hidden layers, LinearQKV has weight; load it into a "
                "model with the projection that was trained: SNE(...), PSNE(...) or FSNE(...)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class HeadMixer(HeadLayer):
    """Self-attention at a site of a network, with any operator and any projection."""

    def project_heads(self, x: Tensor, grid: Grid, rope: Tensor | None = None) -> dict[str, Tensor | None]:
        """q, k, v (B, H, N, d) as the operator gets them; None for a role that is not projected."""
        return self.role_heads("qkv", x, grid, rope)

    def query_grid(self, grid: Grid) -> Grid:
        """The grid of queries and outputs; that of the tokens, as here."""
        return grid

    def memory_grid(self, grid: Grid) -> Grid | None:
        """The grid of keys and values; None where it is that of the queries, as here."""
        return None

    def operator_inputs(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None) -> Inputs:
        """What the operator gets for the arguments of `forward`."""
        made, kept = self.project_heads(x, grid, rope), self.kept_mask(mask)
        return Inputs(**made, grid=self.query_grid(grid), memory=self.memory_grid(grid), mask=kept)

    def samples(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None) -> Samples | None:
        return self.operator.samples(self.operator_inputs(x, grid, mask, rope))

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Tensor | None, plain: bool) -> Tensor:
        memory = self.memory_grid(grid)
        self.check(x, grid, mask, memory)
        heads = self.project_heads(x, grid, rope)
        operator = self.operator.reference if plain else self.operator
        out = merge(operator(*heads.values(), grid=self.query_grid(grid), memory=memory, mask=mask))
        return self.project_output(x, self.add_branches(x, out, heads["v"], grid, mask))


class CrossMixer(HeadLayer):
    """Cross-attention: queries from x on grid, keys and values from memory on memory_grid."""

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B N C"],
        grid: Grid | None = None,
        mask: Mask | None = None,
        rope: Tensor | None = None,
        *,
        memory: Float[Tensor, "B M C"],
        memory_grid: Grid | None = None,
    ) -> Float[Tensor, "B N C"]:
        """grid and memory_grid: those of the site by default. mask: of the keys of the memory."""
        return self._attend(x, grid, mask, rope, memory, memory_grid, plain=False)

    def reference(  # type: ignore[override]
        self,
        x: Float[Tensor, "B N C"],
        grid: Grid | None = None,
        mask: Mask | None = None,
        rope: Tensor | None = None,
        *,
        memory: Float[Tensor, "B M C"],
        memory_grid: Grid | None = None,
    ) -> Float[Tensor, "B N C"]:
        """The same layer in its plain form."""
        return self._attend(x, grid, mask, rope, memory, memory_grid, plain=True)

    def _attend(
        self, x: Tensor, grid: Grid | None, mask: Mask | None, rope: Tensor | None, memory: Tensor,
        memory_grid: Grid | None, plain: bool,
    ) -> Tensor:  # fmt: skip
        grid = self.site.grid if grid is None else grid
        memory_grid = memory_grid or self.site.memory or grid
        self.check(x, grid, mask, memory_grid)
        check_tensor("the memory", memory, f"(batch, tokens, {self.site.dim})")
        check_place("the memory", memory, "x", x)
        if memory.ndim != 3 or (memory.shape[0], memory.shape[-1]) != (x.shape[0], self.site.dim):
            expected = f"({x.shape[0]}, tokens, {self.site.dim})"
            raise ShapeError(f"the memory has shape {tuple(memory.shape)}; expected {expected}")
        memory_grid.check(memory)
        check_dtype("the memory", memory, "x", x)
        if self.dwc is not None and (*grid.sides, grid.prefix, grid.suffix) != (
            *memory_grid.sides,
            memory_grid.prefix,
            memory_grid.suffix,
        ):  # number by number: Dynamo cannot compare whole grids
            raise ShapeError("dwc adds a value at its own position: cross-attention on another grid needs dwc=0")
        heads = self.role_heads("q", x, grid, rope) | self.role_heads("kv", memory, memory_grid, rope)
        operator = self.operator.reference if plain else self.operator
        out = merge(operator(*heads.values(), grid=grid, memory=memory_grid, mask=mask))
        return self.project_output(x, self.add_branches(x, out, heads["v"], grid, mask))


def apply_rotary(x: Float[Tensor, "B H N d"], rope: Float[Tensor, "... n d2"], grid: Grid) -> Float[Tensor, "B H N d"]:
    """Rotary position embedding of neighbouring channels in pairs; rope holds sines, then cosines.

    rope: a row for each patch token (prefix and suffix tokens are not rotated), or a row for every token.
    Raises: ShapeError for another number of rows.
    """
    check_tensor("rope", rope, "(tokens, 2 * width)")
    check_place("rope", rope, "x", x)
    if rope.shape[-2] not in (grid.cells, grid.tokens):
        raise ShapeError(
            f"the rotary tensor has {rope.shape[-2]} rows, the grid {grid.cells} cells and {grid.tokens} tokens"
        )
    if rope.shape[-1] != 2 * x.shape[-1]:
        raise ShapeError(f"the rotary tensor has {rope.shape[-1]} columns; expected {x.shape[-1]} sines and cosines")
    sin, cos = rope.to(x.dtype).chunk(2, -1)
    all_tokens = rope.shape[-2] == grid.tokens
    cells = x if all_tokens else x[..., grid.span, :]
    rotated = torch.stack([-cells[..., 1::2], cells[..., ::2]], -1).flatten(-2)
    cells = cells * cos + rotated * sin
    if all_tokens:
        return cells
    return torch.cat([x[..., : grid.prefix, :], cells, x[..., grid.prefix + grid.cells :, :]], -2)
