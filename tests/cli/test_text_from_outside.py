"""Text from files and names does not steer a terminal, is no formula of a spreadsheet and no HTML of a page."""

import sys
from pathlib import Path

import pytest

from pilot_store import make_store
from regard.cli import run_display, study_display
from regard.cli.app import run
from regard.cli.tables import show
from regard.pages.sheets import markdown_cell, spreadsheet_cell

STEERING = "\x1b]0;title\x07\x1b[2J\u202egnp.exe\r"


def test_tables_and_errors_show_escapes_instead_of_following_them(capsys: pytest.CaptureFixture[str]) -> None:
    show([{"name": STEERING, "n": 1}], notes=[f"first {STEERING}\nsecond"])
    assert run(["data", "check", f"no{STEERING}"]) != 0  # its message has the name as it is
    with study_display.Display(live=False) as display, run_display.progress() as (_, say):
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
