"""`load` asks no network and reads no file outside its folder, whatever a description names."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import create_model, load, save
from regard.cli.app import run as command
from regard.core import StoreError
from regard.files.records import read_record, write_record
from regard.lab.results.results import Results
from regard.lab.train.load import load_run
from regard.mixers.static_keys.ska import SKA
from regard.models.recipe import check_local, local_host

HOST = "vit_desk(size=12, patch=4, dim=16, depth=1, heads=2)"
HOSTS = [
    "vit_tiny_patch16_224(pretrained=True)",
    "vit_tiny_patch16_224( pretrained = 1 )",
    "attended_resnet18(pretrained=True)",
    "caformer_s18(pretrained='../weights.pth')",
    "hf-hub:timm/vit_tiny_patch16_224",
    "hf_hub:timm/vit_tiny_patch16_224",
    "local-dir:../elsewhere",
    "HF-Hub:timm/vit_tiny_patch16_224",
    "LOCAL-DIR:../elsewhere",
    "vit_tiny_patch16_224(checkpoint_path='/etc/passwd')",
    "vit_tiny_patch16_224(pretrained_cfg_overlay={'url': 'https://example.org/x.pth'})",
    "host(backbone='vit_tiny_patch16_224(pretrained=True)')",
    "host(backbones=['resnet18', 'hf-hub:a/b'])",
    "host(options={'inner': {'checkpoint_path': '/etc/passwd'}})",
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A connection fails the test, also if its error is caught."""
    asked = list[Any]()

    def refuse(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


@pytest.mark.parametrize("host", HOSTS)
def test_a_saved_model_that_names_other_weights_is_refused(tmp_path: Path, host: str) -> None:
    save(create_model(HOST, SKA()), tmp_path)
    write_record(tmp_path / "model.json", {**read_record(tmp_path / "model.json"), "host": host})
    with pytest.raises(StoreError, match=r"model.json names .*asks no network .*download=True"):
        load(tmp_path)
    assert command(["finetune", str(tmp_path), "--data", "digits", "--results", str(tmp_path / "runs")]) != 0


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_that_names_other_weights_is_refused(tmp_path: Path, host: str) -> None:
    from regard.lab.train import checkpoint

    store, key = Results(tmp_path), "0123456789ab"
    store.finish(key, {"status": "done", "metrics": {"top1": 1.0}, "model": {"host": host, "swaps": []}})
    write_record(store.folder(key) / "run.json", {"key": key, "spelling": "Run()"})
    checkpoint.save(store.folder(key), {"model": {}, "ema": None})
    with pytest.raises(StoreError, match=r"outcome.json names .*download=True"):
        load_run(store.folder(key))


def test_the_file_is_read_where_the_user_asks_for_it(tmp_path: Path) -> None:
    """download=True: the named file is loaded first, and then replaced by the saved weights."""
    host = "vit_tiny_patch16_224(img_size=32, embed_dim=24, depth=1, num_heads=2, num_classes=3)"
    model = create_model(host, None)
    torch.save(model.state_dict(), tmp_path / "start.pth")
    about = read_record(save(model, tmp_path / "model") / "model.json")
    named = f"{about['host'][:-1]}, checkpoint_path={str(tmp_path / 'start.pth')!r})"
    write_record(tmp_path / "model" / "model.json", {**about, "host": named})
    with pytest.raises(StoreError, match="checkpoint_path="):
        load(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", download=True).head.weight, model.head.weight)


def test_what_a_model_started_from_is_not_saved(tmp_path: Path) -> None:
    assert local_host("a(x=1, pretrained=True)") == "a(x=1)"
    assert local_host("a(inner='b(pretrained=True, y=2)')") == "a(inner='b(y=2)')"
    check_local(tmp_path, {"host": HOST, "swaps": [{"mixer": "SKA()", "layers": {"blocks.0.attn": [3, 3, 0, 0]}}]})
    check_local(tmp_path, "vit(pretrained=False, checkpoint_path='')")


def test_evaluation_does_not_ask_for_the_weights_that_a_host_started_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "patch_size=4, depth=1, embed_dim=32, num_heads=2"
    file = tmp_path / "start.pth"
    torch.save(
        create_model(f"vit_tiny_patch16_224({small})", None, img_size=12, num_classes=10, in_chans=1).state_dict(), file
    )
    host = f"vit_tiny_patch16_224(checkpoint_path={str(file)!r}, {small})"
    train = ["train", "Linear()", "--host", host, "--device", "cpu", "--set", "recipe.epochs=1"]
    assert command([*train, "--results", str(tmp_path / "runs")]) == 0
    file.unlink()
    (folder,) = (tmp_path / "runs").iterdir()
    assert command(["eval", str(folder), "--json"]) == 0, capsys.readouterr().err
    assert command(["export", str(folder), "--onnx", str(tmp_path / "x.onnx")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("tool", ["mlflow", "tensorboard", "csv"])
def test_a_log_tells_nobody(tool: str, tmp_path: Path) -> None:
    if tool != "csv":
        pytest.importorskip(tool)
    short = ["--set", "recipe.epochs=1", "--set", "task.limit=32", "--device", "cpu", "--results", str(tmp_path)]
    host = ["--host", "vit_desk(size=8, patch=2, dim=16, depth=1, heads=2)"]
    assert command(["train", "Softmax()", "--data", "digits", *host, "--log", tool, *short]) in (0, 2)
    if tool == "mlflow":  # which asks nobody in tests either way
        assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
