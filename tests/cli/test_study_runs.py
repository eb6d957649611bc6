"""`regard study run`: one run by its key, printed commands, and paths that hold in other folders."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command_line import answer, refused
from photos import class_folders
from pilot_store import make_store
from regard.cli.app import run
from regard.cli.study_options import StudyOptions, find_study
from regard.lab.results.results import Results
from regard.lab.studies import load_study

ARGUMENTS = ["study", "run", "quickstart", "--rows", "w/o", "--seeds", "1"]
MODULE = """
from timm.models import create_model

def own_vit(patch: int = 4):
    return create_model("vit_tiny_patch16_224", img_size=8, patch_size=patch, in_chans=1, num_classes=10, depth=1)

HOSTS = (own_vit,)
"""


def test_a_run_that_another_process_executes_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler goes on with what follows only after exit code 0."""
    study, store = load_study("quickstart"), Results(tmp_path)
    key = next(run.key for row, run in study.runs("smoke", "w/o", 1))
    only = [*ARGUMENTS, "--results", str(tmp_path), "--only", key, "--workers", "0"]
    with store.lock(key):
        assert run(only) == 1
    assert "0 runs done, 1 busy. Another process executes the others." in capsys.readouterr().err
    assert run(only) == 0
    assert capsys.readouterr().out == ""
    refused(capsys, [*only, "--json"], "leave out --json")


def test_paths_of_data_hold_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a cluster have other working folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGARD_DATA", "sets")
    class_folders(tmp_path / "photos")
    (tmp_path / "digits").mkdir()
    tasks: dict[str, Any] = {
        data: find_study("quickstart", "smoke", StudyOptions(data=data)).setting("smoke").task
        for data in ("./photos", "digits")
    }
    assert os.environ["REGARD_DATA"] == str(tmp_path / "sets")
    assert tasks["./photos"].data == str(tmp_path / "photos")
    assert tasks["digits"].data == "digits"  # the set, not the folder


def test_a_printed_command_works_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As over ssh: without the variables and the folder of the command that printed it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "sets").mkdir()
    (tmp_path / "here" / "own_hosts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("REGARD_DATA", "../sets")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    options = ["--import", "own_hosts", "--host", "own_vit", "--size", "8", "--results", "out"]
    (line,) = answer(capsys, *ARGUMENTS, *options, "--on", "print")
    words = shlex.split(line["command"])
    assert words[:2] == ["env", f"PYTHONPATH={tmp_path / 'here'}"]
    assert words[words.index("--data-root") + 1] == str(tmp_path / "sets")
    shown = ["study", "show", "quickstart", "--host", "own_vit", "--size", "8", "--no-estimate"]
    command = [*words[: words.index("study")], *shown, "--import", "own_hosts"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hours_are_those_of_the_usual_number_of_runs_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path)
    texts = []
    for workers in (1, 5):
        monkeypatch.setattr("regard.lab.engine.executors.local.usual_workers", lambda number=workers: number)
        assert run(["study", "power", "pilot", "--results", str(tmp_path)]) == 0
        texts.append(capsys.readouterr().out)
        assert run(["study", "power", "pilot", "--results", str(tmp_path), "--workers", str(workers)]) == 0
        assert capsys.readouterr().out == texts[-1]
    assert texts[0] != texts[1]
