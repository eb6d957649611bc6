"""The taxonomy: MiTA's Table 1 taken on to every mechanism, its filters and its picture."""

import itertools
from pathlib import Path

import pytest

from command_line import answer, refused
from regard import MIXERS, Factors
from regard.cli.app import run
from regard.measure.taxonomy import picture, taxonomy_rows, write_picture

# MiTA, Table 1: strategy, number of experts, construction, topology
PRINTED = {
    "Softmax": ("none", "1", "identity", "all-to-one"),
    "Linear": ("compress", "1", "kernelisation", "all-to-one"),
    "MHLA": ("compress", "m", "local prior + kernelisation", "m x (N/m)-to-one"),
    "Linformer": ("compress", "1", "learned projection", "all-to-one"),
    "Nystrom": ("compress", "1", "landmark probing", "all-to-one"),
    "Agent": ("compress", "1", "landmark probing", "all-to-one"),
    "ViT3": ("compress", "1", "test-time training", "all-to-one"),
    "DeformableConv": ("route", "N", "offset prediction", "N x one-to-one"),
    "DAT": ("route", "1", "offset prediction", "N-to-one"),
    "Window": ("route", "N / w^2", "locality prior", "N/w^2 x w^2-to-one"),
    "BRA": ("route", "N / n", "locality prior", "N/n-to-N/n"),
    "MoBA": ("route", "N / n", "locality prior", "N-to-N/n"),
    "NSA": ("both", "N / n (+1)", "locality prior", "N-to-N/n"),
    "TopK": ("route", "N", "light skim", "N x one-to-one"),
    "MiTA": ("both", "m (+1)", "landmark probing", "N-to-m"),
}
ROWS = {row["mechanism"]: row for row in taxonomy_rows()}


@pytest.mark.parametrize("name", PRINTED)
def test_rows_of_the_printed_table(name: str) -> None:
    row = ROWS[name]
    assert (row["strategy"], row["number"], row["construction"], row["topology"]) == PRINTED[name]


@pytest.mark.parametrize("name", [cls.__name__ for cls in MIXERS])
def test_every_card_fills_the_five_dimensions(name: str) -> None:
    row = ROWS[name]
    assert all(row[column] for column in ("strategy", "experts", "number", "construction", "topology"))
    conditions = [part for part in row["conditions"].split(", ") if part]
    assert conditions == [part for part in ("Q", "K", "V", "position") if part in conditions]
    assert bool(conditions) == (row["strategy"] != "none")


def test_what_picks_among_experts_is_discrete_or_a_place() -> None:
    for row in ROWS.values():
        if row["discrete"]:
            assert row["strategy"] in ("route", "both")


def test_factors_in_a_window_route_by_place() -> None:
    (row,) = taxonomy_rows([Factors(window=3)])
    assert (row["strategy"], row["number"], row["conditions"]) == ("route", "N", "position")


def filtered(capsys: pytest.CaptureFixture[str], *options: str) -> set[str]:
    return {row["mechanism"] for row in answer(capsys, "taxonomy", *options)}


def test_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert filtered(capsys, "--strategy", "both") == {"MiTA", "NSA"}
    assert filtered(capsys, "--conditions", "position,q", "--strategy", "route") == {"BRA", "MoBA", "DynamicConv"}


def test_labels_of_the_picture_do_not_overlap_and_lie_inside() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = picture(taxonomy_rows())
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in axes.texts]
    assert set(ROWS) <= {text for text, _ in boxes}
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), f"{one!r} lies over {other!r}"
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text  # noqa: PT018


def test_the_picture_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["taxonomy", "--svg", str(tmp_path / "a.svg")]) == 0
    assert f"drawn in {tmp_path / 'a.svg'}" in capsys.readouterr().out
    write_picture(taxonomy_rows(), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    refused(capsys, ["taxonomy", "--svg", str(tmp_path / "no" / "a.svg")], "cannot write", code=1)
