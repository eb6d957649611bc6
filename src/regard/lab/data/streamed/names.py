"""The names of streams: `hf://OWNER/NAME` on the Hugging Face hub, `stream:FOLDER` on this machine.

Choices follow a question mark: `hf://OWNER/NAME@REVISION?config=small&label=fine_label`.
"""

import re
from dataclasses import dataclass

from regard.core import DataError, nearest

HUB, LOCAL = "hf://", "stream:"
CHOICES = ("config", "image", "label", "test")
"""config: of a set that has several; image, label: columns of tables; test: the split that is evaluated."""


@dataclass(frozen=True)
class Name:
    """A stream that a user names. place: OWNER/NAME, or a folder. revision: a branch, tag or commit, "" = main."""

    hub: bool
    place: str
    revision: str = ""
    choices: tuple[tuple[str, str], ...] = ()

    def choice(self, key: str) -> str:
        """What the user chooses for one of `CHOICES`, or an empty text."""
        return dict(self.choices).get(key, "")

    @property
    def chosen(self) -> str:
        """The choices as they are written, in the order of `CHOICES`."""
        ordered = sorted(self.choices, key=lambda item: CHOICES.index(item[0]))
        return "?" + "&".join("=".join(item) for item in ordered) if ordered else ""


def is_stream(data: str) -> bool:
    """Whether --data names a stream."""
    return data.startswith((HUB, LOCAL))


def parse(data: str) -> Name:
    """The name that a text spells. Raises: DataError."""
    hub = data.startswith(HUB)
    place, _, query = data[len(HUB if hub else LOCAL) :].partition("?")
    choices = tuple(_choice(data, part) for part in query.split("&")) if query else ()
    if len(dict(choices)) < len(choices):
        raise DataError(f"{data} makes a choice twice; keep one")
    if not hub:
        if not place:
            raise DataError(f"{data} names no folder; expected {LOCAL}FOLDER with .parquet or .tar files")
        if "config" in dict(choices):
            raise DataError(f"{data}: only sets of the Hugging Face hub have a config; name the folder of the files")
        return Name(False, place, "", choices)
    place, _, revision = place.partition("@")
    place = place.removeprefix("datasets/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        raise DataError(f"{data} names no data set of the Hugging Face hub; expected {HUB}OWNER/NAME")
    return Name(True, place, revision, choices)


def _choice(data: str, text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if key not in CHOICES or not value:
        raise DataError(f"{data}: expected KEY=VALUE after the question mark, not {text!r}; {nearest(key, CHOICES)}")
    return key, value
