"""`regard probe` on small networks: tables, pages, what it keeps, and what it refuses."""

import json
from pathlib import Path

import pytest

from regard.cli.app import run

TINY = ["--scale", "smoke", "--seeds", "1", "--workers", "0", "--boards", "digit_boards"]


def test_a_profile_is_printed_kept_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, results = tmp_path / "probe.html", ["--results", str(tmp_path / "results")]
    command = ["probe", "SKA()", "MiTA(m=4, k=4)", *TINY, *results, "--abilities", "place,content", "--page", str(page)]
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert err.count(": done") == 4
    assert "MiTA(m=4, k=4)" in out
    assert "nothing is compared" in out
    text = page.read_text()
    assert "It never judges a paper&#39;s claim about accuracy on images." in text
    assert text.count("<h2") >= 4
    assert run([*command, "--json"]) == 0  # nothing is trained again
    out, err = capsys.readouterr()
    assert ": done" not in err
    value = json.loads(out)
    assert value["abilities"] == ["content", "place"]
    assert set(value["scores"]) == {"SKA", "MiTA(m=4, k=4)"}


def test_controls_are_trained_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "probe",
        "SKA",
        *TINY,
        "--results",
        str(tmp_path),
        "--abilities",
        "compare",
        "--train-controls",
        "--json",
    ]
    assert run(command) == 0
    assert set(json.loads(capsys.readouterr().out)["scores"]) == {"SKA", "softmax", "uniform average", "w/o"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["SKA", "--abilities", "contents"], "no ability 'contents'; did you mean content"),
        (["SKA", "--boards", "bords"], "there are no 'bords'"),
        (["SKA", "--scale", "paper"], "desk or smoke, not 'paper'"),
        (["all", "SKA"], "all stands alone"),
        (["SKB"], "unknown name 'SKB'"),
        (["None"], "needs a mechanism, not None"),
        (["SKA", "--sweep", "--abilities", "place"], "leave out --abilities"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
