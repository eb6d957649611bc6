"""`--import MODULE`, a user's own mechanisms, ports, models and tasks for one command; and MECHANISM, an argument."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra
from regard.core.user_module import user_module

if TYPE_CHECKING:
    from regard.core import MixerConfig

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Your module, with mechanisms, ports, models or tasks in the tuples MIXERS, PORTS, HOSTS and TASKS; it is "
        "searched in the current folder too. May be repeated.",
    ),
]

TUPLES = ("MIXERS", "PORTS", "HOSTS", "TASKS")


def imported(modules: Sequence[str] | None) -> Extra:
    """The items of the tuples MIXERS, PORTS, HOSTS and TASKS of the modules. Importing a module registers nothing.

    Raises: ConfigError if a module cannot be imported, or has none of the tuples.
    """
    return tuple(item for name in modules or () for item in _items(name))


def _items(name: str) -> list[Any]:
    module = user_module(name, f"--import {name}")
    items: list[Any] = []
    for label in TUPLES:
        value = getattr(module, label, ())
        if not isinstance(value, tuple) or not all(callable(item) for item in value):
            raise ConfigError(f"--import {name}: {label} is a tuple of classes or functions, not {value!r}")
        items += value
    if not items:
        raise ConfigError(f"--import {name}: the module has none of the tuples {', '.join(TUPLES)}")
    return items


def read_mixer(text: str, extra: Extra) -> "MixerConfig":
    """The configuration of a spelling. Raises: ConfigError for a wrong spelling, and for None."""
    from regard.mixers.spelling import parse_mixer

    config = parse_mixer(text, extra)
    if config is None:
        raise ConfigError("this verb needs a mechanism, not None; `regard list` shows all")
    return config
