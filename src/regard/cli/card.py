"""`regard card MIXER`: what is known about one mechanism."""

import dataclasses
from typing import Annotated, Any

import typer

from .tables import AsJson, show


def card(
    mixer: Annotated[str, typer.Argument(help="A spelling, such as MiTA or 'MiTA(m=49)'.")], as_json: AsJson = False
) -> None:
    """Show formula, source, taxonomy, masks and options of a mechanism."""
    from regard.core import ConfigError
    from regard.mixers.spelling import parse_mixer, spell

    config = parse_mixer(mixer)
    if config is None:
        raise ConfigError("None has no card: it stands for no mixer at all")
    options = {item.name: spell(getattr(config, item.name)) for item in dataclasses.fields(config)}
    known: dict[str, Any] = {"spelling": spell(config)} | dataclasses.asdict(config.card)
    known |= {"masks": config.masks, "cross": config.cross}
    if as_json:
        show([known | {"options": options, "about": (config.__doc__ or "").strip()}], as_json)
        return
    about = [line.strip() for line in (config.__doc__ or "").strip().splitlines()]
    rows = [{"": name.replace("_", " "), "value": _words(value)} for name, value in known.items() if value != ""]
    show(rows, title=config.card.title)
    show([{"option": name, "value": value} for name, value in options.items()], notes=["", *about])


def _words(value: Any) -> Any:
    """False is worth saying on a card, and so is an empty set."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if value != frozenset() else "none"
