"""`--import MODULE`, a user's own mechanisms, ports, models, tasks and studies for one command; and MECHANISM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra
from regard.core.user_module import user_module

if TYPE_CHECKING:
    from regard.core import MixerConfig
    from regard.lab.engine.study import Study

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Your module, with mechanisms, ports, models, tasks or studies in the tuples MIXERS, PORTS, HOSTS, TASKS "
        "and STUDIES; it is searched in the current folder too. May be repeated.",
    ),
]

TUPLES = ("MIXERS", "PORTS", "HOSTS", "TASKS")


def imported_items(modules: Sequence[str] | None) -> Extra:
    """The items of the tuples MIXERS, PORTS, HOSTS and TASKS of the modules. Importing a module registers nothing.

    Raises: ConfigError if a module cannot be imported, or has none of the tuples.
    """
    return tuple(item for name in modules or () for item in _items(name))


def imported_studies(modules: Sequence[str] | None) -> dict[str, "Study"]:
    """The studies in the tuples STUDIES of the modules, by name. Raises: as `imported_items`; ConfigError for a name
    that another study has."""
    from regard.lab.engine.study import Study
    from regard.lab.studies import ANALYSES
    from regard.lab.studies import STUDIES as KNOWN

    found: dict[str, Study] = {}
    for name in modules or ():
        for study in _tuple(name, "STUDIES"):
            if not isinstance(study, Study):
                raise ConfigError(f"--import {name}: STUDIES is a tuple of studies, not of {study!r}")
            if study.name in {*found, *KNOWN, *ANALYSES}:
                raise ConfigError(f"--import {name}: there is a study {study.name} already; give yours another name")
            found[study.name] = study
    return found


def _items(name: str) -> list[Any]:
    items = [item for label in TUPLES for item in _tuple(name, label)]
    if not all(map(callable, items)):
        raise ConfigError(f"--import {name}: {', '.join(TUPLES)} are tuples of classes or functions")
    if not items and not _tuple(name, "STUDIES"):
        raise ConfigError(f"--import {name}: the module has none of the tuples {', '.join((*TUPLES, 'STUDIES'))}")
    return items


def read_mixer(text: str, extra: Extra) -> "MixerConfig":
    """The configuration of a spelling. Raises: ConfigError for a wrong spelling, and for None."""
    from regard.mixers.spelling import parse_mixer

    config = parse_mixer(text, extra)
    if config is None:
        raise ConfigError("this verb needs a mechanism, not None; `regard list` shows all")
    return config


def _tuple(name: str, label: str) -> tuple[Any, ...]:
    value = getattr(user_module(name, f"--import {name}"), label, ())
    if not isinstance(value, tuple):
        raise ConfigError(f"--import {name}: {label} is a tuple, not {value!r}")
    return value
