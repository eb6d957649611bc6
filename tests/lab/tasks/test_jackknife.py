"""Jackknife values against means, and against the bootstrap."""

import numpy as np
import pytest

from regard.lab.tasks.jackknife import BLOCKS, jackknife, jackknife_values


def ratio(sums: np.ndarray) -> float:
    return 100 * float(sums[0] / sums[1])


def test_of_a_mean_they_are_the_values() -> None:
    right = np.array([1, 0, 0, 1, 1], float)
    values = jackknife_values(np.stack([right, np.ones(5)], 1), ratio)
    assert values == pytest.approx(100 * right, abs=1e-3)


def test_their_mean_is_near_the_metric_also_in_blocks() -> None:
    rng = np.random.default_rng(0)
    statistics = rng.uniform(0.5, 1.0, (3 * BLOCKS + 7, 2)) * [0.6, 1.0]
    values = jackknife_values(statistics, ratio)
    assert values.mean() == pytest.approx(ratio(statistics.sum(0)), abs=0.05)


def test_their_spread_is_that_of_the_bootstrap() -> None:
    rng = np.random.default_rng(1)
    area = rng.lognormal(0, 1, 150)
    statistics = np.stack([area * rng.uniform(0.2, 1.0, 150), area], 1)
    values = jackknife_values(statistics, ratio)
    bootstrap = [ratio(statistics[rng.integers(0, 150, 150)].sum(0)) for _ in range(2000)]
    assert values.std(ddof=1) / np.sqrt(150) == pytest.approx(np.std(bootstrap), rel=0.15)


@pytest.mark.parametrize("number", [150, 3 * BLOCKS + 7, 5000])
@pytest.mark.parametrize("most", [BLOCKS, BLOCKS // 2])
def test_their_spread_is_that_of_the_samples_also_in_blocks(number: int, most: int) -> None:
    rng = np.random.default_rng(2)
    right = rng.uniform(0, 1, number)
    values = jackknife(number, lambda rows: 100 * float(np.delete(right, rows).mean()), most)
    assert values.std(ddof=1) == pytest.approx(100 * right.std(ddof=1), rel=0.2)


def test_one_sample_has_the_metric_itself() -> None:
    assert jackknife_values(np.array([[1.0, 4.0]]), ratio).tolist() == [25.0]
