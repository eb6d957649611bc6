"""Table 3 and Figure 6 of the MiTA paper: rows, exact counts, claims, and the map of finished runs."""

from dataclasses import replace

import pytest

from regard.images.augment import transform
from regard.lab.engine.analysis import Source, run_analysis
from regard.lab.engine.dry_run import dry_run
from regard.lab.engine.snapshot import write_snapshot
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis, load_study
from regard.lab.studies.mita.fig6 import STUDY as FIGURE6
from regard.lab.studies.mita.recipes import VIT5_RECIPE
from regard.lab.studies.mita.table3 import STUDY
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax


def test_fact_section5_recipe_of_table3() -> None:
    """800 epochs, LAMB, 4e-3, batch 2048, no smoothing, 3-Augment; rows in DeiT have DeiT's."""
    assert (VIT5_RECIPE.epochs, VIT5_RECIPE.optimizer, VIT5_RECIPE.batch) == (800, "lamb", 2048)
    assert VIT5_RECIPE.lr_at(0, 800) == pytest.approx(4e-3 / 5)
    assert VIT5_RECIPE.lr_at(799, 800) == pytest.approx(1e-5, rel=0.01)
    runs = {row.label: run for row, run in STUDY.runs("paper", seeds=1)}
    assert (runs["MiTA"].recipe.epochs, runs["DeiT-III"].recipe.optimizer) == (800, "lamb")
    deit = runs["DeiT"].recipe
    assert (deit.epochs, deit.optimizer, deit.batch) == (300, "adamw", 1024)


def test_three_augment_is_one_of_timms() -> None:
    task = replace(FIGURE6.setting("smoke").task, host="vit_desk", size=(12, 12))
    text = str(transform("timm:3a", task.size, task.data_set().channels))
    assert all(word in text for word in ("Solarize", "Desaturate", "GaussianBlur", "ColorJitter"))


@pytest.mark.slow
def test_a_paper_row_takes_a_step() -> None:
    (row,) = dry_run(STUDY, "paper", "MiTA")
    assert (row.error, row.params_verdict) == ("", "equal")


# Figure 6


def test_figure6_is_trained_for_each_pair() -> None:
    for scale, pairs in (("smoke", 4), ("desk", 12), ("paper", 36)):
        mixers = [row.mixer for row in FIGURE6.rows(scale) if isinstance(row.mixer, MiTA)]
        assert len({(mixer.number, mixer.k) for mixer in mixers}) == len(mixers) == pairs
        assert FIGURE6.rows(scale)[0].mixer == Softmax()
    assert (FIGURE6.setting("paper").task.data, FIGURE6.setting("desk").task.data) == ("CIFAR100", "cifar100_small")


def test_the_map_has_the_means_of_finished_runs(tmp_path) -> None:
    """Two of four pairs with two seeds and one, one that failed: the map has the outcomes of the finished ones."""
    store = Results(tmp_path)
    write_snapshot(FIGURE6, "smoke", store, seeds=2)
    top1 = {"Softmax": (40.0, 42.0), "m 4, k 9": (38.0, 39.5), "m 9, k 4": (35.0,), "m 9, k 9": ()}
    for row, run in FIGURE6.runs("smoke", seeds=2):
        values = top1.get(row.label, ())
        if run.seed < len(values):
            metrics = {"top1": values[run.seed]}
            macs = sum(map(ord, row.label)) * 10_000
            store.finish(run.key, {"status": "done", "row": row.label, "metrics": metrics, "macs": macs})
        elif row.label == "m 9, k 9":
            store.finish(run.key, {"status": "failed", "row": row.label, "error": "out of memory", "metrics": {}})
    (sheet,) = load_analysis("mita_fig6_map").compute(Source(store, "smoke"))
    work = [round(sum(map(ord, label)) / 100, 2) for label in ("m 4, k 9", "m 9, k 4")]
    assert sheet.rows == ((4, 9, 38.75, -2.25, 2, work[0]), (9, 4, 35.0, -6.0, 1, work[1]))  # type: ignore[union-attr]
    note = "2 of 4 pairs are trained; means over their finished seeds. Softmax attention has 41.00."
    assert sheet.note == note  # type: ignore[union-attr]
    value = run_analysis(load_analysis("mita_fig6_map"), store, "smoke")
    assert value["sheets"][0]["chart"]["kind"] == "heat"
    assert load_study("mita_fig6") is FIGURE6
