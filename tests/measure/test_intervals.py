"""Statistics against tables, by hand, and against scipy's own tests."""

import numpy as np
import pytest

from regard.measure.intervals import holm, interval, paired_interval, pooled_variance, sampling_error, seeds_needed

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


@pytest.mark.parametrize("images", [64, 360, 899, 1798, 10000])
def test_equal_differences_of_counts_have_no_deviation(images: int) -> None:
    """Fractions of images are rounded, so that equal differences of them are not quite equal."""
    for right in np.random.default_rng(images).integers(0, images - 3, (50, 4)).tolist():
        a, b = ({seed: 100 * (n + more) / images for seed, n in enumerate(right)} for more in (3, 0))
        found = paired_interval(a, b)
        assert found.sd == 0
        assert found.low == found.high == found.mean
        assert pooled_variance({"a": a, "b": b}).sd in (0, None)
    assert interval([1.0, 1.0, 1.0 + 1e-8]).sd > 0


def test_paired_differences_use_common_seeds() -> None:
    assert paired_interval({0: 1.0, 1: 5.0, 7: 3.0}, {7: 1.0, 1: 2.0, 9: 0.0}).mean == pytest.approx(2.5)
    assert paired_interval(SKA, SOFTMAX).mean == pytest.approx(3.7667, abs=1e-4)


def test_pooled_half_width_of_the_tables() -> None:
    """With residual sd s, 8 rows and 3 seeds: 1.24 sd_d, where sd_d = s sqrt(2)."""
    x = np.random.default_rng(0).normal(size=(8, 3)) + np.arange(8)[:, None]
    x = x.mean(1, keepdims=True) + (x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True)
    result = pooled_variance({str(i): dict(enumerate(row)) for i, row in enumerate(x.tolist())})
    assert result.degrees == 14
    assert result.half / (result.sd * 2**0.5) == pytest.approx(1.24, abs=0.005)


def test_pooling_is_refused_where_rows_scatter_differently() -> None:
    result = pooled_variance({"a": {0: 0.0, 1: 1.0, 2: 2.0}, "b": {0: 0.0, 1: 3.0, 2: 6.0}})
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


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == [True, False, False, True]  # 0.03 > 0.05 / 2 stops


def test_sampling_error_by_hand() -> None:
    a, b = np.array([100.0, 100, 0, 0]), np.array([100.0, 0, 0, 0])
    assert sampling_error([a], [b]) == pytest.approx(100 * 0.5 / 2)  # sd of (0, 1, 0, 0) is 0.5
    assert sampling_error([a, a], [b, a]) == pytest.approx(100 * 0.25 / 2)
    assert sampling_error([], [b]) is None
