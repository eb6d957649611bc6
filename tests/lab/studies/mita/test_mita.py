"""The MiTA paper's tables and figures: rows, exact counts, what is read from trained networks, and speed."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from photos import decoded
from regard.core import DataError, Grid, UnsupportedError
from regard.images.normalise import is_pretrained
from regard.lab.engine.analysis import Source, run_analysis
from regard.lab.engine.dry_run import dry_run
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis, load_study
from regard.lab.studies.focus_vit.network import focus_backbone
from regard.lab.studies.mita.counts import library_sheet, printed_sheet
from regard.lab.studies.mita.expert_choices import Choice, choices
from regard.lab.studies.mita.fig5 import _MECHANISMS, SIDES, throughput
from regard.lab.studies.mita.printed import PUBLISHED, SMALL, TINY
from regard.lab.studies.mita.table1 import NAMED
from regard.lab.studies.mita.table2 import STUDY
from regard.lab.studies.mita.trained_figures import (
    _window,
    accuracies_at,
    boundaries,
    exchange,
    keys_of,
    middle,
    outlines,
    overlap,
    queries_of,
)
from regard.lab.studies.overlays import CELL_PIXELS, overlay
from regard.lab.studies.published_sizes import gigaflops
from regard.lab.train.run import Run
from regard.mixers import MIXERS
from regard.mixers.mita.mita import MiTA
from regard.mixers.mita.routing import MitaPlan
from regard.mixers.shared.landmarks import landmark_windows
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse
from regard.models.create import create_model
from trained_rows import train_rows

ROWS = {row.label: row for row in STUDY.rows("paper")}


def small_model(mixer, **options):
    torch.manual_seed(0)
    model = create_model("vit_desk(size=12, patch=2, dim=32, depth=2, heads=2)", mixer, **options)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.2)
    return model.eval()


# Table 2


def test_committed_rows_keep_their_keys() -> None:
    expected = {
        "smoke": {"Softmax": "6de51372e985", "MiTA": "4c8e35776a97", "MiTA + DWC": "292512955c67",
                  "w/o": "ff4ea19aa253", "0000": "0acdef4a8928"},
        "desk": {"Softmax": "20bd1def00a4", "MiTA": "ad19cde3243c", "MiTA + DWC": "621e3361c7a4",
                 "w/o": "270e2a2ca214", "0000": "0a04a7f144e3"},
    }  # fmt: skip
    for scale, keys in expected.items():
        runs = {row.label: run.key for row, run in STUDY.runs(scale, seeds=1)}
        assert list(runs.items())[:5] == list(keys.items())
        assert len(runs) == 12


# counts


def test_fact_section6_counts() -> None:
    """Exact parameters, and GMACs to two digits, of the rows of Tables 2 and 3 (InLine with its convolution)."""
    expected = {
        "DeiT-T": (5_717_416, 1.25), "Linear-T": (5_715_112, 1.13), "PolaFormer-T": (5_722_024, 1.19),
        "MHLA-T": (5_736_232, 1.51), "FLatten-T": (6_173_608, 1.13), "Agent-T": (5_717_416, 1.16),
        "Agent-T, bias": (5_992_600, 1.17), "MiTA-T": (5_717_416, 1.14), "MiTA-T, DWC": (5_740_456, 1.15),
        "DeiT-S": (22_050_664, 4.60), "Agent-S": (22_050_664, 4.42), "Agent-S, bias": (22_601_032, 4.43),
        "MiTA-S": (22_050_664, 4.38), "MiTA-S, DWC": (22_096_744, 4.39), "MiTA-S, DWC, gate": (23_870_824, 4.73),
        "ViT-5-S": (22_039_144, 4.70), "InLine-S": (16_734_760, 4.96), "Agent-S, bias, DWC": (22_647_112, 4.44),
        "MHLA-S, DWC": (22_205_032, 5.77), "MiTA-ViT-5-S": (22_039_144, 4.47), "MiTA-ViT-5-S, DWC": (22_085_224, 4.48),
    }  # fmt: skip
    counts = {row.label: row.body.count(row.mixer) for row in PUBLISHED.values() if row.mixer is not None}
    assert {label: count[0] for label, count in counts.items() if label in expected} == {
        label: params for label, (params, _) in expected.items()
    }
    for label in ("Linear", "PolaFormer", "MHLA", "FLatten", "Agent"):
        assert counts[f"{label}-T"][0] == ROWS[label].exact["params"]
    for label, (_, work) in expected.items():
        assert counts[label][1] / 1e9 == pytest.approx(work, abs=0.0051), label


def test_fact_section6_what_is_not_reproduced() -> None:
    sheet = printed_sheet()
    rows = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    assert [row["row"] for row in rows if row["verdict"] == "not reproduced"] == [
        "MiTA-S, DWC, gate", "Sparsifiner-S"
    ]  # fmt: skip
    assert [row["row"] for row in rows if row["verdict on G"] == "not reproduced"] == [
        "MHLA-T", "Sparsifiner-S", "MHLA-S, DWC"
    ]  # fmt: skip
    assert [row["row"] for row in rows if row["verdict"] == "cut off"] == ["FLatten-T"]
    assert {row["row"] for row in rows if row["verdict"] == "cited"} == {"SViTE-S"}
    assert sheet.note.startswith("Of 24 rows, the parameters of 22 and the MACs of 21")


def test_a_built_deit_has_the_counted_parameters_and_work() -> None:
    with torch.device("meta"):
        model = create_model("deit_tiny_patch16_224", Softmax())
    assert (sum(value.numel() for value in model.parameters()), round(gigaflops(model) * 5e8)) == TINY.count(Softmax())


def test_every_mechanism_of_the_library_is_counted() -> None:
    sheet = library_sheet()
    assert len(sheet.rows) == len(MIXERS)
    assert all(isinstance(cell, int) and cell > 0 for row in sheet.rows for cell in row[2:6])
    assert {row[1]: row[2:6] for row in sheet.rows}["MiTA()"] == (*TINY.count(MiTA()), *SMALL.count(MiTA()))


# Tables 6 and 7


def test_fact_table6_published_numbers_that_no_claim_confirms() -> None:
    rows = {row.label: row for row in load_study("mita_table6").rows("paper") if not row.control}
    for label, top1 in (("m 16, k 16", 70.0), ("m 36, k 25", 71.2), ("m 36, k 36", 71.7)):
        assert rows[label].paper["top1"] == top1
    assert rows["route only"].mixer == MiTA(m=25, k=50, branches="route")
    assert rows["m 25, k 36"].mixer == MiTA(m=25, k=36)


def test_fact_table7_published_numbers() -> None:
    rows = load_study("mita_table7").rows("paper")
    top1 = {row.label: row.paper["top1"] for row in rows}
    printed = {"Softmax": (76.9, 81.2, 84.4, 85.9), "Linear": (73.2, 78.6, 79.8, 80.7),
               "Agent 49": (74.6, 79.7, 81.4, 83.5), "Agent 64": (74.7, 79.9, 81.5, 83.8),
               "MiTA": (75.6, 80.9, 82.8, 85.5)}  # fmt: skip
    for label, values in printed.items():
        assert [top1[label], *(top1[f"{label}, {size}"] for size in "SBL")] == list(values)
    assert len(rows) == 20
    assert all("augreg_in21k(pretrained=True)" in row.host for row in rows)


def test_table7_starts_from_one_network_with_softmax() -> None:
    runs = {row.label: run for row, run in load_study("mita_table7").runs("smoke", seeds=1)}
    starts = {run.start.key for run in runs.values() if isinstance(run.start, Run)}
    assert len(starts) == 1
    (start,) = {run.start.mixer for run in runs.values() if isinstance(run.start, Run)}
    assert start == Softmax()
    assert [label for label, run in runs.items() if run.start is None] == ["MiTA from nothing"]
    assert runs["MiTA"].start.task.data != runs["MiTA"].task.data  # type: ignore[union-attr]
    assert runs["MiTA"].mixer == runs["MiTA from nothing"].mixer


def test_table7_at_desk_scale_starts_from_a_real_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, agents, m and k are the paper's; only a run needs the weights, a dry run does not."""
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    study = load_study("mita_table7")
    runs = {row.label: run for row, run in study.runs("desk", seeds=1)}
    mixers = {row.label: row.mixer for row in study.rows("paper")}
    assert all(runs[label].mixer == mixers[label] for label in ("Softmax", "Linear", "Agent 49", "Agent 64", "MiTA"))
    assert [label for label, run in runs.items() if not is_pretrained(run.task.host)] == ["MiTA from nothing"]
    (line,) = dry_run(study, "desk", "MiTA")
    assert (line.error, line.params) == ("", sum(p.numel() for p in focus_backbone(num_classes=10).parameters())
                                         - (37**2 - 14**2) * 384)  # fmt: skip
    with pytest.raises(DataError, match="the weights of focus_vit are not in"):
        runs["MiTA"].task.build(runs["MiTA"].mixer, 10, 3)


@pytest.mark.slow
def test_a_dry_run_of_pretrained_hosts_fetches_nothing() -> None:
    (row,) = dry_run(load_study("mita_table7"), "paper", "MiTA")
    assert (row.error, row.params) == ("", 5_717_416)


# choices of experts


def test_choices_are_those_of_the_forward_pass() -> None:
    model = small_model(MiTA(m=4, k=5))
    x = torch.randn(3, 3, 12, 12)
    layers = choices(model, x)
    assert list(layers) == ["blocks.0.attn", "blocks.1.attn"]
    choice = layers["blocks.0.attn"]
    mixer = model.blocks[0].attn.mixer  # type: ignore[union-attr, index]
    tokens = model.blocks[0].norm1(model.patch_embed(x) + model.pos_embed)  # type: ignore[operator, union-attr, index]
    q = mixer.project_heads(tokens, Grid(6, 6), None)["q"]
    landmarks = q.unflatten(2, (2, 3, 2, 3)).mean((3, 5)).flatten(2, 3)
    torch.testing.assert_close(choice.plan.experts[..., 0], (q @ landmarks.mT).argmax(-1))
    assert (keys_of(choice).sum(-1) == 5).all()
    assert (queries_of(choice).sum(2) == 1).all()


def test_a_network_without_mita_has_no_choices() -> None:
    with pytest.raises(UnsupportedError, match="no layer with MiTA"):
        choices(small_model(Softmax()), torch.randn(1, 3, 12, 12))


def choice_of(keys: list[int], queries: list[int], grid: Grid) -> Choice:
    """Expert 0 of two gathers `keys`; the tokens `queries` are routed to it."""
    experts = torch.ones(1, 1, grid.tokens, 1, dtype=torch.long)
    experts[0, 0, queries] = 0
    return Choice(plan=MitaPlan(torch.tensor([[keys, keys]])[None], experts), grid=grid)


def test_prefix_tokens_are_not_counted() -> None:
    choice = choice_of([0, 1, 3], [0, 2], Grid(2, 2, prefix=1))
    assert keys_of(choice)[0, 0, 0].tolist() == [1, 0, 1, 0]
    assert queries_of(choice)[0, 0, 0].tolist() == [0, 1, 0, 0]


def test_overlap_of_known_sets() -> None:
    keys = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    queries = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    result = overlap(keys, queries)
    assert result.measured == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert result.empty == 0.25
    assert result.by_chance == pytest.approx((1 / 3 + 1 / 3 + 0.5 / 2.5 + 0) / 4)


def test_random_sets_overlap_by_chance() -> None:
    torch.manual_seed(0)
    sets = [torch.zeros(4000, 60).scatter(-1, torch.rand(4000, 60).topk(size).indices, 1.0) for size in (12, 20)]
    result = overlap(*sets)
    assert result.measured == pytest.approx(result.by_chance, rel=0.03)


def test_an_overlay_has_the_bright_cell_and_its_frame_at_their_place() -> None:
    """On a rectangular grid: rows and columns are not exchanged."""
    grid = Grid(2, 4)
    weights, frame = torch.zeros(8), torch.zeros(8, dtype=torch.bool)
    weights[1 * 4 + 2] = 3.0
    frame[[1, 2]] = True
    pixels = decoded(overlay(weights, grid, frame))
    assert pixels.shape == (2 * CELL_PIXELS, 4 * CELL_PIXELS, 4)
    half = CELL_PIXELS // 2
    opacity = pixels[half::CELL_PIXELS, half::CELL_PIXELS, 3]
    assert opacity[1, 2] == 225
    assert np.count_nonzero(opacity) == 1
    red = (pixels[..., 0] == 214) & (pixels[..., 3] == 255)
    rows, columns = np.nonzero(red)
    assert (rows.min(), rows.max() + 1) == (0, CELL_PIXELS)
    assert (columns.min(), columns.max() + 1) == (CELL_PIXELS, 3 * CELL_PIXELS)


def test_the_window_of_a_landmark() -> None:
    choice = choice_of([0], [0], Grid(4, 6, prefix=1))
    window = _window(MiTA(m=(2, 3)), choice, 4)
    assert window.nonzero().flatten().tolist() == [14, 15, 20, 21]
    assert _window(MiTA(m=4, landmarks="random"), choice, 0) is None


@pytest.mark.parametrize(
    ("mixer", "grid", "expert"),
    [
        (MiTA(m=25), Grid(14, 14, 1), 12),
        (MiTA(m=16), Grid(12, 12), 10),
        (MiTA(m=(2, 3)), Grid(4, 6, 1), 4),
        (MiTA(m=(3, 2)), Grid(6, 4), 3),
    ],
    ids=["5x5", "4x4", "2x3", "3x2"],
)
def test_the_expert_of_figure3_lies_in_the_middle(mixer: MiTA, grid: Grid, expert: int) -> None:
    assert middle(mixer, grid) == expert
    window = _window(mixer, choice_of([0], [0], grid), expert)
    assert window[grid.height // 2 * grid.width + grid.width // 2]


def test_landmarks_without_windows_have_a_middle_number() -> None:
    assert middle(MiTA(m=16, landmarks="random"), Grid(12, 12)) == 8


# exchanged mechanisms and numbers in a trained network


def test_exchange_keeps_the_weights_and_the_original() -> None:
    """Route-only MiTA with all keys is softmax attention."""
    model, x = small_model(Softmax()), torch.randn(2, 3, 12, 12)
    same = exchange(model, MiTA(m=4, k=36, branches="route"))
    changed = exchange(model, MiTA(m=4, k=4))
    with torch.no_grad():
        torch.testing.assert_close(same(x), model(x), rtol=1e-4, atol=1e-4)
        assert (changed(x) - model(x)).abs().max() > 1e-3
    assert all((value == changed.state_dict()[name]).all() for name, value in model.state_dict().items())
    assert isinstance(model.blocks[0].attn.mixer.config, Softmax)  # type: ignore[union-attr, index]


def test_boundaries_of_known_accuracies() -> None:
    accuracies = {(4, 4): 80.0, (4, 9): 80.5, (9, 4): 79.2, (9, 9): 79.1}
    where = boundaries(accuracies, (4, 4))
    assert list(where.values()) == ["at least as trained"] * 2 + ["at least 99 %", "below"]
    assert outlines(where) == {
        "at least as trained": ((4, 4), (4, 9)),
        "at least 99 % of it": ((4, 4), (4, 9), (9, 4)),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Softmax and MiTA of the smoke scale, trained for one epoch on 64 images."""
    store = Results(tmp_path_factory.mktemp("runs"))
    train_rows(store, "mita_table2", ("Softmax", "MiTA"))
    return Source(store, "smoke")


@pytest.mark.parametrize(("name", "pictures"), [("mita_fig3", 2), ("mita_fig4", 2), ("mita_fig8", 0)])
def test_figures_of_choices_are_computed_from_a_run(source: Source, name: str, pictures: int) -> None:
    value = run_analysis(load_analysis(name), source.store, "smoke")
    assert len(value["pictures"]) == pictures
    rows = [dict(zip(value["sheets"][0]["columns"], row, strict=True)) for row in value["sheets"][0]["rows"]]
    if name == "mita_fig3":
        assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn"]
        assert [row["expert"] for row in rows] == [3, 3]  # of 2 x 2
        assert all(4 <= row["cells gathered by some head"] <= 8 for row in rows)
        assert all("scikit-learn" in picture["note"] for picture in value["pictures"])
    elif name == "mita_fig4":
        assert all(1 - 32 / 36 - 1e-3 <= row["share of cells"] <= 32 / 36 + 1e-3 for row in rows)
        assert {row["extra tokens gathered"] for row in rows} == {None}
    else:
        lines = {row["of"] for row in rows}
        assert lines == {"trained", "random sets", "hard clustering"}
        assert all(0 <= row["intersection over union"] <= 1 for row in rows)


def test_figure9_names_rows_without_runs(source: Source) -> None:
    (sheet,) = load_analysis("mita_fig9").compute(source)
    pairs = {row[:2]: row for row in sheet.rows}  # type: ignore[union-attr]
    assert set(pairs) == {(a, b) for a in ("Softmax", "MiTA") for b in ("Softmax", "Agent", "MiTA")}
    assert all(pairs[name, name][3] == 100 for name in ("Softmax", "MiTA"))
    assert "Not trained yet: Agent" in sheet.note
    assert (sheet.chart.x, sheet.chart.y) == ("trained with", "run with")  # type: ignore[union-attr]
    assert sheet.chart.outlines == {"run as trained": (("Softmax", "Softmax"), ("MiTA", "MiTA"))}  # type: ignore[union-attr]
    for name in ("Softmax", "MiTA"):  # the diagonal is the run's own accuracy
        key = next(run.key for row, run in _quick_runs(source) if row == name)
        outcome = source.store.outcome(key)
        assert pairs[name, name][2] == pytest.approx(outcome["metrics"]["top1"], abs=0.01)


@pytest.mark.slow
def test_figure9_of_fine_tuned_networks(tmp_path: Path) -> None:
    store = Results(tmp_path)
    train_rows(store, "mita_table7", ("Softmax", "Agent 4", "MiTA"))
    (sheet,) = run_analysis(load_analysis("mita_fig9_tuned"), store, "smoke")["sheets"]
    names = ("Softmax", "Agent 4", "MiTA")
    assert [tuple(row[:2]) for row in sheet["rows"]] == [(a, b) for a in names for b in names]
    assert all(row[3] == 100 for row in sheet["rows"] if row[0] == row[1])


def _quick_runs(source: Source) -> list[tuple[str, Run]]:
    from regard.lab.engine.analysis import trained_runs
    from regard.lab.train.run import read_run

    return [(row, read_run(source.store, key)) for row, _, key in trained_runs(source, "mita_table2")]


def test_figure10_marks_the_point_of_training(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.lab.studies.mita.trained_figures._NUMBERS", (4, 9, 49))
    (sheet,) = load_analysis("mita_fig10").compute(source)
    assert sheet.chart.mark == (4, 4)  # type: ignore[union-attr]
    for cells in sheet.chart.outlines.values():  # type: ignore[union-attr]
        assert (4, 4) in cells
    assert [row[:2] for row in sheet.rows] == [(4, 4), (4, 9), (9, 4), (9, 9)]  # type: ignore[union-attr]
    assert sheet.rows[0][3] == 100  # type: ignore[union-attr]


def test_figure10_counts_what_lies_inside_each_boundary(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at least as good as trained is also at least 99 % of it."""
    accuracies = {(4, 4): 80.0, (4, 9): 80.5, (9, 4): 79.2, (9, 9): 79.1}
    monkeypatch.setattr("regard.lab.studies.mita.trained_figures.accuracies_at", lambda *_: accuracies)
    (sheet,) = load_analysis("mita_fig10").compute(source)
    assert sheet.note.endswith(
        "At least as trained: 2 of 4, the cheapest m = 4, k = 4. "
        "At least 99 % of it: 3 of 4, the cheapest m = 4, k = 4."
    )


def test_numbers_that_a_grid_cannot_have_are_left_out(source: Source) -> None:
    run = next(run for row, run in _quick_runs(source) if row == "MiTA")
    assert set(accuracies_at(run.task.model(run.mixer, 0), run, [(4, 4), (7, 4), (9, 36)])) == {(4, 4), (9, 36)}


# Table 1 and Figure 5


def test_table1_has_every_mechanism_and_its_picture() -> None:
    named, sheet, drawn = load_analysis("mita_table1").compute(Source(Results("nowhere"), "smoke"))
    assert [row[0] for row in sheet.rows] == [kind.__name__ for kind in MIXERS]  # type: ignore[union-attr]
    rows = {row[0]: row for row in sheet.rows}  # type: ignore[union-attr]
    assert (rows["Agent"][1], rows["MiTA"][1]) == ("compress", "both")
    assert decoded(drawn.image).shape[1] > 1000  # type: ignore[union-attr]
    differs = {row[0]: row[-1] for row in named.rows if any("[" in cell for cell in row[2:-1])}  # type: ignore[union-attr]
    assert set(differs) == {"BiFormer", "NSA", "Sparsifiner"}
    assert all(differs.values())
    for row in named.rows:  # type: ignore[union-attr]
        assert parse(row[1]) == parse(NAMED[row[0]][0])


def test_figure5_has_the_numbers_of_section_4_3_on_maps_that_have_them() -> None:
    """s = 1 and m = k = 128; 256 keys for routing alone."""
    mita, route = _MECHANISMS["MiTA"], _MECHANISMS["MiTA, route only"]
    assert (mita.m, mita.k, mita.experts) == (128, 128, 1)  # type: ignore[union-attr]
    assert (route.m, route.k) == (128, 256)  # type: ignore[union-attr]
    for side in SIDES:
        assert math.prod(landmark_windows(Grid(side, side), 128)) == 128
        assert side**2 >= 256


def test_throughput_is_of_networks() -> None:
    sheet = throughput((16, 20), seconds=0.01)
    rows = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    assert [(row["mechanism"], row["N"]) for row in rows] == [
        (name, tokens) for tokens in (256, 400) for name in ("softmax", "MiTA", "MiTA, route only")
    ]
    for row in rows:
        assert row["lower quartile"] <= row["inputs per second"] <= row["upper quartile"]
    for first, mita in ((rows[0], rows[1]), (rows[3], rows[4])):
        assert first["ratio to softmax"] == 1
        assert mita["ratio to softmax"] == pytest.approx(
            mita["inputs per second"] / first["inputs per second"],
            rel=0.02,
            abs=0.01,  # it has two digits
        )
