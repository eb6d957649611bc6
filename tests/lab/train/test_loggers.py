"""Loggers of other tools get the metrics of a run by step, stay offline, and decide nothing."""

import csv
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.core import ConfigError
from regard.core.errors import MissingExtra
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.train.execute import execute
from regard.lab.train.loggers import loggers
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.lab.train.watch import Watch
from stopped_runs import stop
from tiny_task import Tiny

NAMES = {"train/loss", "lr", "time/step_ms", "mem/peak_mb", "val/top1", "val/loss"}
RECIPE = Recipe(epochs=3, batch=2, augment="none")  # 64 steps an epoch
STEPS = [50, 64, 100, 128, 150, 192]

Points = dict[str, dict[int, float]]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of a tool, and no credentials."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("A_SECRET_TOKEN", "do-not-tell")


RUN = Run(task=Tiny(), recipe=RECIPE)


def logged(name: str, store: Results) -> Path:
    """The folder of the run, logged to a tool."""
    folder = store.folder(RUN.key)
    outcome = execute(RUN, store, device="cpu", watch=Watch(loggers=loggers(name, folder, RUN.label)))
    assert outcome["status"] == "done"
    return folder


def check(points: Points, folder: Path) -> None:
    """Names, steps and values are those of the run."""
    assert set(points) == NAMES
    assert list(points["train/loss"]) == list(points["lr"]) == STEPS
    rows = Metrics(folder / "metrics.csv").read()
    assert points["val/top1"] == pytest.approx({int(row["step"]): float(row["top1"]) for row in rows})
    for number, row in enumerate(rows):
        end = int(row["step"])
        parts = {step: loss for step, loss in points["train/loss"].items() if end - 64 < step <= end}
        starts = [end - 64, *parts]
        mean = sum(loss * (step - start) for (step, loss), start in zip(parts.items(), starts, strict=False)) / 64
        assert mean == pytest.approx(float(row["train_loss"]), rel=1e-5), number
        assert points["lr"][end] == pytest.approx(float(row["lr"]))
    assert all(value > 0 for value in points["time/step_ms"].values())


def test_csv_has_every_point_and_changes_no_bit(tmp_path: Path) -> None:
    """A finished run starts no logger."""
    plain = Results(tmp_path / "plain")
    assert not (logged("", plain) / "log").exists()
    assert not (logged("csv", plain) / "log").exists()
    store = Results(tmp_path / "csv")
    folder = logged("csv", store)
    assert (store.outcome(RUN.key) or {})["bits"] == (plain.outcome(RUN.key) or {})["bits"]
    with next(folder.glob("log/*/metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    names = rows[0].keys() - {"step"}
    check({name: {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in names}, folder)


def test_tensorboard_has_every_point(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = logged("tensorboard", Results(tmp_path))
    events = EventAccumulator(str(next(folder.glob("log/version_*"))))
    events.Reload()
    names = events.Tags()["scalars"]
    check({name: {event.step: event.value for event in events.Scalars(name)} for name in names}, folder)


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of the one offline log: parts of at most a block, each after checksum (4), length (2) and type (1)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, block, parts = file.read_bytes(), 7, 32768, b""
    while place < len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.slow
def test_weights_and_biases_stays_offline_and_learns_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = logged("wandb", Results(tmp_path))
    points: Points = {}
    for record in wandb_records(folder):
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name in values.keys() & NAMES:
            points.setdefault(name, {})[int(values["_step"])] = values[name]
    check(points, folder)
    written = b"".join(path.read_bytes() for path in (folder / "wandb").rglob("*") if path.is_file())
    assert b"do-not-tell" not in written


@pytest.mark.slow
def test_mlflow_stays_in_the_folder_and_learns_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    folder = logged("mlflow", Results(tmp_path))
    client, run_id = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}"), (folder / "mlflow-run").read_text()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {}
    names = run.data.metrics
    check(
        {name: {point.step: point.value for point in client.get_metric_history(run_id, name)} for name in names}, folder
    )
    assert b"do-not-tell" not in (folder / "mlflow.db").read_bytes()


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_the_same_log_of_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from regard.lab.train.tool_loggers import MLflowLogger

    first = MLflowLogger(tmp_path, "SKA()")
    first.log_metrics({"lr": 1.0}, step=1)
    first.finalize("failed")
    second = MLflowLogger(tmp_path, "SKA()")
    second.log_metrics({"lr": 2.0}, step=2)
    assert second.run_id == first.run_id
    assert [point.step for point in second.experiment.get_metric_history(first.run_id, "lr")] == [1, 2]


@pytest.mark.slow
def test_several_devices_log_once(tmp_path: Path) -> None:
    store = Results(tmp_path)
    folder = store.folder(RUN.key)
    execute(RUN, store, 2, device="cpu", watch=Watch(loggers=loggers("csv", folder, RUN.label)))
    (file,) = folder.glob("log/*/metrics.csv")
    assert len(file.read_text().splitlines()) == 1 + len(STEPS) + 3


def test_a_stopped_run_closes_its_log(tmp_path: Path) -> None:
    store = Results(tmp_path)
    folder = store.folder(RUN.key)
    stop(RUN, store, 64, signal.SIGTERM, loggers=loggers("csv", folder, RUN.label))
    (file,) = folder.glob("log/*/metrics.csv")
    assert len(file.read_text().splitlines()) >= 2


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtra, match=rf"pip install 'regard\[{name}\]'"):
            loggers(name, tmp_path, "SKA()")


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "sideways"), ("WANDB_BASE_URL", "no url")])
def test_a_wrong_variable_of_wandb_is_named_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # a thread of it would outlive the test
    (logger,) = loggers("wandb", tmp_path, "label")
    with pytest.raises(ConfigError, match=r"--log wandb cannot start \(.*\); WANDB_MODE=offline"):
        _ = logger.experiment


def test_a_server_that_does_not_answer_is_named_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow by itself asks it for minutes. Afterwards the environment is as it was."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    before = dict(os.environ)
    (logger,) = loggers("mlflow", tmp_path, "label")
    with pytest.raises(ConfigError, match=r"--log mlflow cannot start \(.*127.0.0.1"):
        _ = logger.experiment
    assert dict(os.environ) == before
