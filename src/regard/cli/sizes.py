"""Sizes as text: `14x14`, height first."""

import re
from typing import TYPE_CHECKING

from regard.core import ConfigError

if TYPE_CHECKING:
    from regard.core import Grid


LARGEST, LARGEST_AREA = 2**20, 2**28


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of `224x224`; one number is a square. Raises: ConfigError for anything else."""
    match = re.fullmatch(r"(\d+)(?:[x,](\d+))?", text.strip())
    if match is None or len(text) > 20 or not all(0 < int(side) <= LARGEST for side in match.groups() if side):
        raise ConfigError(f"{text!r} is not a size; expected height x width, such as 224x224")
    height, width = int(match[1]), int(match[2] or match[1])
    if height * width > LARGEST_AREA:
        raise ConfigError(f"{text} is {height * width:.2g} pixels or cells; at most {LARGEST_AREA:.2g} are possible")
    return height, width


def check_heads(dim: int, heads: int) -> None:
    """Check that the heads divide the channels. Raises: ConfigError."""
    if heads < 1 or dim < 1 or dim % heads:
        raise ConfigError(f"--dim {dim} is not a multiple of {heads} heads (--heads)")


def read_grids(text: str) -> "list[Grid]":
    """Grids of `14x14,32x32`, without prefix and suffix tokens. Raises: ConfigError."""
    from regard.core import Grid

    return [Grid(*read_size(part)) for part in text.split(",")]


def short_grid(grid: "Grid") -> str:
    """`14x14+1`: patch tokens and prefix tokens; `14x14+1+4` with suffix tokens too."""
    return f"{grid.height}x{grid.width}+{grid.prefix}" + (f"+{grid.suffix}" if grid.suffix else "")
