"""Several experts of each query: as many keys in all rows, and the runs of the other studies."""

import pytest

from regard.core import Grid, Site
from regard.lab.studies import load_study
from regard.mixers.mita.mita import MiTA

STUDY = load_study("mita_experts")


@pytest.mark.parametrize("scale", ["smoke", "desk", "paper"])
def test_every_query_attends_to_as_many_keys_at_the_same_cost(scale: str) -> None:
    mixers = [row.mixer for row in STUDY.rows(scale) if isinstance(row.mixer, MiTA)]
    assert [mixer.experts for mixer in mixers] == [1, 2, 4]
    site = Site(dim=64, heads=2, grid=Grid(12, 12))
    assert len({(mixer.m, mixer.k * mixer.experts, mixer.cost(site)) for mixer in mixers}) == 1
