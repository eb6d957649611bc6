"""Verdicts of one interval, and what remains of them after correction."""

import numpy as np
import pytest

from regard.lab.statistics.sequential import Differences, Looks, is_decided
from regard.lab.statistics.verdicts import Verdict, claim_p, correct, judge
from regard.measure.intervals import Interval, Pooled, holm, interval, paired_interval, pooled_variance, seeds_needed

SOFTMAX = {0: 88.9, 1: 89.2, 2: 87.8}
SKA = {0: 92.3, 1: 92.7, 2: 92.2}
MITA = {0: 89.1, 1: 85.6, 2: 87.0}


def only(verdict: Verdict) -> Verdict:
    """The verdict where it is that of the study's only claim."""
    return correct([verdict])[0]


def test_p_value_is_that_of_scipys_paired_test() -> None:
    from scipy.stats import ttest_rel

    expected = ttest_rel(list(SKA.values()), list(SOFTMAX.values())).pvalue
    assert judge(paired_interval(SKA, SOFTMAX)).p == pytest.approx(expected, rel=1e-9)


def test_verdicts_of_the_pilot() -> None:
    assert only(judge(paired_interval(SKA, SOFTMAX))).sentence == "supported: +3.8 [+2.4, +5.1], 3 seeds"
    assert only(judge(paired_interval(SOFTMAX, SKA))).sentence == "contradicted: -3.8 [-5.1, -2.4], 3 seeds"
    undecided = only(judge(paired_interval(MITA, SOFTMAX)))
    assert (
        undecided.sentence == "undecided: -1.4 [-6.3, +3.5], 3 seeds; about 18 seeds would decide a difference of 1.4"
    )


def test_one_interval_only_suggests() -> None:
    for a, b, side, sentence in (
        (SKA, SOFTMAX, 1, "suggested: +3.8 [+2.4, +5.1], 3 seeds"),
        (SOFTMAX, SKA, -1, "suggested: the opposite, -3.8 [-5.1, -2.4], 3 seeds"),
    ):
        verdict = judge(paired_interval(a, b))
        assert (verdict.word, verdict.side, verdict.sentence) == ("suggested", side, sentence)


def test_only_what_survives_the_correction_is_supported() -> None:
    """p of 0.0071 is below 0.05 / 7 and above 0.05 / 8."""
    strong, weak = judge(paired_interval(SKA, SOFTMAX)), judge(paired_interval(MITA, SOFTMAX))
    seven, eight = correct([strong] + [weak] * 6), correct([strong] + [weak] * 7)
    assert seven[0].sentence.startswith("supported: ")
    assert seven[0].sentence.endswith("; survives Holm's correction over 7 claims")
    assert (eight[0].word, eight[0].holm, eight[0].side) == ("suggested", False, 1)
    assert eight[0].sentence.endswith("; does not survive Holm's correction over 8 claims")
    against = correct([judge(paired_interval(SOFTMAX, SKA))] + [weak] * 6)[0]
    assert (against.word, against.side) == ("contradicted", -1)


def test_what_is_not_judged_yet_counts_in_the_correction() -> None:
    """Else the rows that are trained first would be judged more mildly than the whole study."""
    strong, unjudged = judge(paired_interval(SKA, SOFTMAX)), judge(paired_interval({0: 1.0}, {0: 0.0}))
    assert (unjudged.word, unjudged.p) == ("not judged", None)
    six, seven = (correct([strong] + [unjudged] * n) for n in (6, 7))
    assert [verdict[0].word for verdict in (six, seven)] == ["supported", "suggested"]
    assert (seven[1], seven[1].holm) == (unjudged, None)


def test_smoke_scale_and_a_closed_gate_judge_nothing() -> None:
    assert judge(paired_interval(SKA, SOFTMAX), scale="smoke").word == "not judged"
    message = judge(paired_interval(MITA, SOFTMAX), refusal="the gate")
    assert (message.word, message.sentence) == ("not judged", "not judged: the gate; -1.4 [-6.3, +3.5], 3 seeds")
    assert message.p is None


def near(mean: float, half: float) -> Interval:
    return Interval(5, mean, mean - half, mean + half, half * 5**0.5 / 2.776)


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [(0.1, 0.5, "supported"), (0.8, 0.5, "undecided"), (2.0, 0.5, "contradicted"), (-2.0, 0.5, "contradicted")],
)
def test_equivalence_needs_the_whole_interval_inside(mean: float, half: float, word: str) -> None:
    assert only(judge(near(mean, half), within=1.0)).word == word


@pytest.mark.parametrize(("value", "within"), [(25.0, None), (-0.5, None), (0.0, 1.0), (4.0, 1.0)])
def test_equal_differences_are_no_certainty(value: float, within: float | None) -> None:
    """Few test images give equal differences by chance, and rows that answer one class always do."""
    verdict = judge(interval([value] * 3), within=within)
    assert (verdict.word, verdict.p, verdict.side) == ("not judged", None, 0)
    assert verdict.sentence.startswith("not judged: all differences are equal")
    same = Differences(
        differences=np.full((1, 3), value), at=np.zeros(1), within=np.array([np.nan if within is None else within])
    )
    assert not is_decided(Looks(), same).any()


@pytest.mark.parametrize(("looks", "printed"), [((3, 5), 0.09), ((3, 5, 8, 12), 0.155)])
def test_looks_at_growing_seeds_cost_what_the_documentation_says(looks: tuple[int, ...], printed: float) -> None:
    """Studies of four claims without any effect that have a verdict at one of the looks, after Holm's correction."""
    noise = np.random.default_rng(0).normal(size=(4000, 4, 12))
    found = np.zeros(4000, bool)
    for n in looks:
        part = noise[..., :n]
        p, _ = claim_p(part.mean(-1), part.std(-1, ddof=1) / np.sqrt(n), n - 1)
        found |= holm(p).any(-1)
    assert found.mean() == pytest.approx(printed, abs=0.015)


def test_an_amount_counts_at_paper_scale_alone() -> None:
    assert only(judge(near(0.6, 0.3), by=0.8, scale="desk")).word == "supported"
    assert judge(near(0.6, 0.3), by=0.8, scale="paper").word == "undecided"
    assert only(judge(near(0.4, 0.3), by=0.8, scale="paper")).word == "contradicted"


def of_t(mean: float, half: float, degrees: int = 4) -> float:
    """Two-sided p of a mean with a 95 % half-width, from scipy's own distribution."""
    from scipy.stats import t

    return 2 * float(t.sf(abs(mean) / (half / t.ppf(0.975, degrees)), degrees))


def test_a_contradicted_equivalence_has_the_p_of_its_margin() -> None:
    for mean in (5.0, -5.0):
        result = only(judge(near(mean, 0.1), within=1.0))
        assert result.word == "contradicted"
        assert result.p == pytest.approx(of_t(4.0, 0.1), rel=1e-9)


def test_a_supported_equivalence_has_the_p_of_its_nearer_margin() -> None:
    for mean in (0.1, -0.1):
        assert judge(near(mean, 0.5), within=1.0).p == pytest.approx(of_t(0.9, 0.5), rel=1e-9)
    assert judge(near(1.3, 0.5), within=1.0).p == pytest.approx(of_t(0.3, 0.5), rel=1e-9)  # of being inside


def test_an_amount_is_what_p_and_price_are_about() -> None:
    close = judge(near(0.9, 0.05), by=0.84, scale="paper")
    assert only(close).word == "supported"
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
    table = Pooled(0.5 / 2.0484071 / (2 / 5) ** 0.5, 28, None)
    result = judge(alone, pooled=table)
    assert (judge(alone).word, result.word) == ("undecided", "suggested")
    assert result.p == pytest.approx(of_t(1.0, 0.5, 28), rel=1e-6)
    sd = 0.5 / 2.0484071 * 5**0.5
    assert judge(near(0.4, 2.0), pooled=table).needed == seeds_needed(sd, 0.4, rows=8)


def test_a_pair_with_more_seeds_than_the_pooled_table_has_a_price() -> None:
    sd = 0.5 / 4.3026527 / (2 / 5) ** 0.5
    result = judge(near(0.4, 2.0), pooled=Pooled(sd, 2, 9.9))  # two rows and three seeds; the pair has five
    assert result.interval.half == pytest.approx(0.5)
    assert result.needed == seeds_needed(0.5 / 4.3026527 * 5**0.5, 0.4)


@pytest.mark.parametrize(("tables", "error"), [(300, 0.04), pytest.param(4000, 0.02, marks=pytest.mark.slow)])
def test_a_pair_with_fewer_seeds_than_the_pooled_table_has_a_wider_interval(tables: int, error: float) -> None:
    """Two rows of eight seeds tell the spread, and three pairs the difference: 5 % of true nulls are decided.

    error: three standard deviations of the share, or more.
    """
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(tables):
        rows = {row: dict(enumerate(rng.standard_normal(8).tolist())) for row in "abcd"}
        table = pooled_variance(rows)
        pair = interval([rows["a"][seed] - rows["b"][seed] for seed in range(3)])
        decided += judge(pair, pooled=table).word == "suggested"
    assert abs(decided / tables - 0.05) < error


def test_a_refused_pooling_leaves_the_interval_of_the_pair() -> None:
    assert judge(near(1.0, 2.0), pooled=Pooled(None, 0, None, "why")) == judge(near(1.0, 2.0))


@pytest.mark.parametrize("mean", [-1.6, -1.4, -0.6, -0.4, 0.0, 0.4, 0.6, 1.4, 1.6])
def test_p_is_small_exactly_where_a_claim_is_decided(mean: float) -> None:
    for options in ({"within": 1.0}, {"by": 0.0}, {"by": 0.8, "scale": "paper"}):
        result = judge(near(mean, 0.5), **options)
        assert (result.p < 0.05) == (result.word != "undecided"), options


def test_a_verdict_says_whether_it_holds_for_the_task() -> None:
    assert "for the task" in judge(near(1.0, 0.5), sampling=0.1).sentence
    assert "this test set only" in judge(near(1.0, 0.5), sampling=1.0).sentence
