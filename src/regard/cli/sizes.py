"""Sizes on the command line: `14x14`, height first."""

import re
from typing import TYPE_CHECKING

from regard.core import ConfigError

if TYPE_CHECKING:
    from regard.core import Grid


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of `224x224`; one number is a square. Raises: ConfigError for anything else."""
    found = re.fullmatch(r"(\d+)(?:[x,](\d+))?", text.strip())
    if found is None or not int(found[1]) or not int(found[2] or 1):
        raise ConfigError(f"{text!r} is not a size; expected height x width, such as 224x224")
    return int(found[1]), int(found[2] or found[1])


def read_grids(text: str) -> "list[Grid]":
    """Grids of `14x14,32x32`, without extra tokens. Raises: ConfigError."""
    from regard.core import Grid

    return [Grid(*read_size(part)) for part in text.split(",")]
