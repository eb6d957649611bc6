"""Importing a module of the user's own by name: the current folder is searched last, behind all that is installed."""

import os
import sys
from importlib import import_module
from types import ModuleType

from .errors import ConfigError


def user_module(name: str, given: str) -> ModuleType:
    """The module; the current folder is appended to `sys.path`, which worker processes inherit.

    given: what the user wrote, for the error. Raises: ConfigError if it is of Regard itself or cannot be imported.
    """
    if name.partition(".")[0] in ("regard", "__main__"):
        raise ConfigError(f"{given}: give a module of your own; those of Regard are known already")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{given}: give the name of a module, such as my_module for my_module.py, not a path")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        return import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise any error, and may call sys.exit
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
