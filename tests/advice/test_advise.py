"""Advice: exact counts over all layers, refusals with reasons, and a Pareto front."""

import json
from collections import Counter

import pytest

from regard.advice.advise import Advice, AttentionKind, _count, _dominates, advise
from regard.cli.app import run as command
from regard.core import Grid, MixerConfig
from regard.measure.cost import model_cost
from regard.mixers.factors.factors import Factors
from regard.mixers.mhla import MHLA
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.ska import SKA
from regard.mixers.topk.topk import TopK
from regard.mixers.xca import XCA

from .models import SWIN

HOST = "vit_desk(size=(16, 24), patch=4, dim=16, depth=2, heads=2)"
CVT = "cvt_13_32(img_size=(16, 24), dims=(8, 12, 24))"


def attention_kinds(host: str, size: tuple[int, int] | None = None) -> dict[AttentionKind, int]:
    """The different attention layers of a model and the number of each."""
    return Counter(kind for _, kind in _count(host, [], size, ()).layers.values())


def test_the_sites_are_those_of_the_host() -> None:
    ((kind, number),) = attention_kinds(HOST).items()
    site = kind.site
    assert (number, kind.windows) == (2, 1)
    assert (site.dim, site.heads, site.grid.height, site.grid.width) == (16, 2, 4, 6)
    ((larger, _),) = attention_kinds("deit_tiny_patch16_224(depth=2)", (64, 32)).items()
    assert (larger.site.grid, larger.site.dim) == (Grid(4, 2, 1), 192)
    swin = {(kind.site.dim, kind.windows): number for kind, number in attention_kinds(SWIN).items()}
    assert swin == {(8, 8): 2, (16, 2): 1}


@pytest.mark.parametrize(
    ("host", "configs"),
    [
        (HOST, (SKA(), XCA())),
        pytest.param(SWIN, (Factors(terms="0110"),), marks=pytest.mark.slow),
        pytest.param(CVT, (SKA(),), marks=pytest.mark.slow),
    ],
)
def test_counts_are_those_of_the_whole_model(host: str, configs: tuple[MixerConfig, ...]) -> None:
    rows = {row.mixer: row for row in advise(host, configs, seconds=0.001, batch=1)}
    for config in configs:
        row, other = (model_cost(host, mixer) for mixer in (config, Softmax()))
        mine, soft = rows[spell(config)], rows["Softmax()"]
        assert (mine.params or 0) - (soft.params or 0) == row.params - other.params
        assert (mine.macs or 0) - (soft.macs or 0) == row.macs - other.macs
        assert mine.ratio == pytest.approx((mine.both or 0) / (soft.both or 1))
    assert rows["Softmax()"].ratio == 1
    ((kind, number), *_) = attention_kinds(HOST).items()
    assert advise(HOST, [], seconds=0.001, batch=1)[0].macs == number * Softmax().cost(kind.site).macs


@pytest.mark.slow
def test_what_a_swap_refuses_is_not_ranked_and_heads_of_any_width_are_timed() -> None:
    for host, config, reason in (
        (SWIN, XCA(), "passes a bias mask"),
        ("cait_s_32(heads=5, width=6)", MiTA(m=4, k=4), "mixes its heads"),
        (CVT, XCA(), "kv_stride=1"),
    ):
        good, bad = advise(host, [config], seconds=0.001, batch=1)
        assert (good.mixer, bad.mixer) == ("Softmax()", spell(config))
        assert reason in bad.refused


def test_a_mechanism_that_does_not_fit_the_grid_is_refused_with_a_reason() -> None:
    *good, bad = advise(HOST, [MiTA(m=4, k=100)], seconds=0.001, batch=1)
    assert [row.mixer for row in good] == ["Softmax()"]
    assert bad.refused
    assert bad.params is None


@pytest.fixture(scope="module")
def rows() -> list[Advice]:
    return advise(HOST, [SKA(), XCA(), Factors(terms="0110")], seconds=0.001, batch=1)


def test_masks_and_other_image_sizes_are_reported(rows: list[Advice]) -> None:
    masks = {row.mixer: row.masks for row in rows}
    assert masks["Softmax()"] == tuple(sorted(Softmax().masks))
    assert masks["XCA()"] == tuple(sorted(XCA().masks))
    assert [row.other_grid for row in rows if row.mixer == "Softmax()"] == [True]


def test_images_may_have_another_size_than_the_hosts_own() -> None:
    """Twice the sides: four times the patch tokens, and a class token before them."""
    host = "deit_tiny_patch16_224(depth=1, embed_dim=24, num_heads=2, img_size=(32, 48))"
    configs = [MHLA(m=4), SKA(), MiTA(m=4, k=4)]
    rows = advise(host, configs, size=(64, 96), seconds=0.001, batch=1)
    assert not [row.refused for row in rows if row.refused]
    macs, soft = {row.mixer: row.macs or 0 for row in rows}, model_cost(host, Softmax(), (64, 96)).macs
    for config in configs:
        assert macs[spell(config)] - macs["Softmax()"] == model_cost(host, config, (64, 96)).macs - soft
    ((kind, _),) = attention_kinds(host, (64, 96)).items()
    assert kind.site.grid == Grid(4, 6, 1)


def test_the_pareto_front_is_what_nothing_dominates(rows: list[Advice]) -> None:
    def row(params: int, macs: int, both: float) -> Advice:
        return Advice(mixer="x", params=params, macs=macs, both=both)

    assert _dominates(row(1, 1, 1.0), row(1, 2, 1.0))
    assert not _dominates(row(1, 1, 1.0), row(1, 1, 1.0))
    assert not _dominates(row(1, 2, 1.0), row(2, 1, 1.0))
    assert any(row.pareto for row in rows)
    assert all(row.pareto != any(_dominates(other, row) for other in rows) for row in rows)
    assert [row.both for row in rows] == sorted(row.both or 0 for row in rows)


def test_the_verb_prints_a_row_a_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["advise", HOST, "--mixers", "SKA; XCA()", "--seconds", "0.001", "--json"]) == 0
    assert {row["mixer"] for row in json.loads(capsys.readouterr().out)} == {"Softmax()", "SKA()", "XCA()"}
    assert command(["advise", HOST, "--mixers", "SKA", "--seconds", "0.001"]) == 0
    shown = capsys.readouterr()
    assert f"attention layers of {HOST}: 2 with 16 channels, 2 heads on 4x6" in shown.out
    assert shown.err.startswith("timing 2 with 16 channels, 2 heads on 4x6")
    assert command(["advise", HOST, "--mixers", "SKA; None"]) == 2
    assert "None removes attention, so that without --data there is nothing to time" in capsys.readouterr().err
    assert command(["advise", "resnet18", "--mixers", "SKA"]) == 2


@pytest.mark.parametrize(
    ("host", "masks"),
    [
        ("maxvit_pico_rw_256(img_size=64, depths=(1,), embed_dim=(32,), stem_width=8)", {"bias"}),
        ("swinv2_tiny_window8_256(img_size=32, window_size=4, depths=(2,), embed_dim=8, num_heads=(2,))", {"bias"}),
    ],
)
def test_hosts_whose_biases_a_port_copies_are_timed(host: str, masks: set[str]) -> None:
    assert all(kind.masks == masks for kind in attention_kinds(host))
    rows = advise(host, [TopK(k=4)], batch=1, seconds=0.001)
    assert len(rows) == 2
    assert all(row.both for row in rows)


TINY_VIT = "tiny_vit_5m_224(embed_dims=(8, 16, 32), depths=(1, 1, 1), num_heads=(1, 2, 4), window_sizes=(4, 4, 3))"


@pytest.mark.slow
def test_layers_that_keep_modules_of_the_host_are_timed_on_what_they_get() -> None:
    kinds = attention_kinds(TINY_VIT)
    assert all(kind.weights for kind in kinds)
    rows = {row.mixer: row for row in advise(TINY_VIT, [TopK(k=2), SKA()], seconds=0.001, batch=2)}
    for mixer in ("Softmax()", "TopK(k=2)", "SKA()"):
        assert 0 < (rows[mixer].forward or 0) < (rows[mixer].both or 0)
        assert rows[mixer].other_grid is None
    difference = model_cost(TINY_VIT, TopK(k=2)).macs - model_cost(TINY_VIT, Softmax()).macs
    assert (rows["TopK(k=2)"].macs or 0) - (rows["Softmax()"].macs or 0) == difference
