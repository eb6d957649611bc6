"""What whoever watches a study is told."""

from pathlib import Path

from regard.lab.engine.progress import Event, Progress
from regard.lab.results.results import Results


def test_a_tick_tells_epoch_loss_and_last_score(tmp_path: Path) -> None:
    lines = (
        "epoch,step,train_loss,lr,top1,loss,seconds",
        "1,10,2.25,0.1,10.5,2.3,1.0",
        "2,20,1.5,0.1,,,2.0",
    )
    (tmp_path / "0123456789ab").mkdir()
    (tmp_path / "0123456789ab" / "metrics.csv").write_text("\n".join(lines) + "\n")
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
