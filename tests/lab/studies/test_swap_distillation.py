"""What distillation gives back: from trained runs, without labels, each number by hand."""

import copy
from dataclasses import replace

import pytest
import torch

from regard.lab.engine.analysis import Source, trained_runs
from regard.lab.engine.run_study import run_study
from regard.lab.results.results import Results
from regard.lab.studies import swap_distillation
from regard.lab.studies.mita.table4 import STUDY
from regard.lab.studies.swap_distillation import ANALYSIS, COLUMNS, _line, mechanisms, training_images
from regard.lab.train.load import load_user_run
from regard.mixers import Factors
from regard.mixers.spelling import spell
from regard.swapping.swap import swap


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Two networks with softmax attention and two with MiTA, each after one epoch of 16 images."""
    store = Results(tmp_path_factory.mktemp("runs"))
    setting = STUDY.setting("smoke")
    rows = tuple(row for row in setting.rows if row.label in ("linear", "MiTA, linear"))
    run_study(
        replace(STUDY, settings={**STUDY.settings, "smoke": replace(setting, rows=rows)}), "smoke", store, workers=0
    )
    return Source(store, "smoke")


@pytest.mark.slow
def test_each_step_is_measured_on_the_same_networks(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_distillation, "mechanisms", lambda scale: mechanisms(scale)[:2])
    monkeypatch.setattr(swap_distillation, "LAYERS", replace(swap_distillation.LAYERS, steps=2))
    monkeypatch.setattr(swap_distillation, "SCORES", replace(swap_distillation.SCORES, steps=1))
    (sheet,) = ANALYSIS.compute(source)
    lines = {(row[0], row[1]): dict(zip(COLUMNS, row, strict=True)) for row in sheet.rows}  # type: ignore[union-attr]
    steps = ["swapped", "layers learned", "scores learned"]
    assert list(lines) == [
        ("softmax", "original"),
        *(("MiTA(m=4, k=4)", step) for step in (*steps, "trained")),
        *(("Agent(m=4)", step) for step in steps),
    ]
    scores = {row: [] for row in ("linear", "MiTA, linear")}
    for row, _, key in trained_runs(source, STUDY.name):
        scores[row].append((source.store.outcome(key) or {})["metrics"]["miou"])
    for line, row in ((("softmax", "original"), "linear"), (("MiTA(m=4, k=4)", "trained"), "MiTA, linear")):
        assert lines[line]["miou"] == pytest.approx(sum(scores[row]) / 2, abs=0.006)
    assert {line["networks"] for line in lines.values()} == {2}


def test_without_a_step_the_model_is_the_swapped_one(source: Source) -> None:
    _, _, key = trained_runs(source, STUDY.name, "linear")[0]
    run, user = source.run(key), load_user_run(source.store.folder(key))
    images = training_images(run)
    assert images.pixels.shape == (16, 84, 84, 1)
    assert not images.labels.any()
    mixer = Factors(terms="0000")
    sample = user.prepare(torch.from_numpy(images.pixels[:2]).permute(0, 3, 1, 2))
    plain = swap(copy.deepcopy(user.network), mixer).eval()
    new = swap_distillation.learn(user, mixer, images, (0, 0))
    with torch.no_grad():
        assert torch.equal(new(sample), plain(sample))
        assert not torch.equal(new(sample), user.network(sample))


def test_what_is_given_back_is_a_share_of_what_was_lost() -> None:
    before, swapped = {0: 90.0, 1: 92.0, 2: 94.0}, {0: 50.0, 1: 52.0, 2: 54.0}
    mixer = Factors(terms="0000")
    line = dict(zip(COLUMNS, _line(mixer, "scores learned", {0: 80.0, 1: 83.0, 2: 83.0}, before, swapped), strict=True))
    assert line["mechanism"] == spell(mixer)
    assert (line["miou"], line["against the original"], line["given back %"]) == (82.0, -10.0, 75.0)
    assert line["low"] == pytest.approx(-10 - 4.3027 / 3**0.5, abs=0.006)  # differences -10, -9, -11: deviation 1
    trained = _line(mixer, "trained", {0: 80.0, 1: 83.0, 2: 83.0}, before, swapped)
    assert dict(zip(COLUMNS, trained, strict=True))["given back %"] is None
    assert _line(mixer, "swapped", before, before, before)[COLUMNS.index("given back %")] is None
