"""One fault planted in each family of the fuzz tests, which pass without it and must find it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz import test_command_lines, test_files, test_values
from fuzz.test_files import FOLDER, root  # noqa: F401  # a fixture
from regard.cli.app import run
from regard.core import RegardError
from regard.files import records
from regard.images.images import read_image
from regard.mixers.spelling import parse
from regard.models.create import parse_host

pytestmark = [pytest.mark.slow, pytest.mark.untyped]


FOUND = (Exception, BaseExceptionGroup, pytest.fail.Exception)
"""Hypothesis raises a failure, or a group of different ones."""


def kinds(found: BaseException) -> set[type[BaseException]]:
    """The kinds of error that a test has found."""
    if isinstance(found, BaseExceptionGroup):
        return set().union(*map(kinds, found.exceptions))
    return {type(found)}


def nothing(*_: Any, **__: Any) -> None:
    """A check that is forgotten."""


def unread(read: Callable[..., Any], error: type[Exception]) -> Callable[..., Any]:
    """A reader whose errors are of another kind than it promises."""

    def wrong(*arguments: Any) -> Any:
        try:
            return read(*arguments)
        except RegardError as found:
            raise error(str(found)) from found

    return wrong


def code_or_key_error(arguments: list[str]) -> int:
    if any(argument.startswith("--") for argument in arguments):
        raise KeyError("an option")
    return run(arguments)


VALUES = {
    "grids": (test_values.test_a_grid_has_whole_sides_or_is_refused, "regard.core.grid.Grid.__post_init__", nothing),
    "masks": (
        test_values.test_a_mask_is_of_the_right_kind_or_is_refused, "regard.core.mask.Mask.__post_init__", nothing
    ),
    "fields": (
        test_values.test_a_field_has_a_value_that_can_be_written_and_read_or_is_refused,
        "regard.core.mixer.check_fields", nothing,
    ),
    "spellings": (
        test_values.test_a_text_is_a_spelling_or_is_refused, "fuzz.test_values.parse", unread(parse, RecursionError)
    ),
    "hosts": (
        test_values.test_a_host_is_read_as_it_is_written_and_nothing_may_follow,
        "fuzz.test_values.parse_host", lambda text: parse_host(text.removesuffix("(a=1)")),
    ),
    "images": (
        test_command_lines.test_a_damaged_image_is_an_error_or_pixels,
        "fuzz.test_command_lines.read_image", unread(read_image, OSError),
    ),
    "command lines": (
        test_command_lines.test_a_command_line_ends_with_a_known_code, "fuzz.test_command_lines.run", code_or_key_error
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", VALUES)
def test_a_planted_fault_is_found(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    test, place, fault = VALUES[family]
    needed = {"images": {"tmp_path_factory": tmp_path_factory}, "command lines": {"elsewhere": None}}
    monkeypatch.chdir(tmp_path)
    test(**needed.get(family, {}))
    monkeypatch.setattr(place, fault)
    with pytest.raises(FOUND) as found:
        test(**needed.get(family, {}))
    assert kinds(found.value).isdisjoint({NameError, ImportError, AttributeError})


def test_a_checksum_that_is_not_compared_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of an outcome; run.json and model.json are also compared with what they describe."""
    name = f"{FOLDER}/outcome.json"

    def unchecked(path: Path, data: bytes, fields: Any = ()) -> Any:
        try:
            return {key: value for key, value in json.loads(data).items() if key != "checksum"}
        except ValueError as error:
            raise test_files.StoreError(f"{path} is damaged") from error

    test_files.test_a_flipped_bit_is_noticed(root=root, name=name)
    monkeypatch.setattr(records, "parse_record", unchecked)
    with pytest.raises(FOUND) as found:
        test_files.test_a_flipped_bit_is_noticed(root=root, name=name)
    assert kinds(found.value) <= {AssertionError, KeyError, TypeError, ValueError, AttributeError}


def test_a_keyword_read_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_one_wins(text: str) -> Any:
        given = dict(part.split("=") for part in text[len("MiTA(") : -1].split(", "))
        return parse(f"MiTA({', '.join(f'{name}={value}' for name, value in given.items())})")

    monkeypatch.setattr("fuzz.test_values.parse", last_one_wins)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_values.test_no_keyword_is_read_twice()


def test_a_silent_fall_back_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("regard.lab.train.checkpoint.log.warning", nothing)
    with pytest.raises(AssertionError):
        test_files.test_a_checkpoint_cut_at_every_byte_falls_back_to_the_one_before(tmp_path, caplog)


def test_a_checkpoint_whose_bytes_are_not_compared_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    test_files.test_a_flipped_bit_is_noticed(root=root, name=f"{FOLDER}/last.ckpt")
    monkeypatch.setattr("regard.lab.train.checkpoint.unseal", lambda path, data: data[records._HEADER_LENGTH :])
    with pytest.raises(FOUND):
        test_files.test_a_flipped_bit_is_noticed(root=root, name=f"{FOLDER}/last.ckpt")
