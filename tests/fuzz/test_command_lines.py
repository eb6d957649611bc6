"""Random command lines and images: the right result or a RegardError, never another exception.

Options are taken from the command line itself, so that those of a new verb are tried too.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from regard.cli.app import app, run
from regard.core import DataError
from regard.images.images import read_image


def verbs(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb, such as ("study", "run"), with its command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*path, name))
        else:
            yield (*path, name), command


VERBS = dict(verbs(typer.main.get_command(app)))
QUICK = [("list",), ("card",), ("cost",), ("taxonomy",), ("report",), ("results", "list"), ("results", "prune"),
         ("study", "show"), ("study", "status")]  # fmt: skip
"""These neither train nor measure; the others get a mechanism that cannot be read."""
WRONG = "NoSuchMixer("
WORDS = ("", "Softmax", "SKA()", "None", "4x4", "0", "-1", "8", "1e9", "(", "nan", "*", "quickstart", "vit_desk", "\0")
words = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A verb with options of its own, with and without values, and other words."""
    verb = draw(st.sampled_from(sorted(VERBS)))
    options = [option for parameter in VERBS[verb].params for option in parameter.opts if option.startswith("-")]
    given_options = [
        [option, *draw(st.lists(words, max_size=1))]
        for option in draw(st.lists(st.sampled_from([*options, "--no-such"]), max_size=3))
    ]
    first = draw(st.lists(words, max_size=2)) if verb in QUICK else [WRONG]
    return [*verb, *first, *(word for option in given_options for word in option)]


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder, so that nothing of the user's is read or written."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines())
def test_a_command_line_ends_with_a_known_code(elsewhere: None, arguments: list[str]) -> None:
    out, errors, before = io.StringIO(), io.StringIO(), os.listdir()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run(arguments)
    assert code in (0, 1, 2)
    assert bool(code) <= bool(errors.getvalue() or out.getvalue())
    assert "Traceback" not in errors.getvalue() or "--traceback" in arguments
    assert os.listdir() == before or code == 0


@given(st.sampled_from(["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"]), st.data())
def test_a_damaged_image_is_an_error_or_pixels(tmp_path_factory, kind: str, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    out = io.BytesIO()
    Image.fromarray(np.arange(16 * 12 * 3, dtype=np.uint8).reshape(16, 12, 3)).save(out, kind)
    content = bytearray(out.getvalue())
    for place, bit in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 7)), max_size=6)):
        content[place] ^= 1 << bit
    file: Path = tmp_path_factory.getbasetemp() / "fuzzed.png"
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        pixels = read_image(file, (8, 8), 3)
    except DataError:
        return
    assert pixels.shape == (8, 8, 3)
