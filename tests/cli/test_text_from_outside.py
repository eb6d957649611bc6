"""Text from files and names does not steer a terminal, is no formula of a spreadsheet and no HTML of a page."""

import sys
from pathlib import Path

import pytest

from pilot_store import make_store
from regard.cli import run_display, study_display
from regard.cli.app import run
from regard.cli.tables import show
from regard.core import DataError
from regard.images.images import read_image
from regard.lab.tasks.segmentation.layouts import read_mask
from regard.pages.sheets import markdown_cell, spreadsheet_cell

STEERING = "\x1b]0;title\x07\x1b[2J\u202egnp.exe\r"


def test_tables_and_errors_show_escapes_instead_of_following_them(capsys: pytest.CaptureFixture[str]) -> None:
    show([{"name": STEERING, "n": 1}], notes=[f"first {STEERING}\nsecond"])
    assert run(["data", "check", f"no{STEERING}"]) != 0  # its message has the name as it is
    with study_display.Display() as display, run_display.progress() as (_, say):
        display.print_line(STEERING)
        say(STEERING)
    shown = capsys.readouterr()
    assert shown.err.count("\\x1b]0;title\\x07") == 3
    for text in (shown.out, shown.err):
        assert "\\x1b]0;title\\x07" in text
        assert not set("\x1b\x07\u202e\r") & set(text)
    assert "\nsecond" in shown.out


def test_an_exported_table_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path, title=STEERING)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(["study", "export", "pilot", "--format", "tex", "--results", str(tmp_path)]) == 0
    assert not set("\x1b\x07\u202e\r") & set(capsys.readouterr().out)


@pytest.mark.parametrize(
    "text", ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-cmd", "-2+3+cmd|' /C calc'!A0", "+1-1", "+ DWC"]
)
def test_a_spreadsheet_computes_no_text(text: str) -> None:
    assert spreadsheet_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1.5", "+2.40 [-1.10, +3.70]", "-3 %", "SKA()", -1.5, None, ""])
def test_other_cells_are_written_as_they_are(value: object) -> None:
    assert spreadsheet_cell(value) == value


def test_a_cell_of_markdown_stays_one_cell() -> None:
    assert markdown_cell("a|b\n<script>alert(1)</script> p < 0.05") == "a\\|b &lt;script>alert(1)&lt;/script> p < 0.05"


def test_a_check_of_data_shows_names_of_strangers_as_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, label in (("train", f"sp{STEERING[:10]}"), ("test", "zz")):
        (tmp_path / f"{split}.csv").write_text(f"text,label\nhi,ham\nho,{label}\n")
    assert run(["data", "check", str(tmp_path), "--task", "sequences"]) == 1
    shown = capsys.readouterr()
    assert "\\x1b]0;" in shown.err
    assert "\x1b" not in shown.out + shown.err


def test_a_picture_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript is no image here, whatever its name: Pillow would start Ghostscript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho run >> {tmp_path / 'ran'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="no image format that Pillow reads"):
        read_image(tmp_path / "a.png", (8, 8), 3)
    with pytest.raises(DataError, match="a.png"):
        read_mask(tmp_path / "a.png")
    assert not (tmp_path / "ran").exists()
