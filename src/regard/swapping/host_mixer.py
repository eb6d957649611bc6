"""A mechanism between the modules of a host that does more than project its queries, keys and values.

Hosts pool their queries or keys, have values wider than keys, or convolve the output. Such a layer keeps copies of the
host's modules, and only the operator between them is the mechanism's.
"""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Inputs, Mask, Mixer, MixerConfig, Site, UnsupportedError, heads, merge
from regard.mixers.shared.heads import HeadLayer, HeadMixer, drops_bias
from regard.projections.linear import LinearQKV

from .checks import OTHER_MASKS
from .layer import Port
from .maps import map_of, tokens_of
from .special_mixers import ResizingMixer


def host_parts(*names: str) -> dict[str, str]:
    """`Port.parameter_names` for children, parameters and buffers of the host that a `HostMixer` keeps."""
    return {name: f"around.{name}" for name in names}


class HostParts(nn.Module):
    """Copies of a host's children, parameters and buffers, under their names; None for one that the host lacks."""

    def __init__(self, host: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            part = copy.deepcopy(getattr(host, name, None))
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part, persistent=name not in host._non_persistent_buffers_set)
            else:
                self.add_module(name, part)


class HostMixer(ResizingMixer):
    """An operator between the host's own modules `around`.

    A subclass says how these make queries, keys and values (`make`), and what they make of the operator's output
    (`finish`, by default the host's `proj`).
    value_width: of a head's values. role_parts: for each role, the modules that serve it alone. They are left out, as
    None, where the mechanism does not use the role; `make` then gives None.
    """

    role_parts: ClassVar[dict[str, tuple[str, ...]]] = {}
    around: Any
    value_width: int

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        Mixer.__init__(self, mixer.config, mixer.site)
        self.operator = mixer.operator
        unused = {name for role in set("qkv") - set(mixer.config.uses) for name in self.role_parts.get(role, ())}
        self.around = HostParts(host, [name for name in names if name not in unused])
        for name in unused:
            self.around.add_module(name, None)

    @abstractmethod
    def make(self, x: Float[Tensor, "B N C"], grid: Grid, extra: Any) -> Inputs:
        """Queries, keys and values (B, H, N, d) with their grids and the host's mask. extra: as `rope` in `forward`."""

    def finish(self, y: Float[Tensor, "B H N e"], made: Inputs, grid: Grid) -> Float[Tensor, "B M D"]:
        """The layer's output from that of the operator, by default through the host's `proj` and `proj_drop`.

        made: from `make`. grid: of the layer's input.
        """
        out = self.around.proj(merge(y))
        dropout = getattr(self.around, "proj_drop", None)
        return cast(Tensor, out if dropout is None else dropout(out))

    def operator_inputs(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any) -> Inputs:
        """As in `HeadMixer`; rope: what the host passes besides the tokens."""
        return self._drop_unused(self.make(x, grid, rope))

    def _drop_unused(self, made: Inputs) -> Inputs:
        left_out: dict[str, Any] = dict.fromkeys(set("qkv") - set(self.config.uses))
        left_out |= {"mask": self.kept_mask(made.mask)} if self.drops_bias else {}
        return replace(made, **left_out) if left_out else made

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        made = self.make(x, grid, rope)
        operator = self.operator.reference if plain else self.operator
        return self.finish(self._drop_unused(made).into(operator), made, grid)

    def check(self, x: Tensor, grid: Grid, mask: Mask | None, memory: Grid | None = None) -> None:
        """The checks of every mixer. Raises: also UnsupportedError for a mask besides the host's own."""
        if mask is not None:
            kinds = " and ".join(sorted(mask.kinds))
            raise UnsupportedError(f"{self.site.name or 'this layer'} keeps host modules and takes no {kinds} mask")
        Mixer.check(self, x, grid, mask, memory)

    def part_heads(self, name: str, x: Tensor) -> Tensor | None:
        """The heads that the host's module `name` makes of tokens; None if it was left out."""
        module = self.around.get_submodule(name) if getattr(self.around, name) is not None else None
        return None if module is None else heads(module(x), self.site.heads)


class HostPort(Port):
    """A port whose layers keep the host's own modules: all of `parameter_names`, made by `host_parts`.

    Mechanisms on heads get the host's queries, keys and values. Others (convolutions) replace the whole layer, where
    its output has the tokens and channels of its input.
    mixer_class: what the modules compute. wide: the module's attribute that says how wide a head's values are, where
    they are not as wide as keys. gets_more: whether it gets more than tokens, such as positions in a form of its own,
    which attention with its own queries and keys cannot use.
    """

    mixer_class: ClassVar[type[HostMixer]]
    wide: ClassVar[str] = ""
    gets_more: ClassVar[bool] = False

    @classmethod
    def resizes(cls, module: Any) -> bool:
        """Whether a module's output has other tokens or channels than its input."""
        return False

    @classmethod
    def value_width(cls, module: Any, site: Site) -> int:
        """The width of a head's values."""
        return int(getattr(module, cls.wide)) if cls.wide else site.width

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        mixer, kind = super().build_mixer(config, site, shared), type(config).__name__
        own: Any = mixer.config
        plain = type(mixer) is HeadMixer
        if plain:
            lost = own.projection == type(own).projection != LinearQKV()
        else:
            lost = isinstance(mixer, HeadLayer) or self.resizes(self.host) or (self.gets_more and hasattr(mixer, "qkv"))
        if lost:
            raise UnsupportedError(
                f"{site.name} makes its queries, keys and values, or other tokens or channels, by modules that "
                f"{kind} cannot keep; leave the layer out with where="
            )
        if not plain:
            return mixer
        mixer = cast(HeadMixer, mixer)
        if own.projection != LinearQKV() or own.dwc or own.gate or mixer.site.heads != site.heads:
            raise UnsupportedError(
                f"{site.name} keeps the modules that make its queries, keys and values; leave projection=, dwc=, gate= "
                f"and heads= of {kind} out"
            )
        if site.memory is not None and (not own.cross or own.refuses_cross):
            raise UnsupportedError(
                f"{site.name} has {site.grid.tokens} queries for {site.memory.tokens} keys, and {kind} has no "
                "cross-attention; leave the layer out with where="
            )
        width = self.value_width(self.host, site)
        masks = self.host_masks(self.host)
        biased = "bias" in masks or ("product" in masks and "product" not in config.masks)
        check_operator(mixer, width, biased and not drops_bias(config))
        names = [name for name, path in self.parameter_names.items() if path == f"around.{name}"]
        made = self.mixer_class(mixer, self.host, names)
        made.value_width = width
        return made


class MapPort(HostPort):
    """A `HostPort` for attention that takes and returns maps (B, C, h, w)."""

    map_axes = slice(2, 4)

    def output_grid(self, grid: Grid) -> Grid:
        """The grid of the output, for an input with `grid`."""
        return grid

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid(x)
        return map_of(self.mixer(tokens_of(x), grid), self.output_grid(grid))


@torch.no_grad()
def check_operator(mixer: HeadMixer, width: int, biased: bool) -> None:
    """Try an operator on one image of zeros where values are wider than keys or a bias is added.

    Raises: UnsupportedError if it cannot take values of this width, or a bias for each query and key.
    """
    site, memory = mixer.site, mixer.site.memory or mixer.site.grid
    if width == site.width and not biased:
        return
    shapes = {"q": (site.grid.tokens, site.width), "k": (memory.tokens, site.width), "v": (memory.tokens, width)}
    roles = [torch.zeros(1, site.heads, *size) if role in mixer.config.uses else None for role, size in shapes.items()]
    mask = Mask(bias=torch.zeros(site.grid.tokens, memory.tokens)) if biased else None
    try:
        y = mixer.operator(*roles, grid=site.grid, memory=site.memory, mask=mask)
    except UnsupportedError as error:
        raise UnsupportedError(f"{site.name}: {error}; {OTHER_MASKS}") from error
    except (RuntimeError, ValueError):
        y = None
    if y is None or y.shape[-1] != width:
        raise UnsupportedError(
            f"{site.name} has values of width {width} for keys of width {site.width}, which "
            f"{type(mixer.config).__name__} cannot take; leave the layer out with where="
        )
