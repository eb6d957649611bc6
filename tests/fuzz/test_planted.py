"""One fault planted in each family of the fuzz tests, which must find it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz import test_command_lines, test_files, test_values
from fuzz.test_files import FOLDER, root  # noqa: F401  # a fixture
from regard.cli.app import run
from regard.core import RegardError
from regard.mixers.spelling import parse
from regard.models.create import parse_host
from regard.store import records
from regard.tasks.data.images import read_image

pytestmark = [pytest.mark.slow, pytest.mark.untyped]


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
    if "--grid" in arguments:
        raise KeyError("--grid")
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
    monkeypatch.setattr(place, fault)
    with pytest.raises((Exception, AssertionError)):
        test(**needed.get(family, {}))


@pytest.mark.parametrize("name", [f"{FOLDER}/run.json", "model/model.json", f"{FOLDER}/outcome.json"])
def test_a_checksum_that_is_not_compared_is_found(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def unchecked(path: Path, data: bytes, fields: Any = ()) -> Any:
        try:
            return {key: value for key, value in json.loads(data).items() if key != "checksum"}
        except ValueError as error:
            raise test_files.StoreError(f"{path} is damaged") from error

    monkeypatch.setattr(records, "parse_record", unchecked)
    with pytest.raises(BaseException):  # noqa: B017, PT011  # of one failure or a group of several
        test_files.test_a_flipped_bit_is_noticed(root=root, name=name)


def test_a_checkpoint_whose_bytes_are_not_compared_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("regard.train.checkpoint.unseal", lambda path, data: data[records._HEADER_LENGTH :])
    with pytest.raises(BaseException):  # noqa: B017, PT011
        test_files.test_a_flipped_bit_is_noticed(root=root, name=f"{FOLDER}/last.ckpt")
