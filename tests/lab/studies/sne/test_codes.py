"""Analyses of transfer runs: regressions of the published numbers, and cosines of known codes."""

import pytest
import torch

from regard.files.records import write_record
from regard.lab.engine.analysis import Source, trained_runs
from regard.lab.engine.table import snapshot_path
from regard.lab.results.results import Results
from regard.lab.studies import load_study
from regard.lab.studies.sne.codes import accuracies, codes
from regard.lab.train.run import Run
from regard.mixers.spelling import spell

TABLE4 = load_study("sne_table4")


def put(store: Results, run: Run, **outcome) -> None:
    store.folder(run.key).mkdir(parents=True, exist_ok=True)
    write_record(store.folder(run.key) / "run.json", {"spelling": spell(run)})
    store.finish(run.key, {"status": "done", **outcome})


def listed(store: Results, scale: str, runs) -> Source:
    """The store with a snapshot that lists the runs."""
    rows = [{"label": row.label, "spelling": ""} for row, _ in runs]
    value = {"rows": rows, "metric": "top1", "baseline": "linear",
             "runs": [{"row": row.label, "seed": run.seed, "key": run.key} for row, run in runs]}  # fmt: skip
    write_record(snapshot_path(store.root, "sne_table4", scale), value)
    return Source(store, scale)


def test_sizes_of_networks_are_never_in_one_regression(tmp_path) -> None:
    """The printed numbers of Cars: r = -0.05 over the nine rows of N12; with those of T12 it would be 0.90."""
    before = {row.label: row.paper["top1"] for row in load_study("sne_table2").rows("paper") if not row.control}
    store, runs = Results(tmp_path), TABLE4.runs("paper", seeds=1)
    for row, run in runs:
        put(store, run, metrics={"top1": row.paper["top1"]})
        put(store, run.start, metrics={"top1": before.get(row.start.label.removesuffix(", ImageNet"), 75.0)})
    points, fits = accuracies(listed(store, "paper", runs))
    fitted = {name: (n, r) for name, n, r, _ in fits.rows}
    assert fitted["N12, StanfordCars"] == (9, pytest.approx(-0.05, abs=0.005))
    assert {n for n, _ in fitted.values()} == {9}
    assert len(fitted) == 8
    assert len(points.rows) == 72
    assert {row[2] for row in points.rows if row[1].startswith("N12")} == {70.9, 69.9, 71.4, 70.6, 70.8, 70.2, 70.3}


def test_codes_are_shown_between_and_within(tmp_path) -> None:
    """Query along key before; after, all three apart."""
    store = Results(tmp_path)
    runs = [(row, run) for row, run in TABLE4.runs("smoke", seeds=1) if row.label in ("linear", "F-SNE 8")]
    matrices = {
        "start": torch.tensor([[1.0, 0, 0], [2, 0, 0], [0, 0, 1]]), "end": torch.eye(3),
    }  # fmt: skip
    for _, run in runs:
        for when, trained in (("start", run.start), ("end", run)):
            put(store, trained, metrics={"top1": 50.0})
            torch.save({"model": {"codes.weight": matrices[when]}}, store.folder(trained.key) / "last.ckpt")
    source = listed(store, "smoke", runs)
    assert len(trained_runs(source, "sne_table4")) == 2
    norms, _, between, first, second = codes(source)
    assert [row[:4] for row in norms.rows] == [("F-SNE 8", "before", 1, 2), ("F-SNE 8", "after", 1, 1)]
    assert [row[2] for row in between.rows] == [1, 0, 0, 1, 0, 0, 0, 0, 1]
    assert [row[2] for row in first.rows] == [1, 1, 0, 1, 1, 0, 0, 0, 1]
    assert [row[2] for row in second.rows] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert (first.title, first.rows[1][:2]) == ("F-SNE 8: codes before transfer", ("q", "k"))
    assert first.chart.kind == second.chart.kind == "heat"
