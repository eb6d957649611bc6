"""Pictures of the four factors, of taps and of kernels, read from trained runs."""

import math
from pathlib import Path

import pytest
import torch

from photos import decoded
from regard.cli.app import run
from regard.core import Grid
from regard.explain.factor_terms import TermMaps
from regard.lab.engine.analysis import run_analysis
from regard.lab.report import write_analyses
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis, load_study
from regard.lab.studies.esa.fig1 import PARTS, queries, term_statistics
from trained_rows import train_rows


def test_rows_of_the_figure_are_rows_of_their_studies() -> None:
    for part in PARTS:
        for scale in ("smoke", "desk", "paper"):
            assert set(part.rows) <= {row.label for row in load_study(part.study).rows(scale)}


def test_queries_are_spread_evenly() -> None:
    assert queries(Grid(6, 9), 3) == [(row, column) for row in (1, 3, 5) for column in (1, 4, 7)]
    assert queries(Grid(1, 2), 3) == [(0, 0), (0, 1)]


def maps(logits: dict[str, torch.Tensor], hidden: int = -1) -> TermMaps:
    """One head, from the first of 1 x 4 cells."""
    bias = torch.zeros(1, 4, dtype=torch.float64)
    if hidden >= 0:
        bias[0, hidden] = -torch.inf
    values = {name: value.double()[None] for name, value in logits.items()}
    return TermMaps(layer="", grid=Grid(1, 4), keys=Grid(1, 4), cell=(0, 0), logits=values, bias=bias)


def test_term_statistics_of_known_logits() -> None:
    far = torch.tensor([-1000.0, -1000.0, -1000.0, 0.0])
    values = term_statistics(maps({"E3": torch.zeros(4), "E4": far}))
    assert values["E3"] == pytest.approx((0.0, 4.0, 1.5))
    assert values["E4"] == pytest.approx((1000 * math.sqrt(3) / 4, 1.0, 3.0))
    assert values["all"] == pytest.approx(values["E4"])


def test_hidden_keys_do_not_count() -> None:
    values = term_statistics(maps({"E3": torch.tensor([1.0, 1.0, 1.0, 50.0])}, hidden=3))
    assert values["E3"] == pytest.approx((0.0, 3.0, 1.0))
    assert values["all"] == pytest.approx((0.0, 3.0, 1.0))


def test_terms_alone_are_drawn_where_only_their_study_has_runs(tmp_path: Path) -> None:
    store = Results(tmp_path)
    train_rows(store, "esa_fig3", ("1111",))
    value = run_analysis(load_analysis("esa_fig1"), store, "smoke")
    overview, terms = value["sheets"]
    assert [row[-1] for row in overview["rows"]] == ["drawn", *["no finished run"] * 3]
    assert [row[:2] for row in terms["rows"]] == [
        (f"blocks.{layer}.attn", term) for layer in (0, 1) for term in ("E1", "E2", "E3", "E4", "all")
    ]
    assert all(1 <= row[4] <= row[6] == 36 for row in terms["rows"])
    assert len(value["pictures"]) == 2
    for picture in value["pictures"]:
        assert [name.partition(":")[0] for name in picture["layers"]] == ["E1", "E2", "E3", "E4", "all"]
        assert "scikit-learn" in picture["note"]


@pytest.mark.slow
def test_all_four_are_drawn_and_reach_the_page(tmp_path: Path) -> None:
    for name, label in (("esa_fig3", "1111"), ("esa_table2", "w/o + deformable"), ("esa_table3", "dynamic 7x7")):
        train_rows(Results(tmp_path), name, (label,))
    assert run(["study", "run", "esa_fig1", "--scale", "smoke", "--results", str(tmp_path)]) == 0
    value = run_analysis(load_analysis("esa_fig1"), Results(tmp_path), "smoke")
    assert [row[-1] for row in value["sheets"][0]["rows"]] == ["drawn", "drawn instead", "no finished run", "drawn"]
    assert [sheet["title"] for sheet in value["sheets"][1:]] == [
        "Terms of 1111 (esa_fig3)",
        "Taps of w/o + deformable (esa_table2)",
        "Kernels of dynamic 7x7 (esa_table3)",
    ]
    for sheet, cells in zip(value["sheets"][2:], (36, 49), strict=True):
        assert [row[0].partition(".")[0] for row in sheet["rows"]] == ["layer2", "layer2", "layer3", "layer3"]
        assert sheet["rows"][0][-1] == cells
    assert len(value["pictures"]) == 4
    assert all(decoded(picture["image"]).size for picture in value["pictures"])
    (page,) = write_analyses(tmp_path, tmp_path / "html", "esa_fig1")
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2 * (1 + 5 * 2) + 2
    assert "Taps of w/o + deformable" in text
