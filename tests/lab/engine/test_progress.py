"""What whoever watches a study is told."""

from pathlib import Path

from regard.lab.engine.progress import Event, Progress
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results


def test_a_tick_tells_epoch_loss_and_last_score(tmp_path: Path) -> None:
    (tmp_path / "0123456789ab").mkdir()
    metrics = Metrics(tmp_path / "0123456789ab" / "metrics.csv", ("top1", "loss"))
    metrics.cut(0)
    metrics.append({"epoch": 1, "step": 10, "train_loss": 2.25, "lr": 0.1, "top1": 10.5, "loss": 2.3, "seconds": 1.0})
    metrics.append({"epoch": 2, "step": 20, "train_loss": 1.5, "lr": 0.1, "seconds": 2.0})
    events: list[Event] = []
    progress = Progress(events.append)
    progress.add_waiting(["a", "b"], 2)
    progress.start("a", 0, "0123456789ab", 5)
    progress.start("b", 1, "ba9876543210", 5)
    progress.tick(Results(tmp_path))
    assert events[-1].text == "a seed 0: epoch 2/5, loss 1.5, top1 10.5; b seed 1: epoch 0/5"
    assert events[-1].counts["running"] == 2


def test_runs_of_one_row_and_seed_are_counted_each() -> None:
    """Runs that choose a learning rate differ in the rate alone."""
    events: list[Event] = []
    progress = Progress(events.append)
    progress.add_waiting(["a", "a", "a"], 3)
    for key in ("1" * 12, "2" * 12, "3" * 12):
        progress.start("a", 10_000, key, 5)
    assert events[-1].counts["running"] == 3
    progress.end("done", "a", 10_000, "2" * 12, {"seconds": 4.0})
    progress.requeue("a", "3" * 12)
    progress.tick(Results("nowhere"))
    assert (events[-1].counts["running"], events[-1].counts["waiting"], events[-1].counts["done"]) == (1, 1, 1)
