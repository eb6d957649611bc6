"""`regard train --val` and `--best`: best weights are those of a validation part, and there are none without it."""

import json
from pathlib import Path

import pytest

from regard.cli.app import run

SMALL = ["--set", "recipe.epochs=2", "--set", "recipe.batch=16", "--set", "task.limit=64"]


def trained(folder: Path, *options: str) -> str:
    """The key of a run of two short epochs."""
    assert run(["train", "SKA()", "--data", "digits", "--results", str(folder), *SMALL, *options]) == 0
    (outcome,) = folder.glob("*/outcome.json")
    return outcome.parent.name


def test_a_validation_part_is_shown_and_chooses_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = trained(tmp_path, "--val", "0.25", "--seed", "3")
    shown = capsys.readouterr()
    assert ", validation top1" in shown.err
    assert ", test top1" not in shown.err
    assert "on 64 images" in shown.out
    outcome = json.loads((tmp_path / key / "outcome.json").read_text())
    assert (outcome["data"]["train"], outcome["data"]["test"]) == (48, 64)
    assert "val_seed=3" in outcome["spelling"]
    assert run(["eval", key, "--best", "--results", str(tmp_path)]) == 0


def test_without_one_best_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = trained(tmp_path)
    assert ", test top1" in capsys.readouterr().err
    assert run(["eval", key, "--best", "--results", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        f"regard: run {key} has no best weights, since only a validation part chooses them: train with --val 0.1, or "
        "leave best out for the last weights"
    )


def test_an_own_task_without_a_validation_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare_task.py").write_text(
        "from regard.lab.tasks import Task\n\nclass Bare(Task):\n    name = 'bare'\n\nTASKS = (Bare,)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run(["train", "SKA()", "--task", "bare", "--import", "bare_task", "--val", "0.1"]) == 2
    assert capsys.readouterr().err == "regard: --val has no meaning for --task bare\n"
