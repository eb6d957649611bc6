"""Files are whole or absent, and errors say what to do."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.core import StoreError
from regard.files.atomic import check_writable, json_text, read_json, write_atomically
from regard.files.tensor_files import read_state, write_state


def test_a_state_keeps_types_of_numbers(tmp_path: Path) -> None:
    """Some optimizers have one among their options."""
    write_state(tmp_path / "a", {"kind": torch.bfloat16, "nested": [torch.int8]})
    assert read_state(tmp_path / "a") == {"kind": torch.bfloat16, "nested": [torch.int8]}


def test_folders_are_made_and_nothing_is_left_beside(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "c.txt", "grün")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "grün".encode()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["c.txt"]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x.json", json_text({"loss": float("nan"), "top": (1.5, float("inf"))}))
    assert read_json(tmp_path / "x.json") == {"loss": None, "top": [1.5, None]}


def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "x"
    write_atomically(target, b"old")
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(StoreError, match="a file is where a folder is needed"):
        write_atomically(tmp_path / "folder", b"new")
    with pytest.raises(StoreError, match="not Unicode|surrogates"):
        write_atomically(target, "\udcff")
    assert target.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"x", "folder"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomically(path, "new")], ids=["check", "write"])
def test_a_pipe_a_folder_and_standard_output_are_not_replaced(tmp_path: Path, write: Callable[[Path], None]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # may be a file
    (tmp_path / "folder").symlink_to(tmp_path)
    before = {path: path.lstat().st_ino for path in tmp_path.iterdir()}
    for path in before:
        with pytest.raises(StoreError, match=f"cannot write {path}: .*; (give the path of a file|a file is where)"):
            write(path)
    assert {path: path.lstat().st_ino for path in tmp_path.iterdir()} == before


def test_the_root_is_not_replaced() -> None:
    with pytest.raises(StoreError, match="cannot write /"):
        write_atomically("/", b"new")


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing.json"):
        read_json(tmp_path / "nothing.json")
    (tmp_path / "half.json").write_text('{"a": ')
    with pytest.raises(StoreError, match="half.json is not JSON"):
        read_json(tmp_path / "half.json")


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs a device")
def test_a_device_is_not_read(tmp_path: Path) -> None:
    """/dev/zero would fill the memory, and the reader of a pipe would wait for ever."""
    (tmp_path / "outcome.json").symlink_to("/dev/null")
    with pytest.raises(StoreError, match=r"cannot read .*outcome.json: it is a pipe, socket or device"):
        read_json(tmp_path / "outcome.json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")
def test_a_full_disk_says_that_finished_work_is_kept() -> None:
    from regard.files.atomic import store_errors

    with pytest.raises(StoreError, match="free some space"), store_errors(Path("/dev/full")):
        Path("/dev/full").write_text("x")
