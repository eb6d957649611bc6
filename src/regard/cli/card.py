"""`regard card MECHANISM`: formula, source, masks and options of one mechanism."""

import dataclasses
from typing import Annotated, Any

import typer

from .imports import Imports, imported_items, read_mixer
from .tables import AsJson, show


def card(
    mixer: Annotated[str, typer.Argument(metavar="MECHANISM", help="A mechanism, such as MiTA or 'MiTA(m=49)'.")],
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Show formula, source, taxonomy, masks and options of a mechanism."""
    from regard.mixers.spelling import spell

    config = read_mixer(mixer, imported_items(modules))
    options = {item.name: spell(getattr(config, item.name)) for item in dataclasses.fields(config)}
    facts: dict[str, Any] = {"spelling": spell(config)} | dataclasses.asdict(config.card)
    facts |= {"masks": config.masks, "cross": config.cross, "frames": config.depth}
    if as_json:
        show([facts | {"options": options, "about": (config.__doc__ or "").strip()}], as_json)
        return
    about = [line.strip() for line in (config.__doc__ or "").strip().splitlines()]
    rows = [{"": name.replace("_", " "), "value": _text(value)} for name, value in facts.items() if value != ""]
    show(rows, title=config.card.title)
    show([{"option": name, "value": value} for name, value in options.items()], notes=["", *about])


def _text(value: Any) -> Any:
    """A value as text; a card also shows False and empty sets, which tables leave blank."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if value != frozenset() else "none"
