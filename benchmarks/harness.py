"""The overhead of training with Regard: the training loop, the feed of images, and worker processes.

`python benchmarks/harness.py loop|feed|workers [--rounds 5] [--data-root PATH] [--json]`

loop: `regard.lab.train.loop.Loop` (logging, metrics, a checkpoint in each epoch) against a bare loop over the same
feed, with the same model, optimiser, schedule and clipping; "ready" is the bare loop over the same batches as tensors
in memory. All must end with the same weights, up to rounding.
feed: images per second that one core prepares, against twice those that one core trains in the smallest desk models.
workers: wall time of the same runs of the quickstart in one worker with one thread, and in two with one thread each.

Candidates take turns in one process; medians are printed. "cpu" is the CPU time of the process, which can be used on a
busy machine too; "wall" is meaningful on an idle machine only.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.core.allocator import ALLOCATOR

LOOP_TARGET, FEED_TARGET, WORKERS_TARGET = 1.08, 3.0, 1.6
STEPS = 40
"""Steps of an epoch on CIFAR-10 here; the study has 703, so one checkpoint per epoch costs relatively more here."""
FEED_BATCHES = 200


@dataclass(frozen=True)
class Case:
    """A model of the desk studies. steps: in an epoch."""

    name: str
    task: Any
    recipe: Any
    mixer: Any
    removed: bool = False


def cases(controls: bool = False) -> list[Case]:
    """The quickstart's model and that of static keys, as their desk studies train softmax attention ("w/o" too)."""
    from regard.lab.studies import load_study

    models = []
    for study, limit in (("quickstart", 0), ("ska_table1", 64 * STEPS)):
        setting = load_study(study).setting("desk")
        task = replace(setting.task, limit=limit)
        for row in setting.rows:
            if row.label.lower() == "softmax" or (controls and row.label == "w/o"):
                models.append(Case(f"{task.data}, {row.label}", task, setting.recipe, row.mixer, row.removed))
    return models


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


# the loop


def own_loop(case: Case, recipe: Any, model: Any) -> Callable[[], Any]:
    """Regard's loop over a few epochs, without the evaluations of the test images."""
    from lightning_fabric import Fabric

    from regard.lab.train.loop import Loop
    from regard.lab.train.watch import Watch
    from regard.measure.memory import PeakMemory

    folder = Path(tempfile.mkdtemp(prefix="harness-", dir=SCRATCH))
    fabric = Fabric(accelerator="cpu", devices=1, precision=recipe.precision)
    steps = case.task.batches_per_epoch(recipe)
    watch = Watch(report=lambda progress: None, save_seconds=1e9, save_steps=steps)
    loop = Loop(untested(case.task), recipe, 0, model, fabric, folder, watch, PeakMemory(fabric.device))
    loop.resume()
    return loop.train


def untested(task: Any) -> Any:
    """The task with a score that costs nothing: evaluation is work, not overhead."""
    import dataclasses

    from regard.lab.tasks import Classification
    from regard.lab.tasks.base import Score

    class Untested(Classification):
        def score(self, model: Any, device: Any) -> Score:
            return Score({"top1": 0.0, "loss": 0.0})

    return Untested(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


def bare_loop(case: Case, recipe: Any, model: Any, batches: Iterable[Any], steps: int) -> Callable[[], None]:
    """A plain training loop over (images, labels) that the model takes as they are."""
    import torch
    import torch.nn.functional as F

    from regard.lab.train.optimizer import param_groups

    parts = param_groups(model, recipe.weight_decay, recipe.lr)
    optimizer = torch.optim.AdamW(parts, betas=recipe.betas, fused=True)
    low = recipe.precision == "bf16-mixed"

    def train() -> None:
        model.train()
        for step, (images, labels) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr_at(step, steps)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                scores = model(images)
                loss = F.cross_entropy(scores.float(), labels, label_smoothing=recipe.smoothing)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return train


def assert_same(start: Any, first: Any, second: Any) -> None:
    """Check that two models have the same weights, up to rounding. start: before training."""
    import torch

    begin, own, bare = (torch.cat([value.detach().ravel() for value in m.parameters()]) for m in (start, first, second))
    difference = ((own - bare).norm() / (bare - begin).norm()).item()
    assert difference <= 0.05, f"the two loops train differently: by {difference:.2g} of the change in training"


def measure_loop(rounds: int, epochs: int) -> list[dict[str, Any]]:
    import torch

    rows = []
    for case in cases():
        recipe = replace(case.recipe, epochs=epochs)
        steps = case.task.batches_per_epoch(recipe) * epochs
        start = case.task.model(case.mixer, 0, case.removed)

        def fed(task: Any = case.task, recipe: Any = recipe, steps: int = steps) -> Iterator[Any]:
            return (
                (task.prepare(images, torch.device("cpu")), labels)
                for images, labels in task.batches(recipe, 0, 0, steps)
            )

        ready = list(fed())
        elapsed: dict[str, list[tuple[float, float]]] = {"own": [], "bare": [], "ready": []}
        for turn in range(rounds + 1):  # the first one warms up
            models = {name: copy.deepcopy(start) for name in elapsed}
            works = {
                "own": own_loop(case, recipe, models["own"]),
                "bare": bare_loop(case, recipe, models["bare"], fed(), steps),
                "ready": bare_loop(case, recipe, models["ready"], ready, steps),
            }
            for name in elapsed if turn % 2 else reversed(elapsed):
                seconds = timed(works[name])
                if turn:
                    elapsed[name].append(seconds)
            assert_same(start, models["own"], models["bare"])
            assert_same(start, models["own"], models["ready"])
        row: dict[str, Any] = {"case": case.name, "precision": recipe.precision, "steps": steps}
        for index, clock in enumerate(("wall", "cpu")):
            seconds_of = {name: [pair[index] for pair in pairs] for name, pairs in elapsed.items()}
            for name, values in seconds_of.items():
                row[f"{name} ms ({clock})"] = 1e3 * statistics.median(values) / steps
            for name, ratio in (("bare", "ratio"), ("ready", "ratio to ready")):
                pairs = zip(seconds_of["own"], seconds_of[name], strict=True)
                row[f"{ratio} ({clock})"] = statistics.median(a / b for a, b in pairs)
        rows.append({**row, "target": LOOP_TARGET, "met": row["ratio (cpu)"] <= LOOP_TARGET})
    return rows


# the feed


def measure_feed(rounds: int, epochs: int) -> list[dict[str, Any]]:
    import torch

    rows = []
    for case in cases(controls=True):
        recipe = case.recipe
        task = replace(case.task, limit=0)
        count = min(task.batches_per_epoch(recipe), FEED_BATCHES)
        model = task.model(case.mixer, 0, case.removed)
        cpu = torch.device("cpu")
        ready = [(task.prepare(x, cpu), y) for x, y in task.batches(recipe, 0, 0, min(count, STEPS))]
        train = bare_loop(case, recipe, model, ready, len(ready))

        def feed(task: Any = task, recipe: Any = recipe, count: int = count) -> None:
            for images, _ in task.batches(recipe, 0, 0, count):
                task.prepare(images, torch.device("cpu"))

        elapsed: dict[str, list[tuple[float, float]]] = {"feed": [], "model": []}
        for turn in range(rounds + 1):
            for name, work in (("feed", feed), ("model", train)):
                seconds = timed(work)
                if turn:
                    elapsed[name].append(seconds)
        row: dict[str, Any] = {"case": case.name, "augment": recipe.augment}
        for index, clock in enumerate(("wall", "cpu")):
            feeding, training = ([pair[index] for pair in elapsed[name]] for name in ("feed", "model"))
            row[f"feed images/s ({clock})"] = recipe.batch * count / statistics.median(feeding)
            row[f"two cores images/s ({clock})"] = 2 * recipe.batch * len(ready) / statistics.median(training)
            row[f"ratio ({clock})"] = row[f"feed images/s ({clock})"] / row[f"two cores images/s ({clock})"]
        rows.append({**row, "target": FEED_TARGET, "met": row["ratio (cpu)"] >= FEED_TARGET})
    return rows


# workers


def measure_workers(rounds: int, epochs: int) -> list[dict[str, Any]]:
    """Wall time in one and in two workers; each measurement has its own store, and as many cores as workers."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two workers need two cores; this process may use one")
    elapsed: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for turn in range(rounds):
        for workers in (1, 2) if turn % 2 == 0 else (2, 1):
            os.sched_setaffinity(0, cores[:workers])  # one core, and so one thread, for each worker
            elapsed[workers].append(time_workers(workers, epochs))
    os.sched_setaffinity(0, cores)
    rows = []
    for index, name in enumerate(("start-up included", "start-up excluded")):
        one, two = (statistics.median(pair[index] for pair in elapsed[workers]) for workers in (1, 2))
        rows.append({
            "case": f"quickstart, 14 runs of {epochs} epochs, {name}", "one worker s": one, "two workers s": two,
            "ratio (wall)": one / two, "target": WORKERS_TARGET, "met": one / two >= WORKERS_TARGET,
        })  # fmt: skip
    return rows


def time_workers(workers: int, epochs: int) -> tuple[float, float]:
    """Wall seconds of all runs: from the call to the return, and from the first run's start to the last one's end."""
    from regard.lab.engine.executors.local import Local
    from regard.lab.engine.jobs import Job
    from regard.lab.engine.progress import Progress
    from regard.lab.engine.run_jobs import run_all
    from regard.lab.results.results import Results
    from regard.lab.studies import load_study

    planned = load_study("quickstart").runs("smoke", seeds=2)
    planned = tuple((row, replace(run, recipe=replace(run.recipe, epochs=epochs))) for row, run in planned)
    store = Results(tempfile.mkdtemp(prefix="harness-", dir=SCRATCH))
    jobs = [Job(run, "quickstart", "smoke", row.label, run.seed) for row, run in planned]
    started = time.perf_counter()
    counts = run_all(jobs, store, Local(workers=workers), Progress(lambda event: None))
    whole = time.perf_counter() - started
    assert counts["done"] == len(jobs), counts
    starts, ends = (
        [path.stat().st_mtime for path in store.root.glob(f"*/{name}")] for name in ("run.json", "outcome.json")
    )
    return whole, max(ends) - min(starts)


# the command

PARTS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {
    "loop": measure_loop,
    "feed": measure_feed,
    "workers": measure_workers,
}
SCRATCH: str | None = None


def main() -> None:
    global SCRATCH
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="epochs of one measurement (loop, workers)")
    parser.add_argument("--data-root", help="folder of the data sets; else REGARD_DATA")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    if options.data_root:
        os.environ["REGARD_DATA"] = options.data_root
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        SCRATCH = folder
        rows = PARTS[options.part](options.rounds, options.epochs)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps({"part": options.part, "machine": machine, "rows": rows}, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for row in rows:
        print(f"\n{row['case']}")
        for name, value in row.items():
            if name not in ("case", "target", "met"):
                print(f"  {name:<28} {value if not isinstance(value, float) else format(value, ',.3f'):>12}")
        print(f"  target {row['target']}: {'met' if row['met'] else 'missed'}")


if __name__ == "__main__":
    main()
