"""The contracts of mechanisms: Mixer (a layer), Operator (the mathematics on heads), MixerConfig (the description)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .card import Card
from .contract import Contract
from .cost import Cost
from .errors import GridError, UnsupportedError
from .grid import Grid
from .mask import POSITION_BIASES, Mask
from .site import Site
from .tensors import check_kinds, check_layer_input, check_roles
from .validation import check_fields
from .view import Samples, View


@dataclass(frozen=True, eq=False)
class Inputs:
    """What an operator is called with: q (B,H,N,d), k (B,H,M,d), v (B,H,M,e), their grids and the mask.

    A role that the mechanism does not use is None; its operator does not read it, hence the type Any.
    memory: the grid of keys and values where it differs from `grid`, that of the queries.
    """

    q: Any
    k: Any
    v: Any
    grid: Grid
    memory: Grid | None = None
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            check_kinds(self.grid, self.memory, self.mask)

    @property
    def key_grid(self) -> Grid:
        """The grid of keys and values."""
        return self.memory or self.grid

    def into(self, form: Callable[..., Tensor]) -> Tensor:
        """What an operator, or a method with its arguments, returns for them."""
        return form(self.q, self.k, self.v, grid=self.grid, memory=self.memory, mask=self.mask)


class Operator(nn.Module):
    """The mathematics of a mechanism on heads, with its parameters. q (B,H,N,d), k (B,H,M,d), v (B,H,M,e) -> (B,H,N,e).

    A subclass writes `compute`. Called as a module it is the fast form; `reference` is the plain form, which reads like
    the paper's equation. A role that the mechanism does not use is None. memory is the grid of keys and values where it
    differs from `grid`.
    one_by_one: whether it has `one_query`, with which a decoder computes its tokens one after the other.
    """

    one_by_one: ClassVar[bool] = False

    def compute(self, inputs: Inputs, plain: bool) -> Float[Tensor, "B H N e"]:
        """The fast form, or with `plain` the reference."""
        raise NotImplementedError

    def forward(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, *, grid: Grid, memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:  # fmt: skip
        """The fast form."""
        return self.compute(self._inputs(q, k, v, grid, memory, mask), plain=False)

    def reference(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, *, grid: Grid, memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:  # fmt: skip
        """The plain form."""
        return self.compute(self._inputs(q, k, v, grid, memory, mask), plain=True)

    def formulas(self, built: Site, site: Site) -> tuple[int, Site]:
        """(n, s): a call on `site` costs n times the mechanism's formula for s; (1, site) unless it runs in windows.

        built: the site that the operator was built for.
        """
        return 1, site

    def own_loss(self, inputs: Inputs) -> Float[Tensor, ""] | None:
        """A term for the loss of a training step, for parameters that the output gives no gradient; None without.

        `regard train` adds it to the loss of the task, for each operator and forward pass.
        """
        return None

    def _inputs(self, q: Any, k: Any, v: Any, grid: Grid, memory: Grid | None, mask: Mask | None) -> Inputs:
        """The inputs, checked. Raises: ShapeError, GridError."""
        inputs = Inputs(q, k, v, grid, memory, mask)
        if not torch.compiler.is_compiling():
            config = getattr(self, "config", None)
            check_roles({"q": q, "k": k, "v": v}, getattr(config, "uses", "v"), grid)
            refuse_depth(config, grid, memory)
            if mask is not None:
                mask.check_device(v.device)
        return inputs

    def one_query(
        self, index: int, q: Float[Tensor, "B H 1 d"] | None, k: Float[Tensor, "B H M d"] | None,
        v: Float[Tensor, "B H M e"], *, mask: Mask | None = None,
    ) -> Float[Tensor, "B H 1 e"]:  # fmt: skip
        """The output of query number `index` (from 0) of a sequence, for the M first keys of its sequence or another's.

        Raises: UnsupportedError unless `one_by_one`.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot compute a single query of a sequence")

    def weights(
        self, q: Tensor | None, k: Tensor | None, v: Float[Tensor, "B H M e"], *, grid: Grid,
        memory: Grid | None = None, mask: Mask | None = None,
    ) -> Float[Tensor, "B H N M"]:  # fmt: skip
        """The attention matrix: the operator applied to the identity in the place of v. O(N M) memory per head."""
        eye = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        return self.reference(q, k, eye, grid=grid, memory=memory, mask=mask)

    def weight_rows(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Float[Tensor, "B H M e"],
        queries: Sequence[int],
        *,
        grid: Grid,
        memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "B H Q M"]:
        """Rows of `weights`, without the whole matrix: O(M) memory for each.

        The output is linear in the values, so that a row is the gradient of a query's output with respect to them: one
        pass of the fast form, and a backward pass for each query.
        """
        with torch.inference_mode(False), torch.enable_grad():
            q, k = (None if y is None else y.detach().clone() for y in (q, k))
            values = torch.zeros_like(v).requires_grad_()
            first = self(q, k, values, grid=grid, memory=memory, mask=mask)[..., 0].sum((0, 1))  # heads are independent
            rows = [torch.autograd.grad(first[query], values, retain_graph=True)[0][..., 0] for query in queries]
        return torch.stack(rows, 2)

    def views(self, inputs: Inputs) -> tuple[View, ...]:
        """What a picture of these inputs can show beside the weights, such as the keys of each query's expert.

        Here: the keys that each query chose, of a mechanism whose choice is discrete.
        """
        config = getattr(self, "config", None)
        if config is None or not config.card.discrete:
            return ()
        weights = inputs.into(self.weights)
        return (View("keys that it chose", weights[0] != 0),)

    def samples(self, inputs: Inputs) -> Samples | None:
        """The points between the cells at which it reads the map; None if it reads whole tokens, as here."""
        return None


class Mixer(nn.Module):
    """A layer that mixes tokens: x (B, N, C) -> (B, N, C). Built by a MixerConfig, which it keeps as `config`.

    A subclass writes `compute`.
    output: name of the child that is the last layer, a linear map or convolution; at zero, the layer gives zeros.
    drops_bias: whether it leaves out what its host adds to the logits (`host_bias="drop"`); a port sets it.
    """

    output: ClassVar[str] = "proj"
    drops_bias: bool = False
    config: "MixerConfig"
    site: Site

    def __init__(self, config: "MixerConfig", site: Site) -> None:
        super().__init__()
        refuse_depth(config, site.grid, site.memory)
        self.config, self.site = config, site

    def forward(
        self, x: Float[Tensor, "B N C"], grid: Grid | None = None, mask: Mask | None = None, rope: Any = None
    ) -> Float[Tensor, "B N C"]:
        """The fast form. grid: of the input; that of the site by default.

        rope: the host's rotary tensor (patch tokens, 2 d), sines then cosines, or None; a layer that keeps the host's
            own projections gets what these take.
        Raises: GridError if the grid has another number of tokens; ShapeError, UnsupportedError.
        """
        return self.compute(x, self.site.grid if grid is None else grid, self.kept_mask(mask), rope, plain=False)

    def reference(
        self, x: Float[Tensor, "B N C"], grid: Grid | None = None, mask: Mask | None = None, rope: Any = None
    ) -> Float[Tensor, "B N C"]:
        """The same layer in its plain form."""
        return self.compute(x, self.site.grid if grid is None else grid, self.kept_mask(mask), rope, plain=True)

    def kept_mask(self, mask: Mask | None) -> Mask | None:
        """The mask that is applied."""
        if not isinstance(mask, Mask) or not mask.kinds & POSITION_BIASES:  # another kind is refused later
            return mask
        if self.drops_bias:
            return mask.without_bias()
        return mask.with_bias() if "bias" in self.config.masks and "product" not in self.config.masks else mask

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        """The fast form, or with `plain` the reference."""
        raise NotImplementedError

    def samples(self, x: Float[Tensor, "B N C"], grid: Grid, mask: Mask | None, rope: Any) -> Samples | None:
        """As `Operator.samples`, for the arguments of `forward`."""
        return None

    def check(self, x: Tensor, grid: Grid, mask: Mask | None, memory: Grid | None = None) -> None:
        """Check the inputs of a layer. memory: the grid of the keys where it differs, for the mask.

        Raises: ShapeError, GridError, UnsupportedError.
        """
        if not torch.compiler.is_compiling():
            last = getattr(self, self.output, None)
            check_layer_input(x, getattr(last, "weight", None), self.site.dim, "forward" in vars(last or self))
            check_kinds(grid, memory, mask)
        refuse_depth(self.config, grid, memory)
        if self.site.name and x.shape[-2] != grid.tokens:
            raise GridError(
                f"{self.site.name}: {x.shape[-2]} tokens do not fit {grid} (= {grid.tokens}), the grid of the last "
                "image: pass one image through the whole model before the next one's tokens are made"
            )
        grid.check(x)
        if mask is not None:
            refuse_masks(self.config, mask)
            mask.check(x.shape[0], (memory or grid).tokens, self.site.heads, x.shape[1])
            mask.check_device(x.device)


@dataclass(frozen=True, kw_only=True)
class MixerConfig(ABC):
    """Describes a mechanism. Frozen, keyword-only, and all that is needed to build it at a Site.

    card: facts for lists and reports. masks: the kinds of mask that it can apply, of "causal", "padding", "bias",
    "product" (a bias that is a product of few channels; who takes "bias" gets it as one) and "key bias" (only biases
    with one row, the same for all queries). depth: whether it takes the frames of a clip or the slices of a volume
    (`Grid.depth`). cross: whether queries may come from another input than keys and values. samples: spellings that
    fit grids of about 4x4 cells, on which the contract is checked, the usual one first; () where the defaults fit.
    Subclasses with a `__post_init__` call this one first.
    revision: raised when a run of the same spelling gives other results; it enters the keys of runs.
    Raises: ConfigError for a field whose value its annotation does not allow.
    """

    card: ClassVar[Card]
    revision: ClassVar[int] = 1
    masks: ClassVar[frozenset[str]] = frozenset()
    depth: ClassVar[bool] = False
    cross: ClassVar[bool] = False
    samples: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def contract(self) -> Contract:
        """What the contract suite must know of this configuration."""
        return Contract()

    @property
    def uses(self) -> str:
        """The roles that are projected from the input: a subset of "qkv"."""
        return "qkv"

    @abstractmethod
    def build(self, site: Site, shared: nn.Module | None = None) -> Mixer:
        """The layer at a site. shared: what `shared()` returned, when a model's layers have parameters in common."""

    @abstractmethod
    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Parameters and MACs of the built layer on site.grid for one sample, by formula.

        With a `site.memory` it is the layer of `build_cross`, with keys and values there. accounting: "executed" counts
        what runs; "paper" counts as the mechanism's paper does, where that differs (`check_accounting` refuses others).
        """

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> "Mixer":
        """The layer whose keys and values come from another input, on `site.memory`. Raises: UnsupportedError."""
        raise UnsupportedError(f"{type(self).__name__} has no cross-attention")

    def shared(self) -> nn.Module | None:
        """A module with the parameters that all layers of a model have in common; None if there are none."""
        return None


def refuse_depth(config: MixerConfig | None, *grids: Grid | None) -> None:
    """Raises UnsupportedError for a grid with several frames if the mechanism knows images alone."""
    for grid in grids:
        if grid is not None and grid.depth != 1 and config is not None and not config.depth:
            raise UnsupportedError(f"{type(config).__name__} takes images, not {grid.depth} frames ({grid})")


def refuse_masks(config: MixerConfig, mask: Mask | None) -> None:
    """Raises UnsupportedError that names the kinds of mask which the mechanism cannot apply."""
    if mask is None:
        return
    one_row = mask.bias is not None and mask.bias.shape[-2] == 1
    missing = sorted(mask.kinds - config.masks - ({"bias"} if one_row and "key bias" in config.masks else set()))
    if missing:
        can = ", ".join(sorted(config.masks)) or "none"
        raise UnsupportedError(f"{type(config).__name__} cannot apply a {' or '.join(missing)} mask (it can: {can})")
