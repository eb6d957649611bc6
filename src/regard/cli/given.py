"""Which options a user gave: one that would have no effect is refused, and not ignored."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from regard.core import ConfigError

if TYPE_CHECKING:
    Context = typer.Context
else:
    Context = typer.Context.__base__  # what typer passes is not of its own class


def refuse_given(context: Context, names: Sequence[str], reason: str) -> None:
    """names: of parameters of the verb. Raises: ConfigError "--NAME REASON" for the first that the user gave."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ConfigError(f"--{name.replace('_', '-')} {reason}")
