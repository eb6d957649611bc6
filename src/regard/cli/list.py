"""`regard list`: mechanisms, projections, host models, studies, tasks and data sets."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Annotated, Any

import typer

from regard.core import ConfigError, check_known

from .tables import AsJson, show_list


def _mixers() -> list[dict[str, Any]]:
    from regard.mixers import MIXERS

    return [
        {"name": type(config).__name__, "title": config.card.title, "formula": config.card.formula}
        | {"cost": config.card.complexity, "masks": config.masks, "cross": config.cross, "source": config.card.source}
        for config in (cls() for cls in MIXERS)
    ]


def _projections() -> list[dict[str, Any]]:
    from regard.mixers.spelling import spell
    from regard.projections import PROJECTIONS

    return [
        {"name": cls.__name__, "default": spell(cls()), "what": (cls.__doc__ or "").strip().split("\n")[0]}
        for cls in PROJECTIONS
    ]


def _hosts() -> list[dict[str, Any]]:
    from regard.models.catalog import list_models

    return [{"name": name} for name in list_models()]


def _studies() -> list[dict[str, Any]]:
    from regard.lab.studies import STUDIES

    return [{"name": name, "title": title, "source": source} for name, (_, title, source) in STUDIES.items()]


def _data() -> list[dict[str, Any]]:
    from regard.lab.tasks import TASKS

    tasks: dict[tuple[str, str], list[str]] = {}
    for task in TASKS:
        for name, source in task.sets.items():
            tasks.setdefault((name, source), []).append(task.name)
    return [{"name": name, "tasks": ", ".join(found), "from": source} for (name, source), found in tasks.items()]


def _tasks() -> list[dict[str, Any]]:
    from regard.lab.tasks import TASKS

    return [
        {"name": task.name, "what": (task.__doc__ or "").strip().split("\n")[0], "metric": task.metric}
        | {"trivial answer": task.trivial, "default data": task.example_data}
        for task in TASKS
    ]


WHAT: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "mixers": _mixers,
    "projections": _projections,
    "hosts": _hosts,
    "studies": _studies,
    "tasks": _tasks,
    "data": _data,
}


def list_names(
    what: Annotated[
        str, typer.Argument(help="mixers (mechanisms), projections, hosts (models), studies, tasks or data (sets).")
    ] = "mixers",
    match: Annotated[str, typer.Option(help="Only names that match, such as 'deit*'.")] = "*",
    as_json: AsJson = False,
) -> None:
    """List mechanisms, projections, host models, studies, tasks or data sets."""
    check_known(what, WHAT, f"there is no list of {what!r}")
    rows = [row for row in WHAT[what]() if fnmatch(row["name"], match)]
    if not rows:
        raise ConfigError(f"no name of {what} matches {match!r}")
    show_list(rows, as_json)
