"""Advice: exact counts over all layers, refusals with reasons, and a front that nothing beats."""

import json

import pytest

from regard.advice.advise import Advice, _beats, advise, attention_places
from regard.cli.app import run as command
from regard.core import Grid, MixerConfig
from regard.measure.cost import model_cost
from regard.mixers.factors.factors import Factors
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA

HOST = "vit_desk(size=(16, 24), patch=4, dim=16, depth=3, heads=2)"
SWIN = "swin_tiny_patch4_window7_224(img_size=(32, 64), window_size=4, depths=(2, 1), embed_dim=8, num_heads=(2, 4))"
CVT = "cvt_13_32(img_size=(16, 24), dims=(8, 12, 24))"


def test_the_sites_are_those_of_the_host() -> None:
    ((place, number),) = attention_places(HOST).items()
    site = place.site
    assert (number, place.windows) == (3, 1)
    assert (site.dim, site.heads, site.grid.height, site.grid.width) == (16, 2, 4, 6)
    ((larger, _),) = attention_places("deit_tiny_patch16_224", (64, 32)).items()
    assert (larger.site.grid, larger.site.dim) == (Grid(4, 2, 1), 192)
    swin = {(place.site.dim, place.windows): number for place, number in attention_places(SWIN).items()}
    assert swin == {(8, 8): 2, (16, 2): 1}


@pytest.mark.parametrize(
    ("host", "configs"), [(HOST, (SKA(), XCA())), (SWIN, (Factors(terms="0110"),)), (CVT, (SKA(),))]
)
def test_counts_are_those_of_the_whole_model(host: str, configs: tuple[MixerConfig, ...]) -> None:
    found = {one.mixer: one for one in advise(host, configs, seconds=0.001, batch=1)}
    for config in configs:
        one, other = (model_cost(host, mixer) for mixer in (config, Softmax()))
        mine, soft = found[spell(config)], found["Softmax()"]
        assert (mine.params or 0) - (soft.params or 0) == one.params - other.params
        assert (mine.macs or 0) - (soft.macs or 0) == one.macs - other.macs
        assert mine.ratio == pytest.approx((mine.both or 0) / (soft.both or 1))
    assert found["Softmax()"].ratio == 1
    ((place, number), *_) = attention_places(HOST).items()
    assert advise(HOST, [], seconds=0.001, batch=1)[0].macs == number * Softmax().cost(place.site).macs


def test_what_a_swap_refuses_is_not_ranked_and_heads_of_any_width_are_timed() -> None:
    for host, config, reason in (
        (SWIN, XCA(), "passes a bias mask"),
        ("cait_s_32(heads=5, width=6)", MiTA(m=4, k=4), "mixes its heads"),
        (CVT, XCA(), "kv_stride=1"),
    ):
        good, bad = advise(host, [config], seconds=0.001, batch=1)
        assert (good.mixer, bad.mixer) == ("Softmax()", spell(config))
        assert reason in bad.refused


def test_what_cannot_stand_there_is_refused_with_a_reason() -> None:
    *good, bad = advise(HOST, [MiTA(m=4, k=100)], seconds=0.001, batch=1)
    assert [one.mixer for one in good] == ["Softmax()"]
    assert bad.refused
    assert bad.params is None


def test_masks_and_other_sizes_are_told() -> None:
    found = {one.mixer: one for one in advise(HOST, [XCA(), Factors(terms="0110")], seconds=0.001, batch=1)}
    assert found["Softmax()"].masks == tuple(sorted(Softmax().masks))
    assert found["XCA()"].masks == tuple(sorted(XCA().masks))
    assert found["Softmax()"].other_grid is True


def test_the_front_is_what_nothing_beats() -> None:
    def row(params: int, macs: int, both: float) -> Advice:
        return Advice(mixer="x", params=params, macs=macs, both=both)

    assert _beats(row(1, 1, 1.0), row(1, 2, 1.0))
    assert not _beats(row(1, 1, 1.0), row(1, 1, 1.0))
    assert not _beats(row(1, 2, 1.0), row(2, 1, 1.0))
    found = advise(HOST, [SKA(), XCA(), Factors(terms="0000")], seconds=0.001, batch=1)
    assert any(one.pareto for one in found)
    assert all(one.pareto != any(_beats(other, one) for other in found) for one in found)
    assert [one.both for one in found] == sorted(one.both or 0 for one in found)


def test_the_verb_prints_a_row_a_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["advise", HOST, "--mixers", "SKA; XCA()", "--seconds", "0.001", "--json"]) == 0
    assert {row["mixer"] for row in json.loads(capsys.readouterr().out)} == {"Softmax()", "SKA()", "XCA()"}
    assert command(["advise", HOST, "--mixers", "SKA", "--seconds", "0.001"]) == 0
    shown = capsys.readouterr()
    assert f"attention layers of {HOST}: 3 with 16 channels, 2 heads on 4x6" in shown.out
    assert shown.err == "timing 3 with 16 channels, 2 heads on 4x6\n"
    assert command(["advise", HOST, "--mixers", "None"]) == 2
    assert command(["advise", "resnet18", "--mixers", "SKA"]) == 2
