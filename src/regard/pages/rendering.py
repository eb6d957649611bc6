"""Rendering of the page templates, with the style sheet and scripts inside the page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

import regard
from regard.files.paths import printable_lines

from .theme import palette


def _shown(value: Any) -> Any:
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def render_template(
    name: str, scripts: Sequence[str], view: Mapping[str, Any], filters: Mapping[str, Callable[..., str]]
) -> str:
    """The page of a template; `view` has its variables. Text is escaped and printable unless it is `Markup`."""
    folder = jinja2.PackageLoader("regard.pages", "templates")
    engine = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, finalize=_shown
    )
    engine.filters.update(filters)
    common = {
        "css": Markup(folder.get_source(engine, "page.css")[0]),
        "script": Markup("".join(folder.get_source(engine, script)[0] for script in scripts)),
        "palette": palette(),
        "version": regard.__version__,
    }
    return engine.get_template(name).render({**view, **common})
