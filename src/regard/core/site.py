"""Site: the position in a network that a mixer is built for, with everything that building it may depend on."""

from dataclasses import dataclass, field
from typing import Literal

from .errors import ConfigError
from .grid import Grid
from .validation import check_fields


@dataclass(frozen=True)
class Site:
    """What building a mixer may depend on.

    dim: channels C. width: head width d, by default dim // heads. grid: the grid at build time; a forward pass may
    bring another. qkv_bias, out_bias: whether the projections have biases. qk_norm: normalisation of q and k per head.
    rotary: the host passes rotary tensors. drop: dropout after the output projection. layer: index in the host.
    memory: grid of the keys for cross-attention. name: the module's name in the host, for messages.
    Raises: ConfigError for a field whose value its annotation does not allow, if dim is not a multiple of heads and no
    width is given, or a number is below 1.
    """

    dim: int
    heads: int
    grid: Grid
    width: int = 0
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: Literal["", "layer", "rms"] = ""
    rotary: bool = False
    drop: float = field(default=0.0, metadata={"least": 0, "most": 1})
    layer: int = field(default=0, metadata={"least": 0})
    memory: Grid | None = None
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dim < 1 or self.heads < 1 or self.width < 0:
            raise ConfigError(f"dim and heads are at least 1: dim={self.dim}, heads={self.heads}, width={self.width}")
        if not self.width:
            if self.dim % self.heads:
                raise ConfigError(f"dim {self.dim} is not a multiple of {self.heads} heads; pass Site(width=)")
            object.__setattr__(self, "width", self.dim // self.heads)

    @property
    def inner(self) -> int:
        """heads * width: the channels between the projections."""
        return self.heads * self.width

    def tokens(self, role: str) -> int:
        """The number of tokens that q, k or v is made from: in cross-attention k and v are made from the memory."""
        return (self.grid if role == "q" or self.memory is None else self.memory).tokens
