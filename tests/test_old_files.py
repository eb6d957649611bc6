"""Files that the version before wrote still read, and its unfinished run goes on to the same end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from regard import DynamicConv, Results, load, save
from regard.core import Mixer
from regard.lab.engine.export import import_runs
from regard.lab.engine.table import load_snapshot
from regard.lab.results.metrics import Metrics
from regard.lab.train.checkpoint import trained_weights
from regard.lab.train.load import trained
from regard.lab.train.run import read_run

OLD = Path(__file__).parent / "old_files"
EXPECTED = json.loads((OLD / "expected.json").read_text())


def mixers_of(model: nn.Module) -> list[Mixer]:
    return [module for module in model.modules() if isinstance(module, Mixer)]


@pytest.fixture
def store(tmp_path: Path) -> Results:
    """A copy of the old store."""
    return Results(shutil.copytree(OLD / "store", tmp_path / "store"))


def test_a_saved_model_gives_the_same_logits() -> None:
    model = load(OLD / "saved_model")
    with torch.no_grad():
        logits = model(torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8))[0]
    assert torch.allclose(logits, torch.tensor(EXPECTED["saved_model"]), rtol=0, atol=1e-5)
    assert any(layer.config == DynamicConv(kernel=3, groups=2, kernel_bias=True) for layer in mixers_of(model))


def test_a_loaded_model_is_saved_as_what_it_is(tmp_path: Path) -> None:
    """With the bias of its kernels written out, which its first description left out."""
    model = load(save(load(OLD / "saved_model"), tmp_path))
    assert any(layer.config == DynamicConv(kernel=3, groups=2, kernel_bias=True) for layer in mixers_of(model))
    assert "kernel_bias=True" in (tmp_path / "model.json").read_text()


def test_a_finished_run_reads_and_keeps_its_key(store: Results) -> None:
    key = EXPECTED["finished"]
    run = read_run(store, key)
    assert run.key == key
    assert run.mixer == DynamicConv(kernel=3, groups=2, kernel_bias=True)
    assert store.status(key) == "done"
    assert run.execute(store, device="cpu")["metrics"] == EXPECTED["finished_metrics"]  # as stored: nothing runs again
    score = run.task.score(trained(run, store), torch.device("cpu")).metrics
    assert score == pytest.approx(EXPECTED["finished_metrics"], abs=1e-4)
    assert load(store.folder(key)) is not None


def test_an_unfinished_run_ends_where_the_old_version_did(store: Results) -> None:
    key = EXPECTED["unfinished"]
    run = read_run(store, key)
    assert run.key == key
    assert store.status(key) == "begun"
    outcome = run.execute(store, device="cpu")
    assert outcome["metrics"] == pytest.approx(EXPECTED["unfinished_metrics"], abs=1e-4)
    weights, expected = trained_weights(store.folder(key)), load_file(OLD / "unfinished_expected.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-4), name
    last = dict(zip(EXPECTED["header"].split(","), EXPECTED["last"].split(","), strict=True))
    loss = float(Metrics(store.folder(key) / "metrics.csv").read()[-1]["train_loss"])
    assert loss == pytest.approx(float(last["train_loss"]), abs=1e-4)


def test_evidence_is_taken_in(tmp_path: Path) -> None:
    import_runs(OLD / "evidence.json", Results(tmp_path))
    assert load_snapshot(tmp_path, "quickstart", "smoke")["study"] == "quickstart"
    assert len(Results(tmp_path).outcomes()) == 3


def test_the_old_files_are_small() -> None:
    assert sum(path.stat().st_size for path in OLD.rglob("*") if path.is_file()) < 200_000
