"""What more seeds would decide, from stores with known outcomes, against scipy's own distributions."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pilot_store import PILOT, make_store
from regard.core import ConfigError
from regard.lab.engine.power import prospects
from regard.lab.statistics.sequential import Looks
from regard.lab.statistics.verdicts import claim_p
from regard.measure.intervals import decided_difference, deviation_bounds, power, seeds_needed

CLAIMS = [
    {"a": "SKA", "b": "softmax", "metric": "top1"},
    {"a": "MiTA", "b": "softmax", "metric": "top1", "within": 2.0},
]


def test_the_bounds_of_a_deviation_are_those_of_chi_squared() -> None:
    low, high = deviation_bounds(1.0, 3)
    assert low == pytest.approx(np.sqrt(2 / stats.chi2.ppf(0.975, 2)))
    assert high == pytest.approx(np.sqrt(2 / stats.chi2.ppf(0.025, 2)))


@pytest.mark.parametrize(("seeds", "level"), [(3, 0.05), (5, 0.05), (8, 0.005)])
def test_the_decided_difference_has_the_power_it_promises(seeds: int, level: float) -> None:
    difference = decided_difference(seeds, 0.7, level)
    assert power(seeds, difference, 0.7, level=level) == pytest.approx(0.8, abs=1e-6)
    upper = stats.nct.sf(stats.t.ppf(1 - level / 2, seeds - 1), seeds - 1, difference * np.sqrt(seeds) / 0.7)
    assert upper == pytest.approx(0.8, abs=1e-4)


def test_equivalence_has_to_exclude_both_edges() -> None:
    """The share of simulated pilots that claim_p decides, and not that of one of its two one-sided tests."""
    differences = np.random.default_rng(0).normal(0.3, 1.0, (20_000, 10))
    mean, error = differences.mean(1), differences.std(1, ddof=1) / np.sqrt(10)
    p, side = claim_p(mean, error, 9, within=1.0)
    share = ((p < 0.05) & (side > 0)).mean()
    assert power(10, 0.7, 1.0) > share + 0.03
    assert power(10, 0.7, 1.0, other=1.3) == pytest.approx(share, abs=0.012)
    needed = seeds_needed(1.0, 1.0, other=1.0)
    assert power(needed, 1.0, 1.0, other=1.0) >= 0.8 > power(needed - 1, 1.0, 1.0, other=1.0)


def test_prospects_of_gate_and_claims(tmp_path: Path) -> None:
    make_store(tmp_path, claims=CLAIMS)
    found = prospects(tmp_path, "pilot", "desk", hours=0.01, workers=2)
    assert [prospect.text for prospect in found] == [
        "gate: softmax is above w/o", "gate: softmax is above uniform", "SKA is above softmax in top1",
        "MiTA is as good as softmax in top1, within 2",
    ]  # fmt: skip
    ska, mita = found[2:]
    x = np.subtract(PILOT["SKA"], PILOT["softmax"])
    assert (ska.pilot, ska.mean, ska.sd) == (3, pytest.approx(x.mean()), pytest.approx(x.std(ddof=1)))
    assert ska.decides[5] == pytest.approx(decided_difference(5, ska.sd, 0.025))  # two claims share 5 %
    assert found[0].decides[5] == pytest.approx(decided_difference(5, found[0].sd))
    assert ska.seeds == seeds_needed(ska.sd, ska.target, level=0.025)
    assert mita.target == pytest.approx(2 - abs(mita.mean))
    assert mita.seeds == seeds_needed(mita.sd, mita.target, level=0.025, other=2 + abs(mita.mean))


def test_a_claim_by_a_margin_has_to_exclude_the_margin_at_paper_scale(tmp_path: Path) -> None:
    claims = [{"a": "SKA", "b": "softmax", "metric": "top1", "by": 3.0}]
    make_store(tmp_path, claims=claims)
    make_store(tmp_path, claims=claims, scale="paper")
    desk, paper = (prospects(tmp_path, "pilot", scale)[2] for scale in ("desk", "paper"))
    assert (desk.text, paper.text) == ("SKA is above softmax in top1", "SKA is above softmax in top1 by at least 3")
    assert desk.target == pytest.approx(np.mean(PILOT["SKA"]) - np.mean(PILOT["softmax"]))
    assert paper.target == pytest.approx(desk.target - 3.0)
    assert paper.seeds == seeds_needed(paper.sd, paper.target)


def test_fewer_than_three_seeds_decide_nothing_and_of_equal_differences_nothing_follows(tmp_path: Path) -> None:
    """Each row has two seeds and a run takes 2 s: 10 s on one process are one further seed for each of 5 rows."""
    rows = {label: values[:2] for label, values in PILOT.items()}
    make_store(tmp_path, {**rows, "softmax": [80.0, 81.0], "SKA": [84.0, 85.0]}, claims=CLAIMS)
    few, some = (prospects(tmp_path, "pilot", "desk", hours=seconds / 3600) for seconds in (0, 10))
    assert {(prospect.reachable, prospect.chance) for prospect in few if prospect.sd} == {(2, 0.0)}
    assert (some[2].sd, some[2].seeds, some[2].hours, some[2].reachable, some[2].chance) == (0, None, None, 3, None)


def test_hours_are_those_of_the_missing_runs(tmp_path: Path) -> None:
    """A run takes 2 s and each row has three; 72 s on one process are 36 runs, 7 further ones for each of 5 rows."""
    make_store(tmp_path, {**PILOT, "uniform": [89.0, 79.0, 80.0], "SKA": [89.3, 92.7, 92.2]}, claims=CLAIMS)
    found = prospects(tmp_path, "pilot", "desk", hours=72 / 3600, workers=1)
    assert {prospect.reachable for prospect in found} == {10}
    ska = found[2]
    assert ska.hours == pytest.approx(2 * 2 * ((ska.seeds or 0) - 3) / 3600)
    assert ska.chance == pytest.approx(power(10, ska.target, ska.sd, level=0.025))
    assert {prospect.reachable for prospect in prospects(tmp_path, "pilot", "desk", hours=72 / 3600, workers=2)} == {17}


def test_what_is_decided_takes_no_hours(tmp_path: Path) -> None:
    """The gate is passed and SKA's claim holds: 72 s are 36 runs of softmax and MiTA, 18 further seeds."""
    make_store(tmp_path, claims=CLAIMS)
    found = prospects(tmp_path, "pilot", "desk", hours=72 / 3600)
    assert [(each.decided, each.reachable) for each in found] == [(True, None)] * 3 + [(False, 21)]
    assert [each.hours for each in found[:3]] == [0.0] * 3


def test_added_seeds_end_with_the_last_analysis(tmp_path: Path) -> None:
    """MiTA's claim needs 105 seeds; where seeds are added, an analysis has its share of the level, and 18 are most."""
    looks = Looks()
    make_store(tmp_path, claims=CLAIMS, decide=looks.to_json())
    *_, mita = prospects(tmp_path, "pilot", "desk", hours=200 / 3600)
    assert (mita.seeds, mita.most, mita.hours, mita.reachable) == (None, 18, None, 18)
    levels = {3: 0.05, 5: 0.15, 8: 0.25, 12: 0.25}  # of the share of one of two claims
    assert mita.decides == {n: decided_difference(n, mita.sd, 0.025 * share) for n, share in levels.items()}

    level = 0.05 / 2 * looks.shares[-1]
    assert mita.chance == pytest.approx(power(18, mita.target, mita.sd, level=level, other=2 + abs(mita.mean)))
    few, none = (prospects(tmp_path, "pilot", "desk", hours=seconds / 3600)[-1] for seconds in (20, 10))
    assert few.reachable == 5
    assert few.chance < mita.chance
    assert (none.reachable, none.chance) == (3, 0.0)


def test_without_a_pilot_the_command_is_named(tmp_path: Path) -> None:
    make_store(tmp_path, {label: values[:1] for label, values in PILOT.items()})
    with pytest.raises(ConfigError, match="no pilot at desk scale.*regard study run pilot --scale desk --seeds 3"):
        prospects(tmp_path, "pilot", "desk")


def test_other_analyses_decide_at_their_own_numbers_of_seeds(tmp_path: Path) -> None:
    make_store(tmp_path, claims=CLAIMS, decide=Looks(pairs=(4, 12), shares=(0.5, 0.5)).to_json())
    mita = prospects(tmp_path, "pilot", "desk")[-1]
    assert mita.decides == {12: decided_difference(12, mita.sd, 0.0125)}
