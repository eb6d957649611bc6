"""`regard probe` on small networks: tables, pages, what it keeps, and what it refuses."""

from pathlib import Path

import pytest

from command_line import answer, refused
from regard.cli.app import run
from regard.lab.engine.study import Row
from regard.lab.results.results import Results
from regard.lab.studies.probes.run import profile_runs
from regard.mixers.static_keys.ska import SKA

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
    ended = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("outcome.json")}
    value = answer(capsys, *command)  # nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("outcome.json")} == ended
    assert value["abilities"] == ["content", "place"]
    assert set(value["scores"]) == {"SKA", "MiTA(m=4, k=4)"}


def test_without_the_images_nothing_is_trained_and_no_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "empty"))
    results = tmp_path / "results"
    command = ["probe", "SKA", "--scale", "smoke", "--boards", "boards", "--results", str(results)]
    refused(capsys, command, "boards are made of Fashion-MNIST")
    assert not results.exists()


def test_failed_runs_are_repeated_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["probe", "SKA", *TINY, "--abilities", "content", "--results", str(tmp_path)]
    assert run(command) == 0
    (file,) = tmp_path.glob("*/outcome.json")
    store, key = Results(tmp_path), file.parent.name
    assert store.outcome(key)["scale"] == "smoke"
    store.forget(key)
    (probe,) = profile_runs((Row("SKA", SKA()),), ("content",), "digit_boards", seeds=1, scale="smoke")
    assert probe.run.key == key
    store.finish(key, {"key": key, "status": "failed", "error": "as if", "metrics": {}})
    assert run(command) == 1
    assert "1 of 1 runs failed; --retry repeats them" in capsys.readouterr().err
    assert run([*command, "--retry"]) == 0


def test_a_control_that_is_named_too_is_trained_once_and_stays_a_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["probe", "Softmax()", "SKA", *TINY, "--abilities", "content", "--results", str(tmp_path)]
    value = answer(capsys, *command, "--train-controls")
    assert set(value["scores"]) == {"SKA", "softmax", "uniform average", "w/o"}
    assert set(value["scores"]["softmax"]) == {"content"}
    assert "smoke scale" in value["controls"]


def test_torchvisions_fashion_mnist_counts_as_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.cli.probe import _boards

    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    assert _boards("", download=False) == "digit_boards"
    monkeypatch.delenv("REGARD_DATA")
    assert (_boards("", download=False), _boards("", download=True)) == ("digit_boards", "boards")
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    (tmp_path / "torchvision" / "FashionMNIST").mkdir(parents=True)
    assert _boards("", download=False) == "boards"
