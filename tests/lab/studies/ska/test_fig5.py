"""Figure 5 of the SKA paper: maps of trained networks, as pictures and as numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from photos import decoded
from regard.core import Grid, RegardError, UnsupportedError
from regard.lab.engine.analysis import Source, run_analysis
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis, load_study
from regard.lab.studies.overlays import CELL_PIXELS
from regard.lab.studies.ska.fig5 import _READ, Maps, map_statistics, maps_of, overlays, photographs, queries
from regard.lab.tasks.classification import Classification
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.cska import CSKA
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA
from regard.models.create import create_model
from regard.swapping.swap import swap
from trained_rows import train_rows

DESK = "vit_desk(size=(12, 20), patch=4, dim=32, depth=2, heads=2)"  # 3 rows, 5 columns
FORMER = "skaformer_desk(img_size=(32, 64), mixers=('conv', 'conv', {!r}, 'attn'))"


def build(host, mixer=None):
    torch.manual_seed(0)
    model = create_model(host, mixer).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return model


def test_the_rows_that_are_read_are_those_of_the_studies() -> None:
    """Softmax, SKA and CSKA in the third stage, in this order."""
    for scale in ("smoke", "desk", "paper"):
        rows = {row.label: row.host for row in load_study("ska_table5").rows(scale)}
        for label, kind in zip(_READ["ska_table5"][1], ("attn", "ska", "cska"), strict=True):
            stage = kind if scale != "paper" or kind == "attn" else f"{kind.upper()}(init='paper')"
            assert f"mixers={('conv', 'conv', stage, 'attn')!r}" in rows[label]
    kinds = {row.label: row.mixer for row in load_study("ska_table1").rows("desk")}
    assert [type(kinds[label]) for label in _READ["ska_table1"][1]] == [Softmax, SKA, CSKA]


@pytest.mark.parametrize("kind", ["attn", "ska", "cska"])
def test_only_the_third_stage_is_read_and_the_model_stays(kind: str) -> None:
    model, x = build(FORMER.format(kind)), torch.randn(3, 3, 32, 64)
    before = [type(module) for module in model.modules()]
    maps_by_layer = maps_of(model, x, "stages.2.*")
    assert list(maps_by_layer) == [f"stages.2.blocks.{i}.token_mixer" for i in (0, 1)]
    for maps in maps_by_layer.values():
        assert maps.grid == Grid(2, 4)
        assert maps.weights.shape == (3, 3, 8, 8)
        assert torch.allclose(maps.weights.sum(-1), torch.ones(()), atol=1e-5)
    assert [type(module) for module in model.modules()] == before


def test_maps_are_those_of_the_keys() -> None:
    """Static keys of one layer, by hand: softmax(q K^T / sqrt(d)) of the tokens that enter it."""
    model, x = build(DESK, SKA()), torch.randn(2, 3, 12, 20)
    tokens = model.blocks[0].norm1(model.patch_embed(x) + model.pos_embed)
    mixer = model.blocks[0].attn.mixer
    q = (tokens @ mixer.qkv.weight[:32].mT).unflatten(-1, (2, 16)).transpose(1, 2)
    expected = (q @ mixer.operator.keys.mT / 4).softmax(-1)
    maps = maps_of(model, x)["blocks.0.attn"]
    assert torch.allclose(maps.weights, expected, atol=1e-5)
    assert maps.grid == Grid(3, 5)


def test_attention_that_is_not_plain_softmax_is_refused() -> None:
    """A copy with softmax would have neither the temperature nor the diagonal mask of locality attention."""
    model = build("vit_s_32_spt")
    with pytest.raises(UnsupportedError, match="not plain softmax"):
        maps_of(model, torch.randn(1, 3, 32, 32))


def test_channels_have_no_map() -> None:
    with pytest.raises(UnsupportedError, match="no weights between tokens"):
        maps_of(build(DESK, XCA()), torch.randn(1, 3, 12, 20))


def test_prefix_tokens_are_not_in_the_maps() -> None:
    model = build("vit_tiny_patch16_224(img_size=(32, 48), depth=1)")
    maps = maps_of(swap(model, SKA()), torch.randn(1, 3, 32, 48))["blocks.0.attn"]
    assert maps.weights.shape[-2:] == (6, 6)
    assert 0 < maps.weights.sum(-1).max() < 1


def test_numbers_of_known_maps() -> None:
    grid = Grid(2, 3)
    even = map_statistics(Maps(weights=torch.full((2, 1, 6, 6), 1 / 12), grid=grid))  # the other half on prefix tokens
    assert even.cells == pytest.approx(6)
    assert even.distance == pytest.approx((14 + 8 * math.sqrt(2) + 8 + 4 * math.sqrt(5)) / 36)
    assert (even.by_query, even.by_image) == (pytest.approx(0), pytest.approx(0))
    own = map_statistics(Maps(weights=torch.eye(6).expand(2, 1, 6, 6), grid=grid))
    assert own.cells == pytest.approx(1)
    assert own.distance == pytest.approx(0)
    assert own.by_query == pytest.approx(5 / 6)
    assert own.by_image == pytest.approx(0)
    two = torch.zeros(2, 1, 6, 6)
    two[0, :, :, 0] = two[1, :, :, 5] = 1
    by_content = map_statistics(Maps(weights=two, grid=grid))
    assert (by_content.by_query, by_content.by_image) == (pytest.approx(0), pytest.approx(0.5))


def pixels(drawn: str) -> np.ndarray:
    return decoded(drawn)[CELL_PIXELS // 2 :: CELL_PIXELS, CELL_PIXELS // 2 :: CELL_PIXELS, 3]


def test_overlays_show_the_row_of_the_query() -> None:
    """Head 0 attends to the next cell, head 1 to the last: the mean shows both, on a grid that is not square."""
    grid = Grid(2, 4)
    weights = torch.zeros(1, 2, 8, 8)
    weights[0, 0, torch.arange(8), (torch.arange(8) + 1) % 8] = 1
    weights[0, 1, :, 7] = 1
    drawn = overlays(Maps(weights=weights, grid=grid), 2)
    assert queries(grid) == {"middle": 6, "upper left": 1}
    assert list(drawn) == ["middle, mean of heads", "upper left, mean of heads", "middle, head 0", "middle, head 1"]
    corner = pixels(drawn["upper left, mean of heads"])
    assert corner.shape == (2, 4)
    assert (corner > 0).nonzero()[0].tolist() == [0, 1]
    assert (corner > 0).nonzero()[1].tolist() == [2, 3]
    assert np.flatnonzero(pixels(drawn["middle, head 0"])).tolist() == [7]


def test_colour_networks_are_shown_on_both_photographs(data_root: Path) -> None:
    shown = photographs(Classification(host=DESK, data="imagenette_small", size=(12, 20)))
    assert ["flower.jpg" in shown[0].note, "china.jpg" in shown[1].note] == [True, True]
    assert shown[0].inputs.shape == (1, 3, 12, 20)
    (digit,) = photographs(load_study("ska_table5").setting("smoke").task)
    assert "digit" in digit.note


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """One epoch on 48 digits: two rows of Table 5 and one of Table 1."""
    store = Results(tmp_path_factory.mktemp("runs"))
    train_rows(store, "ska_table5", ("C, C, A, A", "C, C, SKA, A"), 48)
    train_rows(store, "ska_table1", ("SKA a",), 48)
    return Source(store, "smoke")


def test_the_figure_is_computed_from_smoke_runs(source: Source) -> None:
    value = run_analysis(load_analysis("ska_fig5"), source.store, "smoke")
    (sheet,) = value["sheets"]
    rows = [dict(zip(sheet["columns"], row, strict=True)) for row in sheet["rows"]]
    labels = ["C, C, A, A (Table 5)", "C, C, SKA, A (Table 5)", "SKA a (Table 1)"]
    assert [row["network"] for row in rows] == [label for label in labels for _ in range(2)]
    assert [row["depth"] for row in rows] == [1, 2] * 3
    assert [row["cells"] for row in rows] == [4] * 4 + [16] * 2
    assert all(1 <= row["effective cells"] <= row["cells"] for row in rows)
    assert "Not trained yet: C, C, CSKA, A (Table 5)" in sheet["note"]
    assert [picture["title"].rpartition(", ")[0] for picture in value["pictures"]] == [row["network"] for row in rows]
    assert len(value["pictures"][1]["layers"]) == 2 + 3  # the last layer's three heads one by one
    assert len(value["pictures"][0]["layers"]) == 2
    assert all("handwritten digit" in picture["note"] for picture in value["pictures"])


def test_the_rows_that_the_figure_needs_are_named(tmp_path) -> None:
    store = Results(tmp_path)
    train_rows(store, "ska_table5", ("w/o",), 48)
    with pytest.raises(RegardError, match="finished runs of w/o only; the figure needs 'C, C, A, A'"):
        load_analysis("ska_fig5").compute(Source(store, "smoke"))
