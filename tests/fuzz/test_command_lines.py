"""Random command lines and images: the right result or a RegardError, never another exception."""

import contextlib
import io
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from regard.cli.app import run
from regard.core import DataError
from regard.tasks.data.images import read_image

WORDS = ("", "Softmax", "SKA()", "None", "--grid", "4x4", "0", "-1", "--json", "--dim", "8", "(", "nan", "--match", "*")
VERBS = (["list"], ["card"], ["cost"], ["taxonomy"], ["report"], ["results", "list"], ["results", "prune"])


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.sampled_from(VERBS), st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=5))
def test_a_command_line_ends_with_a_known_code(verb: list[str], arguments: list[str]) -> None:
    results = ["--results", "/no/such/folder"] if verb[0] in ("report", "results") else []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert run([*verb, *results, *arguments]) in (0, 1, 2)


@settings(derandomize=True, max_examples=80, deadline=None)
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
