"""`load`: a saved folder or a finished run, without the data and without pickle."""

import dataclasses
from pathlib import Path

import pytest
import torch

from regard.core import ConfigError, StoreError
from regard.files.records import read_record, write_record
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.load import load_run, load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import save
from regard.projections.sne import FSNE

TASK = Classification(
    host="vit_desk(size=12, patch=4, dim=16, depth=2, heads=2)", data="digits-canvas", size=(12, 12), limit=32
)
SHORT = Recipe(epochs=3, batch=16, augment="none")
"""Six steps: timm's average follows the weights exactly in the first two."""


@pytest.mark.parametrize("mixer", [None, SKA(), Softmax(projection=FSNE(code=4))], ids=["host", "ska", "codes"])
@pytest.mark.parametrize("ema", [0.0, 0.9], ids=["last", "average"])
def test_a_run_loads_without_its_data(mixer, ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    run, store = Run(task=TASK, mixer=mixer, recipe=dataclasses.replace(SHORT, ema=ema)), Results(tmp_path)
    execute(run, store, device="cpu")
    expected = load_trained(run, store)

    def no_data(self: Classification) -> None:
        raise AssertionError("load read the data")

    monkeypatch.setattr(Classification, "data_set", no_data)
    model = load_run(tmp_path / run.key)
    x = torch.randn(2, 1, 12, 12)
    assert not model.training
    assert torch.equal(model(x), expected(x))


def test_a_removed_attention_and_the_best_weights_come_back(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, val=0.5)
    run, store = Run(task=task, removed=True, recipe=SHORT), Results(tmp_path)
    execute(run, store, device="cpu")
    folder = store.folder(run.key)
    x = torch.randn(2, 1, 12, 12)
    assert torch.equal(load_run(folder)(x), load_trained(run, store)(x))
    weights = {name: torch.zeros_like(value) for name, value in load_run(folder).state_dict().items()}
    checkpoint.save_best(folder, weights, 1, 99.0)
    assert not load_run(folder, best=True)(x).any()
    (folder / checkpoint.BEST).unlink()
    with pytest.raises(StoreError, match=r"has no best weights"):
        load_run(folder, best=True)


def test_an_outcome_from_before_hosts_were_kept_loads_with_the_data(tmp_path: Path) -> None:
    run, store = Run(task=TASK, mixer=SKA(), recipe=SHORT), Results(tmp_path)
    execute(run, store, device="cpu")
    path = store.folder(run.key) / "outcome.json"
    write_record(path, {name: value for name, value in read_record(path).items() if name != "model"})
    x = torch.randn(2, 1, 12, 12)
    assert torch.equal(load_run(store.folder(run.key))(x), load_trained(run, store)(x))


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    save(create_model("vit_desk(size=12, patch=4, dim=16, depth=1, heads=2)", SKA()), tmp_path / "model")
    for folder in (tmp_path, tmp_path / "model"):
        with pytest.raises(StoreError, match="is not the folder of a run"):
            load_run(folder, best=True)
    run, store = Run(task=TASK, recipe=SHORT), Results(tmp_path)
    write_record(store.folder(run.key) / "run.json", {})
    with pytest.raises(StoreError, match="is not finished"):
        load_run(store.folder(run.key))
    store.finish(run.key, {"status": "failed", "error": "the loss is nan"})
    with pytest.raises(StoreError, match="failed: the loss is nan"):
        load_run(store.folder(run.key))


@pytest.mark.parametrize("damage", ["integers", "nan"])
def test_weights_of_another_kind_and_not_finite_are_refused(damage: str, tmp_path: Path) -> None:
    """Whatever checksum they have: PyTorch rounds integers into a parameter in silence."""
    run, store = Run(task=TASK, recipe=SHORT), Results(tmp_path)
    execute(run, store, device="cpu")
    state = checkpoint.load(store.folder(run.key))
    name, value = next((name, value) for name, value in state["model"].items() if "norm" in name)
    state["model"][name] = value.long() if damage == "integers" else value * torch.nan
    checkpoint.save(store.folder(run.key), state)
    with pytest.raises(StoreError, match=name):
        load_run(store.folder(run.key))


def test_a_model_that_diverged_is_not_saved(tmp_path: Path) -> None:
    model = create_model("vit_desk(size=12, patch=4, dim=16, depth=1, heads=2)")
    torch.nn.init.constant_(model.get_parameter("head.weight"), torch.nan)
    with pytest.raises(ConfigError, match=r"head\.weight"):
        save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
