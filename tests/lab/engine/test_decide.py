"""Seeds that are added until claims are decided, with runs whose scores are drawn instead of trained."""

import re
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard import SKA, Factors, Softmax
from regard.core import ConfigError
from regard.lab import Claim, Recipe, Row, Run, Study
from regard.lab.engine.claims import claim_differences, differences, gate_differences
from regard.lab.engine.decide import Decision, decide
from regard.lab.engine.run_study import planned_jobs, run_study
from regard.lab.engine.snapshot import write_snapshot
from regard.lab.engine.study import Setting
from regard.lab.engine.table import Table, load_snapshot
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks
from regard.lab.studies import load_study
from regard.lab.train.execute import execute
from tiny_task import Tiny

MEANS = {"softmax": 80.0, "SKA": 88.0, "near": 80.4, "same": 80.0, "context": 70.0, "w/o": 60.0, "uniform": 65.0,
         "start": 50.0}  # fmt: skip
ROWS = (
    Row("softmax", Softmax()), Row("SKA", SKA()), Row("near", SKA(scale=2.0)), Row("same", Softmax(scale=2.0)),
    Row("context", Softmax(scale=3.0)), Row("w/o", None, control=True, removed=True),
    Row("uniform", Factors(terms="0000"), control=True),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drawn(Run):
    """A run whose score is the mean of its row and noise of its seed. fails: the seeds that fail."""

    row: str
    mean: float
    fails: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def key(self) -> str:
        return f"{list(MEANS).index(self.row):06x}{self.seed:06x}"


@execute.register
def draw(run: Drawn, store: Results, devices: int = 1, *_: Any, **__: Any) -> dict[str, Any]:
    for needed in run.needs():
        if store.outcome(needed.key) is None:
            execute(needed, store)
    noise = np.random.default_rng([run.seed, list(MEANS).index(run.row)]).normal()
    failed = run.seed in run.fails
    outcome = {"status": "failed" if failed else "done", "error": "nan" if failed else None, "seed": run.seed,
               "metrics": {} if failed else {"top1": run.mean + noise}, "seconds": run.seconds,
               "probes": {"maps": "none"}}  # fmt: skip
    with store.lock(run.key):
        store.finish(run.key, outcome)
    return store.outcome(run.key) or {}


@dataclass(frozen=True, kw_only=True)
class DrawnStudy(Study):
    """A study of drawn runs. means: by row. fails: seeds of the row "near" that fail. seconds: of a run.

    start_seconds: of the network that all rows start from, if there is one.
    """

    means: Any = None
    fails: tuple[int, ...] = ()
    seconds: float = 0.0
    start_seconds: float = 0.0

    def run(self, scale: str, row: Row, seed: int) -> Any:
        fails = self.fails if row.label == "near" else ()
        start = None
        if self.start_seconds:
            start = Drawn(task=Tiny(), recipe=Recipe(epochs=1), seed=seed, row="start", mean=MEANS["start"],
                          seconds=self.start_seconds)  # fmt: skip
        return Drawn(task=Tiny(), recipe=Recipe(epochs=1), seed=seed, row=row.label, fails=fails, start=start,
                     mean=(self.means or MEANS)[row.label], seconds=self.seconds)  # fmt: skip


STUDY = DrawnStudy(
    name="drawn", title="Drawn", source="tests", question="?", baseline="softmax",
    settings={"desk": Setting(task=Tiny(), recipe=Recipe(epochs=1), rows=ROWS),
              "smoke": Setting(task=Tiny(), recipe=Recipe(epochs=1), rows=ROWS)},
    claims=(Claim("SKA", "softmax", "top1"), Claim("near", "softmax", "top1"),
            Claim("same", "softmax", "top1", within=3.0)),
)  # fmt: skip


def seeds(store: Results) -> dict[str, int]:
    """The number of runs of each row."""
    runs = load_snapshot(store.root, "drawn", "desk")["runs"]
    done = [run for run in runs if store.outcome(run["key"]) is not None]
    return {label: sum(run["row"] == label for run in done) for label in MEANS}


def added(study: Study, store: Results, **options: Any) -> Decision:
    """Decide in this process, without choosing rates."""
    return decide(study, "desk", store, workers=0, tune=False, **options)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decision]:
    """The results of a whole study of added seeds, and what was said of them."""
    root = tmp_path_factory.mktemp("ended")
    return root, added(STUDY, Results(root))


@pytest.fixture
def decided(ended: tuple[Path, Decision], tmp_path: Path) -> Results:
    """A copy of these results."""
    return Results(shutil.copytree(ended[0], tmp_path / "decided"))


def test_seeds_go_to_both_sides_of_undecided_claims_only(ended: tuple[Path, Decision]) -> None:
    store, decision = Results(ended[0]), ended[1]
    table = Table.load(store.root, "drawn", "desk")
    assert table.gate.passed is True
    assert re.search(r"w/o: .* \(by the interim analysis at 3\); uniform", table.gate.sentence)
    words = {claim.a: claim.verdict.word for claim in table.claims}
    assert words["SKA"] == "supported"
    assert words["near"] == "undecided"
    assert words["same"] == "supported"
    numbers = seeds(store)
    assert (numbers["context"], numbers["w/o"]) == (0, 3)  # no claim names the first
    assert numbers["SKA"] < numbers["softmax"]
    assert numbers["softmax"] == max(numbers["near"], numbers["same"])
    assert "decided" in decision.reason
    assert sum(decision.counts.values()) == sum(numbers.values())


def test_a_second_call_goes_on_with_the_stored_analyses_and_repeats_nothing(tmp_path: Path, decided: Results) -> None:
    store = Results(tmp_path)
    added(replace(STUDY, seconds=1000.0), store, hours=0.000001)
    assert sum(seeds(store).values()) < 21
    assert load_snapshot(tmp_path, "drawn", "desk")["decide"]["pairs"] == [3, 5, 8, 12, 18]
    added(STUDY, store)
    assert added(STUDY, store).counts == {}
    assert seeds(store) == seeds(decided)


def test_what_the_time_left_cannot_decide_is_not_begun(tmp_path: Path) -> None:
    """A run takes 1000 s of the clock of the estimate, so that one hour is enough for no further analysis."""
    store = Results(tmp_path)
    added(replace(STUDY, seconds=1000.0), store, hours=1)
    assert max(seeds(store).values()) == 3


def test_the_time_of_the_networks_that_rows_start_from_counts(tmp_path: Path) -> None:
    """A network takes 1500 s of the clock of the estimate, so one hour is enough for two more seeds, not for five."""
    started = replace(STUDY, seconds=1.0, start_seconds=1500.0)
    store = Results(tmp_path / "started")
    added(started, store, hours=1)
    assert max(seeds(store).values()) == 5
    without = Results(tmp_path / "without")
    added(replace(started, start_seconds=0.0), without, hours=1)
    assert max(seeds(without).values()) == 8


def test_without_a_gate_no_claim_gets_further_seeds(tmp_path: Path) -> None:
    store = Results(tmp_path)
    decision = added(replace(STUDY, means={**MEANS, "w/o": 90.0}), store)
    table = Table.load(tmp_path, "drawn", "desk")
    assert table.gate.passed is False
    assert {claim.verdict.word for claim in table.claims} == {"not judged"}
    assert (seeds(store)["SKA"], seeds(store)["softmax"]) == (0, 3)
    assert decision.reason.startswith("softmax is not shown to be above w/o and uniform")


def test_rows_that_no_claim_names_are_trained_last_where_asked_for(tmp_path: Path, decided: Results) -> None:
    store = Results(tmp_path)
    rows: list[str] = []
    added(STUDY, store, rows="con*", watch=lambda event: rows.extend([event.row] if event.kind == "done" else []))
    assert seeds(store) == seeds(decided) | {"context": 3}
    assert rows[-3:] == ["context"] * 3
    assert added(STUDY, store, rows="con*").counts == {}
    with pytest.raises(ConfigError, match="nothing"):
        added(STUDY, store, rows="nothing")


def test_runs_that_are_there_already_are_part_of_the_table(decided: Results) -> None:
    """Two studies share rows in one folder: the second one has the gate, and what it claims, from the first."""
    again = added(replace(STUDY, name="again", claims=STUDY.claims[:1]), decided)
    assert again.counts == {}
    table = Table.load(decided.root, "again", "desk")
    assert table.gate.passed is True
    assert [claim.verdict.word for claim in table.claims] == ["supported"]
    other = replace(STUDY, name="other", claims=(Claim("context", "softmax", "top1"),))
    assert added(other, decided).counts["done"] == 3
    assert Table.load(decided.root, "other", "desk").claims[0].verdict.word == "contradicted"


@dataclass(frozen=True, kw_only=True)
class Edited(DrawnStudy):
    """The same study, whose runs have other keys: their recipe was edited."""

    def run(self, scale: str, row: Row, seed: int) -> Any:
        return replace(super().run(scale, row, seed + 500), seed=seed + 500)


def test_a_study_that_was_edited_after_a_look_is_refused(decided: Results) -> None:
    before = seeds(decided)
    edited = Edited(**{each.name: getattr(STUDY, each.name) for each in fields(STUDY)})
    message = "drawn is not what it was at its first interim analysis: row softmax, seed 0"
    with pytest.raises(ConfigError, match=message):
        added(edited, decided)
    setting = STUDY.setting("desk")
    recipe = replace(edited, settings={"desk": replace(setting, recipe=Recipe(epochs=2))})
    with pytest.raises(ConfigError, match="not what it was at its first interim analysis"):
        added(recipe, decided)
    assert seeds(decided) == before
    assert added(STUDY, decided).counts == {}


def test_failed_runs_are_named_and_repeated(tmp_path: Path) -> None:
    """A row that always fails ends, and keeps no other claim open."""
    store = Results(tmp_path)
    decision = added(replace(STUDY, fails=tuple(range(100))), store)
    assert re.fullmatch(r"too many runs failed \(\d+ of near\); --retry repeats them", decision.reason)
    assert seeds(store)["near"] < 20
    words = {claim.a: claim.verdict.word for claim in Table.load(tmp_path, "drawn", "desk").claims}
    assert words == {"SKA": "supported", "near": "not judged", "same": "supported"}
    assert "near" not in added(STUDY, store).counts
    assert Table.load(tmp_path, "drawn", "desk").line("near").n == 0
    repeated = added(STUDY, store, retry=True)
    assert repeated.counts["failed"] == 0
    assert Table.load(tmp_path, "drawn", "desk").line("near").n >= 3
    assert "every claim is decided" in repeated.reason


def test_what_another_process_executes_is_not_called_stopped(tmp_path: Path) -> None:
    store = Results(tmp_path)
    with store.lock(STUDY.run("desk", ROWS[0], 0).key):
        assert added(STUDY, store).reason.startswith("another process executes runs of it")


def test_the_cheapest_claims_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes' work at a time: first the claim whose new row takes a second, then the other ones."""
    seconds = {"SKA": 900.0, "near": 1.0, "same": 300.0}
    monkeypatch.setattr(
        "regard.lab.engine.decide.estimate", lambda *args, rows: {(label, 0): s for label, s in seconds.items()}
    )
    ended: list[str] = []
    added(STUDY, Results(tmp_path), watch=lambda event: ended.extend([event.row] if event.kind == "done" else []))
    firsts = [ended.index(label) for label in ("near", "same", "SKA")]
    assert firsts == sorted(firsts)


def test_a_host_that_cannot_be_built_is_refused_before_any_run(tmp_path: Path) -> None:
    study = load_study("quickstart").elsewhere("desk", host="resnet18", size=(9, 9))
    with pytest.raises(ConfigError):
        decide(study, "desk", Results(tmp_path / "results"), workers=0)
    assert not (tmp_path / "results").exists()


def test_pairs_are_counted_without_failed_runs(tmp_path: Path) -> None:
    store = Results(tmp_path)
    added(replace(STUDY, fails=(1, 3)), store)
    near = Table.load(tmp_path, "drawn", "desk").line("near")
    assert near.n in (5, 8, 12, 18)
    assert near.failed == 2


def test_a_failed_seed_that_an_analysis_was_made_without_stays_failed(tmp_path: Path) -> None:
    store = Results(tmp_path)
    added(replace(STUDY, fails=(1, 3)), store)
    before = Table.load(tmp_path, "drawn", "desk").claims
    assert added(STUDY, store, retry=True).counts == {}
    assert Table.load(tmp_path, "drawn", "desk").claims == before


def test_fixed_seeds_are_not_turned_into_added_ones(tmp_path: Path) -> None:
    run_study(STUDY, "desk", Results(tmp_path), seeds=1, workers=0)
    with pytest.raises(ConfigError, match="began with a fixed number of seeds.*--results FOLDER"):
        added(STUDY, Results(tmp_path))


def test_a_study_that_was_looked_at_keeps_its_claims_and_stays_one_of_added_seeds(decided: Results) -> None:
    with pytest.raises(ConfigError, match="the claims of drawn changed"):
        added(replace(STUDY, claims=STUDY.claims[:2]), decided)
    assert load_snapshot(decided.root, "drawn", "desk")["decide"]["level"] == pytest.approx(0.05)
    command = f"continue it with: regard study run drawn --scale desk --decide --results {decided.root}; or"
    with pytest.raises(ConfigError, match=re.escape(command)):
        run_study(STUDY, "desk", decided, seeds=4, workers=0)


def test_the_command_that_continues_a_changed_study_names_what_was_changed(tmp_path: Path) -> None:
    root = tmp_path / "two words"
    study = replace(STUDY, settings={"desk": replace(STUDY.setting("desk"), variant="cifar10")})
    write_snapshot(study, "desk", Results(root), planned=(), looks=Looks())
    options = "with the same --data, --host, --size and --set;"
    command = f"regard study run drawn --scale desk --decide --results '{root}', {options}"
    with pytest.raises(ConfigError, match=re.escape(command)):
        write_snapshot(study, "desk", Results(root))


def test_smoke_scale_and_hours_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smoke scale judges no claim"):
        decide(STUDY, "smoke", Results(tmp_path), workers=0)
    with pytest.raises(ConfigError, match="hours is a positive number"):
        added(STUDY, Results(tmp_path), hours=0)


def test_an_analysis_keeps_the_seeds_that_it_was_made_with(tmp_path: Path) -> None:
    """Further seeds of a study with seeds of its own are smaller numbers, and come after them all the same."""
    setting = replace(STUDY.setting("desk"), seeds=(50, 51, 52))
    store = Results(tmp_path)
    added(replace(STUDY, settings={"desk": setting}), store)
    snapshot = load_snapshot(tmp_path, "drawn", "desk")
    runs = [{**run, "outcome": store.outcome(run["key"]) or {}} for run in snapshot["runs"]]
    found = differences(runs, ("near", "softmax"), "top1")
    assert list(found)[:5] == [50, 51, 52, 0, 1]
    first = claim_differences(snapshot, runs).differences[1, :3].tolist()
    assert first == [found[seed] for seed in (50, 51, 52)]
    means = {label: {51: 2.0, 0: 5.0} for label in ("softmax", "w/o")}
    assert gate_differences({**means, "w/o": {51: 1.0, 0: 1.0}}, ["w/o"], "softmax").differences.tolist() == [
        [1.0, 4.0]
    ]


def test_maps_are_kept_of_the_first_seed_alone_whatever_is_planned() -> None:
    runs = STUDY.runs("desk", "SKA", 5)
    assert [job.probes for job in planned_jobs(STUDY, "desk", runs)] == [True, False, False, False, False]
    assert not any(job.probes for job in planned_jobs(STUDY, "desk", runs[3:]))  # as interim analyses add them


def train_on(device: str, store: Results, runs: list[dict[str, Any]]) -> None:
    """Write down a device for finished runs."""
    for run in runs:
        with store.lock(run["key"]):
            store.finish(run["key"], {**(store.outcome(run["key"]) or {}), "environment": {"device": device}})


def finished(store: Results) -> list[dict[str, Any]]:
    return [run for run in load_snapshot(store.root, "drawn", "desk")["runs"] if store.outcome(run["key"])]


@pytest.mark.parametrize(("here", "there"), [("cpu", "NVIDIA H200"), ("cuda", "cpu")])
def test_a_study_of_another_device_is_refused_before_it_trains(
    here: str, there: str, decided: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on(there, decided, finished(decided))
    monkeypatch.setattr("regard.lab.engine.decide.resolved_device", lambda device: here)
    with pytest.raises(ConfigError, match="drawn was begun on .*, this machine would go on on .*--results FOLDER"):
        added(STUDY, decided)


def test_seeds_of_another_device_are_named_where_they_end_a_study(decided: Results) -> None:
    runs = finished(decided)
    train_on("cpu", decided, [run for run in runs if run["seed"] in STUDY.setting("desk").numbers[:3]])
    train_on("NVIDIA H200", decided, [run for run in runs if run["seed"] not in STUDY.setting("desk").numbers[:3]])
    further = added(STUDY, decided)
    message = r"the table has runs on .* only; left out: .*, so only further seeds of the first type"
    assert re.match(message, further.reason)
    assert not any(further.counts.values())
