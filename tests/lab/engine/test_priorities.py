"""Which studies to carry out first: what is expected of each, and what becomes of the hours."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from regard.core import ConfigError
from regard.lab import Claim, Recipe, Row
from regard.lab.engine.decide import decide
from regard.lab.engine.priorities import GUESS, TUNED, Priority, Spent, decide_all, priorities
from regard.lab.engine.run_study import run_study
from regard.lab.engine.table import Table
from regard.lab.results.results import Results
from regard.lab.studies import load_study
from tiny_task import Tiny

from lab.engine.test_decide import MEANS, STUDY, Drawn, DrawnStudy  # isort: skip
from lab.engine.test_study import STUDY as TRAINED  # isort: skip


@dataclass(frozen=True, kw_only=True)
class NamedRun(Drawn):
    """A drawn run that belongs to one study."""

    study: str

    @property
    def key(self) -> str:
        return f"{sum(map(ord, self.study)):06x}{super().key[3:6]}{self.seed:03x}"


@dataclass(frozen=True, kw_only=True)
class NamedStudy(DrawnStudy):
    def run(self, scale: str, row: Row, seed: int) -> Any:
        return NamedRun(study=self.name, task=Tiny(), recipe=Recipe(epochs=1), seed=seed, row=row.label,
                        mean=self.means[row.label], seconds=self.seconds)  # fmt: skip


def named(name: str, claims: tuple[Claim, ...] = STUDY.claims, **means: float) -> DrawnStudy:
    """A study of seven rows, whose runs take a minute each by their records."""
    return NamedStudy(name=name, title="Drawn", source="tests", question="?", baseline="softmax",
                      settings=STUDY.settings, claims=claims, means={**MEANS, **means}, seconds=60.0)  # fmt: skip


@pytest.fixture
def hour_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn runs cannot be timed; no learning rate is chosen."""
    monkeypatch.setattr("regard.lab.engine.priorities.baseline_hours", lambda *args: (1.0, 1.0))


def plan(store: Results, *studies: DrawnStudy, hours: float = 100.0) -> dict[str, Priority]:
    return {each.study: each for each in priorities(studies, "desk", store, hours)}


def begin(study: DrawnStudy, store: Results, hours: float = 100.0) -> None:
    decide(study, "desk", store, hours=hours, workers=0, tune=False)


def decided(spent: Sequence[Spent]) -> Counter[str]:
    """The claims that were decided by study."""
    return sum((Counter({each.study: each.decided}) for each in spent), Counter())


def test_of_a_study_that_has_not_begun_a_share_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows get three seeds, and three runs of half the epochs that choose a rate, at ten minutes a run."""
    monkeypatch.setattr("regard.lab.engine.estimate.run_seconds", lambda run, speed, train, test: 600.0)
    claims = (Claim("w/o", "softmax", "top1"), Claim("paper only", "softmax", "top1"))
    desk = TRAINED.setting("smoke")
    settings = {"desk": desk, "paper": replace(desk, rows=(*desk.rows, Row("paper only", None)))}
    study, store, told = replace(TRAINED, settings=settings, claims=claims), Results(tmp_path), list[str]()
    (found,) = priorities([study], "desk", store, 100.0, 1, told.append)
    assert told == [study.name]
    assert found.hours == pytest.approx(2 * (3 + TUNED) / 6)
    assert (found.claims, found.expected) == (1, pytest.approx(GUESS))
    assert found.why == "not begun: by a guess"
    (short,) = priorities([study], "desk", store, found.hours / 2, 1)
    assert short.expected == pytest.approx(GUESS / 2)
    (pair,) = priorities([study], "desk", store, 100.0, 2)
    assert pair.hours == pytest.approx(found.hours / 2)


def test_a_study_without_its_data_is_expected_to_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    studies = [load_study(name) for name in ("quickstart", "mita_table3")]
    first, last = priorities(studies, "desk", Results(tmp_path), 3.0)
    assert (first.study, first.claims, first.why) == ("quickstart", 4, "not begun: by a guess")
    assert 0 < first.expected <= 0.8
    assert first.rate == pytest.approx(first.expected / first.hours)
    assert (last.study, last.expected) == ("mita_table3", 0)
    assert last.why.startswith("no data folder: pass --data-root")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["estimates.json"]


def test_a_pilot_knows_better(tmp_path: Path) -> None:
    """SKA is far above softmax attention after three seeds; "near" needs more; a closed gate and fixed seeds give 0."""
    store = Results(tmp_path)
    begin(named("large", near=81.5), store)
    found = plan(store, named("large", near=81.5))["large"]
    table = Table.load(store.root, "large", "desk")
    decided = sum(claim.verdict.word in ("supported", "contradicted") for claim in table.claims)
    assert decided >= 1
    assert found.claims == 3 - decided
    assert found.expected <= found.claims


@pytest.mark.slow
def test_nothing_is_expected_where_nothing_can_be_decided(tmp_path: Path) -> None:
    closed, fixed, clear = named("closed", softmax=50.0), named("fixed"), named("clear", near=95.0)
    stores = [Results(tmp_path / name) for name in ("closed", "fixed", "clear")]
    begin(closed, stores[0])
    run_study(fixed, "desk", stores[1], workers=0)
    begin(clear, stores[2])
    found = [plan(store, study)[study.name] for store, study in zip(stores, (closed, fixed, clear), strict=True)]
    assert [each.expected for each in found] == [0, 0, 0]
    assert [each.why for each in found] == [
        "attention does not help here: no claim is judged",
        "began with a fixed number of seeds: begin it anew in another folder",
        "all claims are decided",
    ]
    assert decide_all([closed], "desk", stores[0], hours=1.0, workers=0) == []


@pytest.mark.usefixtures("hour_a_study")
def test_hours_go_to_the_most_promising_study_first_and_one_that_fails_leaves_them_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carried_out(study: DrawnStudy, *args: Any, **kwargs: Any) -> object:
        if study.name == "broken":
            raise ConfigError("no such disk")
        return decide(study, *args, **kwargs, tune=False)

    monkeypatch.setattr("regard.lab.engine.priorities.decide", carried_out)
    told: list[str] = []
    studies = [named("one", STUDY.claims[:1]), named("broken", STUDY.claims[:2]), named("three", near=95.0)]
    spent = decide_all(studies, "desk", Results(tmp_path), hours=50.0, workers=0, report=told.append)
    assert next(line for line in told if "expected in" in line).startswith("three:")
    assert decided(spent) == {"three": 3, "one": 1}
    assert {each.study: each.reason for each in spent}["broken"] == "no such disk"
    assert all(each.hours > 0 for each in spent if each.study != "broken")
