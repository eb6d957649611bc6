"""Attention in a trained ResNet: the same bits at insertion, a fair control, and one command for the curve."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.lab.engine.analysis import Source, run_analysis
from regard.lab.engine.study import Study
from regard.lab.report import write_pages
from regard.lab.results.results import Results
from regard.lab.studies import load_analysis, load_study
from regard.lab.studies.esa.insertion import compare_insertion, curve
from regard.lab.train.run import Run
from regard.mixers.shared.native import native_enabled
from regard.pages.sheets import Chart

INSERTED = ("0010", "0110", "1111", "1111 parallel", "deformable unit", "0010 + deformable")
EXACT = ("0010", "0110", "1111", "1111 parallel", "deformable unit", "w/o", "0000")


@pytest.fixture(scope="module")
def study() -> Study:
    return load_study("esa_insertion")


def run_of(study: Study, label: str, scale: str = "smoke", seed: int = 0) -> Run:
    return study.run(scale, study.rows(scale, label)[0], seed)


def perturbed(run: Run) -> nn.Module:
    """The plain network with weights and statistics unlike those of a start: last norms of zero hide attention."""
    plain = run.task.model(run.mixer, run.seed, run.removed)
    torch.manual_seed(7)
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr, operator]
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
    return plain


def small(study: Study, rows: str) -> Study:
    """A few rows on 64 images, two epochs."""
    setting = study.setting("smoke")
    short = {"epochs": 1}
    kept = tuple(
        replace(row, recipe=short) if row.start is None else replace(row, start=replace(row.start, recipe=short))
        for row in setting.rows
        if row.label in rows.split(",")
    )
    recipe = replace(setting.recipe, epochs=2, batch=32)
    task = replace(setting.task, limit=64)
    tiny = replace(setting, task=task, recipe=recipe, rows=kept, seeds=1)
    return replace(study, settings={"smoke": tiny}, claims=(), baseline="w/o")


def test_logits_of_all_test_images_are_the_same_at_insertion(study: Study) -> None:
    """Reference 3.5 and 4.1: gamma = 0 leaves the output as it is, bit for bit."""
    plain = perturbed(run_of(study, "before"))
    for label in EXACT:
        run = run_of(study, label)
        effect = compare_insertion(replace(run, task=replace(run.task, limit=100)), plain)
        assert effect.difference == 0.0, label
        assert (effect.changed, effect.images) == (0, 100)
        assert effect.before == effect.after


@pytest.mark.parametrize("kernels", ["compiled", "torchvision"])
def test_a_deformable_convolution_sums_in_another_order(
    study: Study, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's operator rounds otherwise than the convolution in its place; the compiled kernel gives the same
    bits with AVX-512, and at most rounding errors with other instructions."""
    if kernels == "torchvision":
        monkeypatch.setenv("REGARD_NATIVE", "0")
    elif not native_enabled():
        pytest.skip("no compiled kernels: install a wheel or a C++ compiler")
    rounded = compare_insertion(run_of(study, "0010 + deformable"), perturbed(run_of(study, "before")))
    assert rounded.difference < 1e-5
    if kernels == "torchvision":
        assert rounded.difference > 0
    assert rounded.changed == 0


def test_another_network_gives_a_difference(study: Study) -> None:
    """The same weights in a network whose first convolution has stride 2."""
    run = run_of(study, "before")
    other = replace(run, task=replace(run.task, host=run.task.host.replace("stem=1", "stem=2")))
    effect = compare_insertion(other, perturbed(run))
    assert effect.difference > 0.1
    assert effect.changed > 0
    assert effect.before != effect.after


def test_all_rows_start_from_the_row_before_and_have_equal_epochs(study: Study) -> None:
    for scale in ("smoke", "desk", "paper"):
        rows = [row.label for row in study.rows(scale)]
        assert rows == ["before", *INSERTED, "w/o", "0000"]
        for seed in study.setting(scale).numbers:
            before = run_of(study, "before", scale, seed)
            assert before.start is None
            assert before.removed
            runs = [run_of(study, label, scale, seed) for label in rows[1:]]
            assert {run.start.key for run in runs} == {before.key}  # type: ignore[union-attr]
            assert len({run.recipe for run in runs}) == 1
            assert runs[0].recipe.epochs <= before.recipe.epochs


@pytest.mark.slow
def test_the_curve_begins_at_insertion(study: Study, tmp_path: Path) -> None:
    """At smoke scale the analysis trains what is missing, and a second call nothing more."""
    few = small(study, "before,0110,w/o")
    source = Source(Results(tmp_path), "smoke")
    at_insertion, tuning = curve(source, few)
    assert at_insertion.column("row") == ["0110", "w/o"]
    assert at_insertion.column("largest difference of a logit") == [0.0, 0.0]
    assert at_insertion.column("top1 at epoch 0") == at_insertion.column("top1 before")
    outcomes = {run[0].label: source.store.outcome(run[1].key) for run in few.runs("smoke")}
    assert at_insertion.column("top1 before") == [outcomes["before"]["metrics"]["top1"]] * 2  # type: ignore[index]
    assert [row[:2] for row in tuning.rows] == [(label, epoch) for label in ("0110", "w/o") for epoch in (0, 1, 2)]
    assert tuning.rows[0][2] == tuning.rows[3][2] == at_insertion.rows[0][5]
    assert tuning.rows[2][2] == outcomes["0110"]["metrics"]["top1"] == at_insertion.rows[0][-2]  # type: ignore[index]
    attention, plain = at_insertion.column("largest gamma at the end")
    assert attention > 0  # type: ignore[operator]
    assert plain is None
    assert tuning.chart == Chart(x="epoch", y="top1", series="row")
    assert set(source.read) == {run.key for _, run in few.runs("smoke")}, "the plain network is read too"
    assert curve(source, few) == [at_insertion, tuning]
    assert {run[0].label: source.store.outcome(run[1].key) for run in few.runs("smoke")} == outcomes


@pytest.mark.slow
def test_one_command_shows_insertion_and_fine_tuning(tmp_path: Path) -> None:
    """The whole smoke scale: equal logits, then a curve that rises, also on the page."""
    value = run_analysis(load_analysis("esa_insertion_curve"), Results(tmp_path), "smoke")
    at_insertion, tuning = value["sheets"]
    column = at_insertion["columns"].index
    assert len(at_insertion["rows"]) == 2 * (len(INSERTED) + 2)
    for row in at_insertion["rows"]:
        assert row[column("images with another class")] == 0
        if row[0] in EXACT:
            assert row[column("largest difference of a logit")] == 0.0
        assert row[column("top1 before")] == row[column("top1 at epoch 0")] > 50
        assert row[column("top1 at the end")] > row[column("top1 before")]
    assert sorted({row[1] for row in tuning["rows"]}) == [0, 1, 2, 3]
    page = next(path for path in write_pages(tmp_path, tmp_path / "out", "esa_insertion_curve"))
    text = page.read_text(encoding="utf-8")
    assert "At insertion" in text
    assert "<svg" in text
