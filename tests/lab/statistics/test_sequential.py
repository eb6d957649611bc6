"""Interim analyses: their bounds by hand, and the rate of false verdicts in simulated studies."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from regard.core import ConfigError
from regard.lab.statistics.sequential import Differences, Looks, analyse, gate_passed, is_decided, next_pairs
from regard.measure.intervals import holm, power, powers

LOOKS = Looks()
GATE = Differences.against_zero(np.full((2, 3), 20.0) + [[0.0, 0.1, 0.2]])


def differences_of(*values: list[float]) -> Differences:
    """Claims against zero, padded with missing seeds."""
    padded = np.full((len(values), max(map(len, values))), np.nan)
    for row, claim in zip(padded, values, strict=True):
        row[: len(claim)] = claim
    return Differences.against_zero(padded)


def test_p_is_the_smallest_of_the_analyses_over_their_shares() -> None:
    x = [1.0, 3.0, 2.0, 2.5, 1.5, 9.0]  # the sixth seed is in no analysis
    expected = min(stats.ttest_1samp(x[:n], 0).pvalue / share for n, share in ((3, 0.05), (5, 0.15)))
    found = analyse(LOOKS, differences_of(x))
    assert found.p[0] == pytest.approx(expected)
    assert (found.side[0], found.at[0]) == (1, 5)
    against = analyse(LOOKS, differences_of([-value for value in x]))
    assert (against.p[0], against.side[0]) == (pytest.approx(expected), -1)


def test_rounding_is_no_deviation() -> None:
    """Three more of 360 images at each seed."""
    x = [100 * (right + 3) / 360 - 100 * right / 360 for right in (326, 205, 179, 11, 300)]
    assert len(set(x)) > 1
    found = analyse(LOOKS, differences_of(x))
    assert found.p[0] == 1


def test_an_equivalence_has_its_two_one_sided_tests() -> None:
    x = [0.1, -0.2, 0.05, 0.15, -0.1]
    tests = Differences(differences=np.array([x]), at=np.zeros(1), within=np.array([1.0]))
    one_sided = stats.ttest_1samp(x, 1, alternative="less"), stats.ttest_1samp(x, -1, alternative="greater")
    expected = 2 * max(test.pvalue for test in one_sided)
    assert tests.p(5)[0][0] == pytest.approx(expected)
    assert tests.p(5)[1][0] == 1


def test_without_an_analysis_nothing_is_decided() -> None:
    few = differences_of([5.0, 5.1])
    assert (analyse(LOOKS, few).p.tolist(), analyse(LOOKS, few).at.tolist()) == ([1.0], [0])
    assert not is_decided(LOOKS, few).any()
    assert not gate_passed(LOOKS, few)
    assert gate_passed(LOOKS, Differences.against_zero(np.zeros((0, 3))))


def test_the_gate_needs_the_baseline_above_every_control() -> None:
    assert gate_passed(LOOKS, GATE)
    assert not gate_passed(LOOKS, Differences.against_zero(GATE.differences * [[1], [-1]]))


def test_a_verdict_stays_whatever_comes_later() -> None:
    first = [4.0, 4.1, 4.2, 3.9, 4.05]
    assert is_decided(LOOKS, differences_of(first, [0.1, -0.1, 0.0]))[0]
    assert is_decided(LOOKS, differences_of([*first, -50.0, 40.0, -60.0], [0.1, -0.1, 0.0]))[0]


def test_seeds_go_to_the_gate_first_and_then_to_open_claims() -> None:
    none = np.full((3, 0), np.nan)
    pairs, gate = next_pairs(LOOKS, Differences.against_zero(none), Differences.against_zero(none[:2]))
    assert (pairs.tolist(), gate.tolist()) == ([0, 0, 0], [3, 3])
    pairs, gate = next_pairs(LOOKS, Differences.against_zero(none), GATE, most=np.array([18, 3, 0]))
    assert (pairs.tolist(), gate.tolist()) == ([3, 3, 3], [0, 0])  # the first analysis whatever the time
    sure, open_, hopeless = [9.0, 9.1, 9.05, 9.02, 9.07], [1.0, 3.0, 2.0], [0.0, 30.0, -30.0] * 4
    claims = differences_of(sure, open_, hopeless)
    pairs, gate = next_pairs(LOOKS, claims, differences_of([1.0, 4.0, 2.0], [9.0, 9.1, 9.2]))
    assert (pairs.tolist(), gate.tolist()) == ([0, 0, 0], [5, 5 if gate[1] else 0])
    pairs, gate = next_pairs(LOOKS, claims, GATE)
    assert (pairs.tolist(), gate.tolist()) == ([0, 5, 0], [0, 0])
    pairs, _ = next_pairs(LOOKS, claims, GATE, most=np.array([18, 3, 18]))
    assert pairs.tolist() == [0, 0, 0]


def test_a_gate_that_is_lost_ends_the_study() -> None:
    lost = differences_of([-9.0, -9.1, -9.05, -9.02, -9.07], [9.0, 9.1, 9.2])
    pairs, gate = next_pairs(LOOKS, differences_of([1.0, 3.0, 2.0]), lost)
    assert (pairs.tolist(), gate.tolist()) == ([0], [0, 0])


def test_a_gate_below_its_control_gets_no_more_seeds_to_show_that() -> None:
    """Of attention that is surely a little worse than none, more seeds would decide only that."""
    worse = differences_of([-0.11, -0.16, -0.18])
    none = Differences.against_zero(np.full((1, 3), np.nan))
    pairs, gate = next_pairs(LOOKS, none, worse)
    assert (pairs.tolist(), gate.tolist()) == ([0], [0])
    _, gate = next_pairs(LOOKS, none, Differences.against_zero(-worse.differences))
    assert gate.tolist() == [5]
    pairs, _ = next_pairs(LOOKS, worse, GATE)  # a claim may be contradicted
    assert pairs.tolist() == [5]


def test_after_the_last_analysis_nothing_is_asked_for() -> None:
    claims = differences_of([0.1, -0.1] * 9)
    assert next_pairs(LOOKS, claims, GATE)[0].tolist() == [0]


def test_arrays_of_powers_are_those_of_single_ones() -> None:
    found = powers(np.array([5, 8]), np.array([1.0, 1.5]), np.array([0.8, 2.0]), np.array([0.05, 0.01]))
    assert found == pytest.approx([power(5, 1.0, 0.8), power(8, 1.5, 2.0, level=0.01)])


def test_levels_are_stored_and_read() -> None:
    assert Looks.from_json(LOOKS.to_json()) == LOOKS
    assert sum(LOOKS.shares) == pytest.approx(1)
    for value in ({"pairs": (2, 5)}, {"shares": (0.5, 0.6)}, {"level": 0.0}, {"pairs": (5, 3, 8, 12, 18)},
                  {"pairs": (3, 5, 8, 12, 10**9)}):  # fmt: skip
        with pytest.raises(ConfigError):
            Looks(**value)  # type: ignore[arg-type]


SEEDS = 40
"""More than a study of this size would need, for the fixed numbers that are compared."""


@dataclass(frozen=True)
class Truth:
    """Simulated studies: differences (S, m, SEEDS), their expected values (S, m) as trained and at the best rate, the
    margins of equivalences (m,), and the gate (S, 2, SEEDS)."""

    differences: NDArray[np.float64]
    as_trained: NDArray[np.float64]
    at_best: NDArray[np.float64]
    within: NDArray[np.float64]
    gate: NDArray[np.float64]


def simulate(studies: int, m: int, effects: float, tuned: bool, gate_holds: bool, seed: int) -> Truth:
    """m claims on differences of rows to a baseline, whose noise they share; a quarter are equivalences within 1.

    Noise is t-distributed with 5 degrees of freedom, its deviation 0.5 to 1.5 by row, with a part that all rows of a
    seed share. Without an effect a difference is 0, or just outside the margin of the equivalence. effects: share of
    the claims with an effect of 0.5 to 4. tuned: each row has the best of three learning rates on one noisy run.
    """
    rng = np.random.default_rng(seed)
    rows = m + 1

    def noise(*shape: int) -> NDArray[np.float64]:
        return rng.standard_t(5, shape) / np.sqrt(5 / 3)

    deviation = rng.uniform(0.5, 1.5, (studies, rows, 1))
    values = deviation * (noise(studies, rows, SEEDS) + 0.5 * noise(studies, 1, SEEDS))
    within = np.where(np.arange(m) % 4 == 3, 1.0, np.nan)
    equal = np.isfinite(within)
    real = rng.random((studies, m)) < effects
    effect = rng.uniform(0.5, 4, (studies, m)) * rng.choice([1.0, 1.0, -1.0], (studies, m))
    means = np.zeros((studies, rows))
    means[:, 1:] = np.where(equal, np.where(real, 0.0, 1.0001), np.where(real, effect, 0.0))
    loss = np.zeros((studies, rows))
    if tuned:
        best = rng.normal(0, 0.6, (studies, rows, 1))
        losses = 2 * (np.arange(-1, 2) - best) ** 2
        losses -= losses.min(-1, keepdims=True)
        chosen = (losses + deviation * noise(studies, rows, 3)).argmin(-1)
        loss = np.take_along_axis(losses, chosen[..., None], -1)[..., 0]
    values += (means - loss)[..., None]
    differences = values[:, 1:] - values[:, :1]
    gate = values[:, :1] - noise(studies, 2, SEEDS) + [[[15.0], [20.0 if gate_holds else 0.0]]]
    gate[:, 0] += 0 if gate_holds else 5
    as_trained = means[:, 1:] - loss[:, 1:] - (means[:, :1] - loss[:, :1])
    return Truth(differences, as_trained, means[:, 1:] - means[:, :1], within, gate)


def claims_of(truth: Truth, pairs: NDArray[np.int64]) -> Differences:
    shown = np.where(np.arange(SEEDS) < pairs[..., None], truth.differences, np.nan)
    return Differences(differences=shown, at=np.zeros(truth.within.shape), within=truth.within)


def gate_of(truth: Truth, pairs: NDArray[np.int64]) -> Differences:
    return Differences.against_zero(np.where(np.arange(SEEDS) < pairs[..., None], truth.gate, np.nan))


def false(side: NDArray[np.int64], expected: NDArray[np.float64], within: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether a verdict is false: without an effect, both directions are."""
    inside = np.abs(expected) <= within
    against_truth = np.where(side > 0, expected <= 0, expected >= 0)
    return np.where(np.isfinite(within), inside != (side > 0), against_truth)


def carried_out(truth: Truth) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """(decided, side, pairs) of claims in studies that add seeds as `regard study run --decide` does."""
    studies, m, _ = truth.differences.shape
    pairs, gate_pairs = np.zeros((studies, m), np.int64), np.zeros((studies, 2), np.int64)
    while True:
        claims, gate = claims_of(truth, pairs), gate_of(truth, gate_pairs)
        further, gate_further = next_pairs(LOOKS, claims, gate)
        if not further.any() and not gate_further.any():
            passed = gate_passed(LOOKS, gate)[:, None]
            return is_decided(LOOKS, claims) & passed, analyse(LOOKS, claims).side, pairs
        pairs, gate_pairs = np.maximum(pairs, further), np.maximum(gate_pairs, gate_further)


def fixed(truth: Truth, seeds: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """(decided, side) with a fixed number of seeds and Holm's correction."""
    p, side = claims_of(truth, np.full(truth.at_best.shape, SEEDS)).p(seeds)
    return holm(p), side


SCENARIOS = {
    "(a) no effect": (0.0, False),
    "(b) half of the claims true": (0.5, False),
    "(a) with tuned rates": (0.0, True),
    "(b) with tuned rates": (0.5, True),
}
STUDIES_OF = {4: 4000, 8: 3000, 12: 1500, 20: 1500}
"""10,000 studies by their number of claims."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_most_one_study_in_twenty_has_a_false_verdict(name: str) -> None:
    effects, tuned = SCENARIOS[name]
    wrong, wrong_mechanism, found, real, seeds = 0, 0, 0, 0, []
    fixed_wrong, fixed_found = np.zeros(SEEDS + 1), np.zeros(SEEDS + 1)
    for m, studies in STUDIES_OF.items():
        truth = simulate(studies, m, effects, tuned, True, m)
        closed, side, pairs = carried_out(truth)
        wrong += int((closed & false(side, truth.as_trained, truth.within)).any(1).sum())
        wrong_mechanism += int((closed & false(side, truth.at_best, truth.within)).any(1).sum())
        right = ~false(np.where(truth.at_best > 0, 1, -1), truth.as_trained, truth.within) & np.isnan(truth.within)
        real += int(right.sum())
        found += int((closed & right).sum())
        seeds.append(pairs.mean(1))
        for n in range(3, SEEDS + 1, 1 if effects else SEEDS):
            closed, side = fixed(truth, n)
            fixed_wrong[n] += int((closed & false(side, truth.as_trained, truth.within)).any(1).sum())
            fixed_found[n] += int((closed & right).sum())
    total = sum(STUDIES_OF.values())
    equal = next((n for n in range(3, SEEDS + 1) if effects and fixed_found[n] >= found), None)
    print(f"\n{name}: {100 * wrong / total:.2f} % of {total} studies with a false verdict on their rows, "
          f"{100 * wrong_mechanism / total:.2f} % on mechanisms at their best rate; "
          f"{100 * found / max(real, 1):.0f} % of true effects decided, {np.concatenate(seeds).mean():.1f} seeds a row "
          f"(fixed: {equal})")  # fmt: skip
    assert wrong / total <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / total)
    if effects:
        assert found > 0.5 * real
        assert np.concatenate(seeds).mean() < (equal or SEEDS)


@pytest.mark.slow
def test_a_gate_without_an_effect_is_passed_in_at_most_one_study_in_twenty() -> None:
    truth = simulate(10_000, 4, 0.5, False, False, 0)
    closed, _, pairs = carried_out(truth)
    rate = closed.any(1).mean()
    print(f"\ngate without an effect: {100 * rate:.2f} % of studies have a verdict, {pairs.mean():.1f} seeds a row")
    assert rate <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 10_000)
