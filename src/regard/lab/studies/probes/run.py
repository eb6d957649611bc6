"""The runs of a profile and of a sweep, executed by the lab's workers and kept in its store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from regard.core import Extra
from regard.lab.data.boards import NAMES, PROBED
from regard.lab.engine.claims import metric_of
from regard.lab.engine.estimate import Speed, measure, run_seconds
from regard.lab.engine.executors.local import threads_of_a_run
from regard.lab.engine.jobs import ENDED, Job
from regard.lab.engine.progress import Event
from regard.lab.engine.run_study import execute_jobs, execution, reset
from regard.lab.engine.snapshot import write_snapshot
from regard.lab.engine.study import Row
from regard.lab.results.results import Results
from regard.lab.tasks.cells import Cells
from regard.lab.train.run import Run
from regard.measure.turns import threads

from .study import CLAIMS, METRIC, ROWS, setting_of, study_of, task_of

SWEEP = tuple((side, pairs) for side, numbers in ((6, (4, 10, 16)), (12, (10, 40, 70))) for pairs in numbers)
"""(side, pairs) of the boards on which recall by content is tried: 36 and 144 tokens."""
LARGE = (24, 100)
"""The same of boards of 576 tokens, for the mechanisms of LARGE_ROWS, with one seed."""
LARGE_ROWS = ("Softmax", "MiTA")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run of the probes. label: of its row. study: with the scale, the study that has this run; "" for none."""

    label: str
    ability: str
    run: Run
    study: str = ""
    scale: str = "desk"

    @property
    def pairs(self) -> int:
        """Pairs of its boards."""
        return self._task.boards.pairs

    @property
    def tokens(self) -> int:
        """Cells of its boards."""
        return self._task.boards.side**2

    @property
    def _task(self) -> Cells:
        task = self.run.task
        assert isinstance(task, Cells)
        return task


def profile_runs(
    rows: Sequence[Row], abilities: Sequence[str], boards: str, *, seeds: int, scale: str = "desk",
    download: bool = False, extra: Extra = (),
) -> list[Probe]:  # fmt: skip
    """The runs of a profile, seed by seed; those that hypotheses need are the first. Raises: ConfigError."""
    needed = {row.label for row in ROWS}
    found = []
    for seed in range(seeds):
        for ability in abilities:
            task = replace(task_of(ability, boards), download=download, extra=tuple(extra))
            study = f"probes_{ability}" if boards == NAMES[scale != "desk"] else ""
            found += _of_rows(rows, task, ability, scale, seed, study)
    return sorted(found, key=lambda probe: (probe.label not in needed, probe.ability not in CLAIMS))


def sweep_runs(
    rows: Sequence[Row], boards: str, *, seeds: int, scale: str = "desk", download: bool = False, extra: Extra = ()
) -> list[Probe]:
    """The runs of a sweep: recall by content with more pairs, and more tokens. Raises: ConfigError."""
    large = [row for row in rows if type(row.mixer).__name__ in LARGE_ROWS]
    parts = [(rows, seed, place) for seed in range(seeds) for place in SWEEP] + [(large, 0, LARGE)]
    found = []
    for members, seed, (side, pairs) in parts:
        data = f"{boards}(ability=content, pairs={pairs}, side={side})"
        task = replace(task_of("content", boards), data=data, download=download, extra=tuple(extra))
        found += _of_rows(members, task, "content", scale, seed)
    return found


def _of_rows(rows: Sequence[Row], task: Cells, ability: str, scale: str, seed: int, study: str = "") -> list[Probe]:
    if not rows:
        return []
    setting = setting_of(task, tuple(rows), scale)
    assert setting.recipe is not None
    first = Run(task=setting.task, recipe=setting.recipe, seed=seed)
    return [
        Probe(label=row.label, ability=ability, study=study, scale=scale,
              run=replace(first, mixer=row.mixer, removed=row.removed))
        for row in rows
    ]  # fmt: skip


def check_data(probes: Sequence[Probe]) -> None:
    """Read the images, and download them if the runs may, in this process, before several workers need them.

    Raises: DataError, before any run fails by it.
    """
    for task in {str(probe.run.task): probe.run.task for probe in probes}.values():
        task.record()


def execute(
    probes: Sequence[Probe], store: Results, workers: int | None, watch: Callable[[Event], None], retry: bool = False
) -> dict[str, int]:
    """Execute the missing runs and return the number of runs by state; stopped runs continue the next time.

    retry: those that failed, too. Raises: KeyboardInterrupt after the workers have stopped; StoreError.
    """
    if retry:
        reset([probe.run for probe in probes], store, fresh=False)
    jobs = [
        Job(
            probe.run, probe.study or "probe", probe.scale, f"{probe.label}, {probe.ability}", probe.run.seed,
            probe.run.recipe.trained_epochs,
        )
        for probe in probes
    ]  # fmt: skip
    return execute_jobs(jobs, store, execution(workers, None, 1, False), watch)


def write_snapshots(store: Results, seeds: int) -> None:
    """Write the snapshots of the seven studies, so that they have tables and pages. Raises: StoreError; DataError."""
    for ability in PROBED:
        write_snapshot(study_of(ability), "desk", store, seeds)


def hours(probes: Sequence[Probe], store: Results, workers: int) -> float:
    """Estimated hours of the missing runs on this machine, from a few timed steps of each kind of run."""
    speeds: dict[tuple[str, int], Speed] = {}
    total = 0.0
    for probe in probes:
        if store.status(probe.run.key) in ENDED:
            continue
        kind = (probe.label, probe.tokens)
        if kind not in speeds:
            with threads(threads_of_a_run(workers)):
                speeds[kind] = measure(probe.run)
        total += run_seconds(probe.run, speeds[kind], *probe.run.task.sample_counts())
    return total / max(workers, 1) / 3600


def scores(probes: Sequence[Probe], store: Results) -> dict[str, dict[str, list[float]]]:
    """The scores of finished runs by row and ability, by seed."""
    found: dict[str, dict[str, list[float]]] = {probe.label: {} for probe in probes}
    for probe in probes:
        value = metric_of(store.outcome(probe.run.key), METRIC)
        if value is not None:
            found[probe.label].setdefault(probe.ability, []).append(value)
    return found


def sweep_scores(probes: Sequence[Probe], store: Results) -> list[tuple[str, int, int, float | None, int]]:
    """(mechanism, tokens, pairs, mean score in percent, finished seeds) of each row and kind of board."""
    values: dict[tuple[str, int, int], list[float]] = {}
    for probe in probes:
        value = metric_of(store.outcome(probe.run.key), METRIC)
        values.setdefault((probe.label, probe.tokens, probe.pairs), []).extend([] if value is None else [value])
    return [(*kind, round(fmean(seeds), 1) if seeds else None, len(seeds)) for kind, seeds in sorted(values.items())]
