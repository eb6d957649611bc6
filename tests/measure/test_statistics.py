"""Statistics against tables, by hand, and against scipy's own tests."""

import numpy as np
import pytest

from regard.measure.statistics import (
    Interval,
    Pooled,
    holm,
    interval,
    judge,
    paired,
    pooled,
    sampling_error,
    seeds_needed,
)

SOFTMAX = {0: 88.9, 1: 89.2, 2: 87.8}
SKA = {0: 92.3, 1: 92.7, 2: 92.2}
MITA = {0: 89.1, 1: 85.6, 2: 87.0}


def test_interval_of_three_by_hand() -> None:
    result = interval([1.0, 2.0, 3.0])  # sd 1, t(0.975, 2) = 4.30265
    assert (result.mean, result.sd) == (2.0, 1.0)
    assert result.half == pytest.approx(4.302652729911275 / 3**0.5, rel=1e-9)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_have_no_interval(n: int) -> None:
    result = interval([1.0] * n)
    assert result.low is None
    assert result.high is None
    assert judge(result).word == "not judged"


def test_paired_differences_use_common_seeds() -> None:
    assert paired({0: 1.0, 1: 5.0, 7: 3.0}, {7: 1.0, 1: 2.0, 9: 0.0}).mean == pytest.approx(2.5)
    assert paired(SKA, SOFTMAX).mean == pytest.approx(3.7667, abs=1e-4)


def test_p_value_is_that_of_scipys_paired_test() -> None:
    from scipy.stats import ttest_rel

    expected = ttest_rel(list(SKA.values()), list(SOFTMAX.values())).pvalue
    assert judge(paired(SKA, SOFTMAX)).p == pytest.approx(expected, rel=1e-9)


def test_pooled_half_width_of_the_tables() -> None:
    """With residual sd s, 8 rows and 3 seeds: 1.24 sd_d, where sd_d = s sqrt(2)."""
    x = np.random.default_rng(0).normal(size=(8, 3)) + np.arange(8)[:, None]
    x = x.mean(1, keepdims=True) + (x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True)
    result = pooled({str(i): dict(enumerate(row)) for i, row in enumerate(x.tolist())})
    assert result.degrees == 14
    assert result.half is not None
    assert result.half / (result.sd * 2**0.5) == pytest.approx(1.24, abs=0.005)


def test_pooling_is_refused_where_rows_scatter_differently() -> None:
    result = pooled({"a": {0: 0.0, 1: 1.0, 2: 2.0}, "b": {0: 0.0, 1: 3.0, 2: 6.0}})
    assert result.half is None
    assert "differ" in result.reason


# sd, difference, seeds alone, seeds pooled over 8 rows
TABLE = [
    (0.3, 0.5, 6, 4),
    (0.4, 0.5, 8, 6),
    (0.6, 0.5, 14, 12),
    (0.6, 1, 6, 4),
    (0.8, 2, 4, 3),
    (1.0, 0.5, 34, 32),
    (1.0, 1, 10, 9),
]


@pytest.mark.parametrize(("sd", "difference", "alone", "together"), TABLE)
def test_seeds_needed_as_in_the_table(sd: float, difference: float, alone: int, together: int) -> None:
    assert seeds_needed(sd, difference) == alone
    assert seeds_needed(sd, difference, rows=8) == together


def test_verdicts_of_the_pilot() -> None:
    assert judge(paired(SKA, SOFTMAX)).sentence.startswith("supported: +3.8 [+2.4, +5.1], 3 seeds")
    assert judge(paired(SOFTMAX, SKA)).word == "contradicted"
    undecided = judge(paired(MITA, SOFTMAX))
    assert (
        undecided.sentence == "undecided: -1.4 [-6.3, +3.5], 3 seeds; about 18 seeds would decide a difference of 1.4"
    )


def test_smoke_scale_and_a_closed_gate_judge_nothing() -> None:
    assert judge(paired(SKA, SOFTMAX), scale="smoke").word == "not judged"
    message = judge(paired(MITA, SOFTMAX), refusal="the gate")
    assert (message.word, message.sentence) == ("not judged", "not judged: the gate; -1.4 [-6.3, +3.5], 3 seeds")
    assert message.p is None


def near(mean: float, half: float) -> Interval:
    return Interval(5, mean, mean - half, mean + half, half * 5**0.5 / 2.776)


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [(0.1, 0.5, "supported"), (0.8, 0.5, "undecided"), (2.0, 0.5, "contradicted"), (-2.0, 0.5, "contradicted")],
)
def test_equivalence_needs_the_whole_interval_inside(mean: float, half: float, word: str) -> None:
    assert judge(near(mean, half), within=1.0).word == word


def test_an_amount_counts_at_paper_scale_alone() -> None:
    assert judge(near(0.6, 0.3), by=0.8, scale="desk").word == "supported"
    assert judge(near(0.6, 0.3), by=0.8, scale="paper").word == "undecided"
    assert judge(near(0.4, 0.3), by=0.8, scale="paper").word == "contradicted"


def of_t(mean: float, half: float, degrees: int = 4) -> float:
    """Two-sided p of a mean with a 95 % half-width, from scipy's own distribution."""
    from scipy.stats import t

    return 2 * float(t.sf(abs(mean) / (half / t.ppf(0.975, degrees)), degrees))


def test_a_contradicted_equivalence_has_the_p_of_its_margin() -> None:
    for mean in (5.0, -5.0):
        result = judge(near(mean, 0.1), within=1.0)
        assert result.word == "contradicted"
        assert result.p == pytest.approx(of_t(4.0, 0.1), rel=1e-9)


def test_a_supported_equivalence_has_the_p_of_its_nearer_margin() -> None:
    for mean in (0.1, -0.1):
        assert judge(near(mean, 0.5), within=1.0).p == pytest.approx(of_t(0.9, 0.5), rel=1e-9)
    assert judge(near(1.3, 0.5), within=1.0).p == 1.0


def test_an_amount_is_what_p_and_price_are_about() -> None:
    close = judge(near(0.9, 0.05), by=0.84, scale="paper")
    assert close.word == "supported"
    assert close.p == pytest.approx(of_t(0.06, 0.05), rel=1e-9)
    assert judge(near(0.9, 0.05), by=0.84, scale="desk").p == pytest.approx(of_t(0.9, 0.05), rel=1e-9)
    undecided = judge(near(0.85, 0.3), by=0.8, scale="paper")
    assert undecided.sentence.endswith("about 186 seeds would decide a difference of 0.05 from 0.8")
    assert undecided.needed == seeds_needed(0.3 / 2.7764451 * 5**0.5, 0.05)


def test_an_undecided_equivalence_says_on_which_side_it_would_end() -> None:
    outside, inside = judge(near(1.3, 0.5), within=1.0), judge(near(-0.7, 0.5), within=1.0)
    assert outside.sentence.endswith("about 17 seeds would bring the interval outside +-1")
    assert inside.sentence.endswith("about 17 seeds would bring the interval inside +-1")


def test_a_pooled_interval_brings_its_p_and_price() -> None:
    alone = near(1.0, 2.0)
    table = Pooled(None, 28, 0.5)
    result = judge(alone, pooled=table)
    assert (judge(alone).word, result.word) == ("undecided", "supported")
    assert result.p == pytest.approx(of_t(1.0, 0.5, 28), rel=1e-9)
    sd = 0.5 / 2.0484071 * 5**0.5
    assert judge(near(0.4, 2.0), pooled=table).needed == seeds_needed(sd, 0.4, rows=8)


def test_a_pair_with_more_seeds_than_the_pooled_table_has_a_price() -> None:
    result = judge(near(0.4, 2.0), pooled=Pooled(None, 2, 0.5))  # two rows and three seeds; the pair has five
    assert result.needed == seeds_needed(0.5 / 4.3026527 * 5**0.5, 0.4)


def test_a_refused_pooling_leaves_the_interval_of_the_pair() -> None:
    assert judge(near(1.0, 2.0), pooled=Pooled(None, 0, None, "why")) == judge(near(1.0, 2.0))


@pytest.mark.parametrize("mean", [-1.6, -1.4, -0.6, -0.4, 0.0, 0.4, 0.6, 1.4, 1.6])
def test_p_is_small_exactly_where_a_claim_is_decided(mean: float) -> None:
    for options in ({"within": 1.0}, {"by": 0.0}, {"by": 0.8, "scale": "paper"}):
        result = judge(near(mean, 0.5), **options)
        assert result.p is not None
        assert (result.p < 0.05) == (result.word != "undecided"), options


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]  # 0.03 > 0.05 / 2 stops


def test_sampling_error_by_hand() -> None:
    a, b = np.array([100.0, 100, 0, 0]), np.array([100.0, 0, 0, 0])
    assert sampling_error([a], [b]) == pytest.approx(100 * 0.5 / 2)  # sd of (0, 1, 0, 0) is 0.5
    assert sampling_error([a, a], [b, a]) == pytest.approx(100 * 0.25 / 2)
    assert sampling_error([], [b]) is None


def test_a_verdict_says_whether_it_holds_for_the_task() -> None:
    assert "for the task" in judge(near(1.0, 0.5), sampling=0.1).sentence
    assert "this test set only" in judge(near(1.0, 0.5), sampling=1.0).sentence
