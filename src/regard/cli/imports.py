"""`--import MODULE`: a user's own mechanisms, ports, models and tasks, for one command."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from regard.core import ConfigError, Extra

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

    The current folder is appended to `sys.path`, which worker processes inherit.
    Raises: ConfigError if a module cannot be imported, or has none of the tuples.
    """
    if modules and (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    return tuple(item for name in modules or () for item in _items(name))


def _items(name: str) -> list[Any]:
    if name.partition(".")[0] in ("regard", "__main__"):
        raise ConfigError(f"--import {name}: give a module of your own; those of Regard are known already")
    try:
        module = import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise any error, and may call sys.exit
        raise ConfigError(f"--import {name}: {type(error).__name__}: {error}") from error
    items: list[Any] = []
    for label in TUPLES:
        value = getattr(module, label, ())
        if not isinstance(value, tuple) or not all(callable(item) for item in value):
            raise ConfigError(f"--import {name}: {label} is a tuple of classes or functions, not {value!r}")
        items += value
    if not items:
        raise ConfigError(f"--import {name}: the module has none of the tuples {', '.join(TUPLES)}")
    return items
