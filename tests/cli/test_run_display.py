"""What `regard train` shows while it trains."""

from pathlib import Path

import pytest

from regard.cli import run_display
from regard.cli.app import run as command
from regard.cli.run_display import _still_rises, progress, progress_line
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Progress

HOST = "vit_desk(patch=4, dim=16, depth=1, heads=2)"
SMALL = ["--host", HOST, "--data", "digits", "--set", "task.limit=32", "--set", "recipe.epochs=1", "--device", "cpu"]


def at(epoch: int, evaluated: int) -> Progress:
    """The end of an epoch of ten steps."""
    metrics = {"top1": 12.5} if evaluated else {}
    return Progress(10 * epoch, 40, epoch, 4, 1.0, 1e-3, 1.0, 61.0, metrics, evaluated=evaluated)


def test_a_line_has_a_score_only_where_it_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as (report, _):
        for step in (at(1, 0), at(2, 2), at(3, 2), at(4, 4)):
            report(step)
    lines = capsys.readouterr().err.splitlines()
    assert ["test top1 12.5000" in line for line in lines] == [False, True, False, True]
    assert "top1 12.5000 after epoch 2, 1:01 left" in progress_line(at(3, 2))  # the bar on a terminal keeps it


def test_a_long_epoch_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run_display, "SILENCE", 0.0)
    with progress() as (report, _):
        report(Progress(3, 40, 1, 4, 1.0, 1e-3, 1.0, 61.0, {}))
    assert capsys.readouterr().err.startswith("epoch 1/4, loss 1.0000, 1:01 left")


def test_an_earlier_failure_is_told_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", "Softmax()", *SMALL, "--results", str(tmp_path)]) == 0
    (folder,) = (path.parent for path in tmp_path.glob("*/outcome.json"))
    Results(tmp_path).finish(folder.name, {"status": "failed", "error": "SwapError: no port", "metrics": {}})
    capsys.readouterr()
    assert command(["train", "Softmax()", *SMALL, "--results", str(tmp_path)]) == 1
    earlier, failed = capsys.readouterr().err.splitlines()
    assert earlier == f"run {folder.name} failed earlier: nothing is executed now; delete {folder} to try it again"
    assert failed == f"run {folder.name} failed: SwapError: no port"


def test_what_is_trained_is_said_before_the_first_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", "Softmax()", *SMALL, "--results", str(tmp_path)]) == 0
    first, *more = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("training", "epoch"))]
    assert first.startswith(f"training {HOST} with Softmax(): images of 8x8, 4 tokens, 2,")
    assert first.endswith(" parameters")
    assert [line[:9] for line in more] == ["epoch 1/1"]
    assert command(["train", "Softmax()", *SMALL, "--results", str(tmp_path), "--log", "csv"]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert "was finished before: nothing is trained or logged now; another --results FOLDER trains it again" in said


@pytest.mark.parametrize(
    ("scores", "rises"),
    [((1, 5, 9), True), ((1, 9, 9.1), False), ((9, 5, 6), False), ((1, 9), False), ((0, 0, 0), False)],
)
def test_a_score_that_still_rises_is_said(scores: tuple[float, ...], rises: bool, tmp_path: Path) -> None:
    task = Classification(host=HOST, data="digits", size=(8, 8))
    metrics = Metrics(tmp_path / "metrics.csv", ("top1",))
    metrics.cut(0)
    for epoch, score in enumerate(scores, start=1):
        metrics.append({"epoch": epoch, "step": epoch, "train_loss": 1.0, "lr": 0.1, "top1": float(score)})
    note = _still_rises(Run(task=task, recipe=Recipe(epochs=9)), tmp_path)
    assert ("top1 still rose at the end" in note and "recipe.epochs=18" in note) == rises
