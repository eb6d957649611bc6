"""Runs: keys, the loop, resuming, and what happens when something goes wrong."""

import base64
import ctypes
import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import needs_kernels
from regard import Softmax
from regard.core import ConfigError, StoreError
from regard.files.records import read_record, write_record
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.tasks import TASKS, Classification
from regard.lab.train import checkpoint, environment
from regard.lab.train.environment import resolved_device
from regard.lab.train.execute import execute, write_run_file
from regard.lab.train.load import load_run, load_trained
from regard.lab.train.loop import Loop
from regard.lab.train.optimizer import make_optimizer, param_groups
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run, read_run
from regard.lab.train.watch import Watch
from regard.measure.memory import PeakMemory
from regard.mixers.spelling import parse, spell
from stopped_runs import same, stop, weights
from tiny_task import Tiny

from .test_failures import in_child

SHORT = Recipe(epochs=3, batch=32, augment="none")


PLAIN = Run(task=Tiny(), recipe=SHORT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A store in which the plain run is finished, which no test changes."""
    store = Results(tmp_path_factory.mktemp("whole"))
    execute(PLAIN, store, device="cpu")
    return store


def test_an_outcome_has_what_reports_need(whole: Results) -> None:
    run, outcome = PLAIN, whole.outcome(PLAIN.key) or {}
    assert outcome["status"] == "done"
    bits = np.unpackbits(np.frombuffer(base64.b64decode(outcome["bits"]), np.uint8))[:128]
    assert 100 * bits.mean() == outcome["metrics"]["top1"]
    assert outcome["data"] == {**run.task.record(), "train": 128, "test": 128, "unit": "images"}
    assert outcome["parameters"] == sum(p.numel() for p in run.task.model(None, 0).parameters())
    assert min(outcome["seconds"], outcome["macs"], outcome["images_per_second"]) > 0 <= outcome["memory_bytes"]
    assert outcome["inference_per_second"] > 0
    assert {"machine", "python", "torch", "threads", "device", "precision"} <= set(outcome["environment"])
    assert len((whole.folder(run.key) / "metrics.csv").read_text().splitlines()) == 4


def test_a_finished_run_returns_at_once(whole: Results) -> None:
    assert execute(PLAIN, whole, device="cpu") == whole.outcome(PLAIN.key)


OWN = """
from dataclasses import dataclass
from regard import Softmax
SHARE = 0.5
def half(x): return SHARE * x
@dataclass(frozen=True, kw_only=True)
class Halved(Softmax):
    def operator(self, site): return half(super().operator(site))
def unused(): return 1
"""


@pytest.mark.parametrize(("old", "new", "told"), [("0.5", "0.25", True), ("return 1", "return 2", False)])
def test_who_edited_a_mechanism_is_told_that_results_are_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, old: str, new: str, told: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file, store = tmp_path / "own_attention.py", Results(tmp_path / "results")

    def execute_own() -> dict[str, Any]:
        monkeypatch.delitem(sys.modules, "own_attention", raising=False)
        mixer = importlib.import_module("own_attention").Halved
        return execute(Run(task=Tiny(extra=(mixer,)), mixer=mixer(), recipe=Recipe(epochs=1)), store, device="cpu")

    file.write_text(OWN)
    first = execute_own()
    assert execute_own() == first
    assert "edited" not in caplog.text
    file.write_text(OWN.replace(old, new))
    assert execute_own() == first
    assert ("the code of own_attention.Halved was edited" in caplog.text) == told
    assert ("raise the `revision`" in caplog.text) == told


def test_a_step_needs_no_more_batches_than_an_epoch_has(tmp_path: Path) -> None:
    run = Run(task=Tiny(), recipe=dataclasses.replace(SHORT, accumulate=5))
    with pytest.raises(ConfigError, match="accumulate=5: an epoch has 4 batches"):
        execute(run, Results(tmp_path), device="cpu")


def test_seeds_differ_and_repeat(tmp_path: Path, whole: Results) -> None:
    store, other = Results(tmp_path), dataclasses.replace(PLAIN, seed=1)
    for run in (PLAIN, other):
        execute(run, store, device="cpu")
    assert same(weights(whole, PLAIN), weights(store, PLAIN))
    assert not same(weights(whole, PLAIN), weights(store, other))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ctrl_c_keeps_a_checkpoint_from_which_the_bits_are_equal(tmp_path: Path, accumulate: int) -> None:
    recipe = dataclasses.replace(SHORT, batch=24, accumulate=accumulate)
    run = Run(task=Tiny(), recipe=recipe)
    whole, cut = Results(tmp_path / "whole"), Results(tmp_path / "cut")
    execute(run, whole, device="cpu")
    stop(run, cut, 5 // accumulate)
    execute(run, cut, device="cpu")
    assert same(weights(whole, run), weights(cut, run))


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Results(tmp_path)
    stop(PLAIN, store, 4)
    record = PLAIN.task.record()
    with monkeypatch.context() as context:
        context.setattr(Tiny, "record", lambda task: {**record, "checksum": "0" * 64})
        with pytest.raises(StoreError, match="5 steps on data with the checksum .*, but the checksum is now"):
            execute(PLAIN, store, device="cpu")
    assert execute(PLAIN, store, device="cpu")["status"] == "done"


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, whole: Results, caplog: pytest.LogCaptureFixture) -> None:
    cut = Results(tmp_path)
    stop(PLAIN, cut, 8, save_steps=3)
    last = cut.folder(PLAIN.key) / checkpoint.LAST
    assert last.with_name(checkpoint.PREVIOUS).exists()
    last.write_bytes(last.read_bytes()[:1000])
    execute(PLAIN, cut, device="cpu")
    assert "cannot be read" in caplog.text
    assert same(weights(whole, PLAIN), weights(cut, PLAIN))


def test_a_nan_loss_is_a_failed_outcome_with_its_step(tmp_path: Path) -> None:
    run = Run(task=Tiny(), recipe=dataclasses.replace(SHORT, lr=1e18, clip=0.0, warmup=0.0))
    outcome = execute(run, Results(tmp_path), device="cpu")
    assert (outcome["status"], outcome["diverged"]) == ("failed", True)
    assert outcome["step"] >= 1
    assert f"at step {outcome['step']}; try a smaller lr, more warmup or clip=1.0" in outcome["error"]


def test_a_test_loss_that_is_not_finite_is_a_failed_outcome(tmp_path: Path) -> None:
    """One step: its training loss is that of the first weights, and only the evaluation sees what became of them."""
    run = Run(task=Tiny(), recipe=Recipe(epochs=1, batch=128, augment="none", lr=1e18, warmup=0.0))
    outcome = execute(run, Results(tmp_path), device="cpu")
    assert (outcome["status"], outcome["diverged"], outcome["metrics"]) == ("failed", True, {})
    assert outcome["error"].startswith("the test loss is nan at step 0; try a smaller lr")


def test_accuracy_at_chance_is_called_diverged(tmp_path: Path) -> None:
    run = Run(task=Tiny(), recipe=dataclasses.replace(SHORT, lr=1e-9))
    outcome = execute(run, Results(tmp_path), device="cpu")
    assert outcome["diverged"]
    assert "no better than a trivial answer: top1" in outcome["notes"][0]


def test_metrics_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    table = Metrics(tmp_path / "metrics.csv", ("top1",))
    table.cut(0)
    for epoch in (1, 2, 3):
        table.append({"epoch": epoch, "step": epoch * 4})
    with table.path.open("a") as file:
        file.write("4,1")
    table.cut(9)
    assert [row["step"] for row in table.read()] == ["4", "8"]


def test_threads_of_the_first_start_are_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Results(tmp_path)
    try:
        torch.set_num_threads(2)
        stop(PLAIN, store, 4)
        torch.set_num_threads(1)
        assert execute(PLAIN, store, device="cpu")["environment"]["threads"] == 2
        assert torch.get_num_threads() == 1  # the next run of this process has its own
        assert "equal bit for bit" not in caplog.text
    finally:
        torch.set_num_threads(1)


@needs_kernels
def test_who_goes_on_in_another_way_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Results(tmp_path)
    monkeypatch.setenv("REGARD_NATIVE", "0")
    stop(PLAIN, store, 4)
    monkeypatch.setenv("REGARD_NATIVE", "1")
    outcome = execute(PLAIN, store, device="cpu")
    assert "started with compiled kernels False and continues with True" in caplog.text
    assert outcome["environment"]["compiled kernels"] is True


def test_the_device_that_was_used_is_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Results(tmp_path)
    stop(PLAIN, store, 4, device="auto")
    path = store.folder(PLAIN.key) / "run.json"
    begun = read_record(path)
    assert begun["device"] == resolved_device("auto") != "auto"
    stop(PLAIN, store, 8, device=begun["device"])
    assert "equal bit for bit" not in caplog.text
    write_record(path, {**begun, "device": "another"})
    write_run_file(PLAIN, path.parent, "cpu", 1)
    assert "started with device another and continues with cpu" in caplog.text


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs clear_refs, which Linux has")
def test_peak_memory_is_that_of_one_run() -> None:
    """What the process held before, and what a run gave back, is not counted, also where the allocator keeps pages."""

    def work() -> str:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, as in workers
        libc.mallopt(-1, 2**31 - 1)
        torch.ones(8, 2**18).sum()  # the pages of the library itself
        found = []
        for megabytes in (256, 1, 128):
            peak = PeakMemory(torch.device("cpu"))
            torch.ones(megabytes, 2**18).sum()
            found.append(peak.bytes() or 0)
        return " ".join(map(str, found))

    large, small, middle = (int(number) / 2**20 for number in in_child(work).split())
    assert 240 < large < 280
    assert small < 16
    assert 120 < middle < 144


def test_a_start_gives_its_weights_and_is_trained_where_it_has_none(tmp_path: Path, whole: Results) -> None:
    """Once its folder is gone: after an import, which brings outcomes alone, nobody knows what is wanted."""
    still = dataclasses.replace(SHORT, lr=1e-12, weight_decay=0.0)
    store, run = Results(tmp_path), Run(task=Tiny(), recipe=still, seed=1, start=PLAIN)
    store.finish(PLAIN.key, whole.outcome(PLAIN.key) or {})
    with pytest.raises(StoreError, match=f"run {PLAIN.key} has no checkpoint.*without weights .*: delete the folder"):
        execute(run, store, device="cpu")
    shutil.rmtree(store.folder(PLAIN.key))
    execute(run, store, device="cpu")
    assert store.status(PLAIN.key) == "done"
    before, after = load_trained(PLAIN, store).state_dict(), load_trained(run, store).state_dict()
    assert all(torch.allclose(value, after[name], atol=1e-6) for name, value in before.items())


def test_the_best_evaluation_of_the_validation_part_is_kept_beside_the_last(tmp_path: Path) -> None:
    """The learning rate is absurd at the end of the rise, so that an early evaluation is the best."""
    run = Run(task=Tiny(val=0.5), recipe=dataclasses.replace(SHORT, epochs=8, lr=0.3, warmup=0.9, clip=0.0))
    outcome = execute(run, Results(tmp_path), device="cpu")
    lines = Metrics(tmp_path / run.key / "metrics.csv").read()
    scores = [(float(line["top1"]), int(line["step"])) for line in lines]
    top = max(score for score, _ in scores)
    assert top > scores[-1][0], "the last evaluation is the best: this proves nothing"
    first = next(step for score, step in scores if score == top)
    assert outcome["best"] == {"step": first, "top1": top}
    best = load_run(tmp_path / run.key, (Tiny,), best=True)
    validation = run.task.validation()
    assert validation.score(best, torch.device("cpu")).metrics["top1"] == top
    last = load_trained(run, Results(tmp_path))
    assert validation.score(last, torch.device("cpu")).metrics["top1"] == scores[-1][0]
    assert run.task.score(last, torch.device("cpu")).metrics["top1"] == outcome["metrics"]["top1"]


def test_without_a_validation_part_there_are_no_best_weights(tmp_path: Path, whole: Results) -> None:
    """Test images choose nothing; best.ckpt of an older version, which they chose, is not used."""
    store = Results(shutil.copytree(whole.root, tmp_path / "copy"))
    folder = store.folder(PLAIN.key)
    assert (store.outcome(PLAIN.key) or {})["best"] is None
    assert not (folder / checkpoint.BEST).exists()
    checkpoint.save_best(folder, {}, 1, 99.0)
    with pytest.raises(StoreError, match=r"has no best weights.*--val 0\.1, or leave best out"):
        load_run(folder, best=True)


def test_an_interrupted_run_keeps_the_same_best(tmp_path: Path) -> None:
    """Stopped after a better evaluation that no checkpoint covers: the same best is there in the end."""
    run = Run(task=Tiny(val=0.5, limit=256), recipe=dataclasses.replace(SHORT, epochs=8, lr=0.3, warmup=0.9, clip=0.0))
    whole, cut = Results(tmp_path / "whole"), Results(tmp_path / "cut")
    expected = execute(run, whole, device="cpu")["best"]
    stop(run, cut, expected["step"] + 4)  # the end of the next epoch
    last = cut.folder(run.key) / checkpoint.LAST
    assert (cut.folder(run.key) / checkpoint.BEST).exists()
    last.unlink()  # as if it had been killed before any checkpoint
    (cut.folder(run.key) / checkpoint.PREVIOUS).unlink(missing_ok=True)
    assert execute(run, cut, device="cpu")["best"] == expected
    first, second = (checkpoint.load_best(store.folder(run.key)) for store in (whole, cut))
    assert same(first["model"], second["model"])


def test_keys_depend_on_what_matters_alone() -> None:
    assert len(PLAIN.key) == 12
    assert int(PLAIN.key, 16) >= 0
    lower = dataclasses.replace(SHORT, lr=1e-3)
    changes = ({"seed": 1}, {"mixer": Softmax()}, {"removed": True}, {"start": Run(task=Tiny())}, {"recipe": lower})
    assert len({PLAIN.key, *(dataclasses.replace(PLAIN, **change).key for change in changes)}) == 6
    assert dataclasses.replace(PLAIN, task=Tiny(download=True)).key == PLAIN.key


@pytest.mark.parametrize(
    "host", ["vit_desk(dim=32, depth=2)", " vit_desk( dim = 32,depth=2 )", "vit_desk(dim=32, depth=2,)"]
)
def test_a_key_does_not_depend_on_how_a_host_is_spelled(host: str) -> None:
    run = Run(task=Classification(host="vit_desk(dim=32, depth=2)", data="digits", size=(8, 8)))
    assert dataclasses.replace(run, task=dataclasses.replace(run.task, host=host)).key == run.key
    plain = [
        dataclasses.replace(run, task=dataclasses.replace(run.task, host=name)) for name in ("vit_desk", "vit_desk()")
    ]
    assert len({one.key for one in (run, *plain)}) == 2


def test_a_run_is_read_back_from_its_spelling(tmp_path: Path) -> None:
    task = Classification(host="vit_desk(size=12, patch=2)", data="digits-canvas", size=(12, 12))
    run = Run(task=task, mixer=Softmax(dwc=3), recipe=Recipe(betas=(0.9, 0.99)), start=Run(task=task, removed=True))
    assert parse(spell(run), extra=(*TASKS, Recipe, Run)) == run
    with pytest.raises(StoreError, match="has no run"):
        read_run(Results(tmp_path), "0" * 12)


def test_vectors_and_positions_have_no_weight_decay() -> None:
    model = Tiny().model(None, 0)
    decayed, spared = param_groups(model, 0.05)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.05, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert any(parameter is model.pos_embed for parameter in spared["params"])


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_one(tmp_path: Path, whole: Results) -> None:
    """The same rates, losses and accuracies to the last bit; cut off in the middle, it goes on to the same end."""
    early = Run(task=Tiny(), recipe=dataclasses.replace(SHORT, stop_after=2))
    two, cut = (Results(tmp_path / name) for name in ("two", "cut"))
    assert execute(early, two, device="cpu")["status"] == "done"
    curves = [
        [{**line, "seconds": "", "checksum": ""} for line in Metrics(store.folder(run.key) / "metrics.csv").read()]
        for store, run in ((whole, PLAIN), (two, early))
    ]
    assert [line["step"] for line in curves[1]] == ["4", "8"]
    assert curves[0][:2] == curves[1]
    stop(early, cut, 4)
    execute(early, cut, device="cpu")
    assert same(weights(cut, early), weights(two, early))
    assert len({PLAIN.key, early.key, Run(task=Tiny(), recipe=dataclasses.replace(SHORT, epochs=2)).key}) == 3


@pytest.mark.untyped
@pytest.mark.slow
def test_a_compiled_run_learns_the_same_and_goes_on_with_the_same_bits(tmp_path: Path, whole: Results) -> None:
    compiled, cut = (Results(tmp_path / name) for name in ("compiled", "cut"))
    outcome = execute(PLAIN, compiled, device="cpu", watch=Watch(compile=True))
    stop(PLAIN, cut, 4, compile=True)
    execute(PLAIN, cut, device="cpu", watch=Watch(compile=True))
    assert same(weights(compiled, PLAIN), weights(cut, PLAIN))
    for name, value in weights(whole, PLAIN).items():
        torch.testing.assert_close(weights(compiled, PLAIN)[name], value, rtol=1e-3, atol=1e-4)
    known = whole.outcome(PLAIN.key) or {}
    assert [one["environment"]["torch.compile"] for one in (known, outcome)] == [False, True]


@pytest.mark.untyped
@pytest.mark.slow
def test_every_run_of_a_process_is_compiled(tmp_path: Path) -> None:
    frames = torch._dynamo.utils.counters["frames"]
    with torch._dynamo.config.patch(recompile_limit=1):
        for dropout in (0.1, 0.2, 0.3):
            before = frames["ok"]
            run = Run(task=Tiny(dropout=dropout), recipe=dataclasses.replace(SHORT, epochs=1))
            execute(run, Results(tmp_path), device="cpu", watch=Watch(compile=True))
            assert frames["ok"] > before


@pytest.mark.untyped
@pytest.mark.slow
def test_a_compiler_that_fails_leaves_the_run_for_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Results(tmp_path)
    torch.compiler.reset()  # nothing that an earlier test compiled is taken
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    without_caches = torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": ("/no/such/compiler",)})
    refused = pytest.raises(ConfigError, match="without --compile the run is trained in eager mode")
    with without_caches, refused:
        execute(PLAIN, store, device="cpu", watch=Watch(compile=True))
    assert store.outcome(PLAIN.key) is None
    assert execute(PLAIN, store, device="cpu")["status"] == "done"


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize(("precision", "kind"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_networks_of_another_dtype_are_evaluated_and_counted(
    tmp_path: Path, precision: str, kind: torch.dtype, ema: float
) -> None:
    run = Run(task=Tiny(), recipe=dataclasses.replace(SHORT, precision=precision, ema=ema))
    alone, stopped = Results(tmp_path / "alone"), Results(tmp_path / "stopped")
    outcome = execute(run, alone, device="cpu")
    assert (outcome["status"], outcome["macs"] > 0) == ("done", True)
    assert {value.dtype for value in weights(alone, run).values()} == {kind}
    stop(run, stopped, 4)
    assert execute(run, stopped, device="cpu")["bits"] == outcome["bits"]
    assert same(weights(alone, run), weights(stopped, run))


def test_half_precision_with_a_scaled_loss_needs_a_gpu(tmp_path: Path) -> None:
    run, store = Run(task=Tiny(), recipe=dataclasses.replace(SHORT, precision="16-mixed")), Results(tmp_path)
    with pytest.raises(ConfigError, match="16-mixed needs a GPU"):
        execute(run, store, device="cpu")
    assert store.status(run.key) == "new"


def test_the_scale_of_the_loss_is_kept(tmp_path: Path) -> None:
    """The scaler of 16-mixed, here on the CPU: AdamW is clipped, and a run that goes on has the scale that it had."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision.amp import MixedPrecision

    def loop() -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))
        recipe = dataclasses.replace(SHORT, precision="16-mixed")
        return Loop(Tiny(), recipe, 0, Tiny().model(None, 0), fabric, tmp_path, Watch(), PeakMemory(fabric.device))

    first, second = loop(), loop()
    batches = first._batches(0, 4)
    for first.step in range(4):
        first._train_step(batches)
    first.save()
    second.resume()
    scalers = [one.fabric.strategy.precision.state_dict() for one in (first, second)]
    assert scalers[0]["scale"] < 2.0**40
    assert scalers[0] == scalers[1]


def test_optimizers_keep_their_own_number_of_betas_or_are_refused() -> None:
    model = torch.nn.Linear(3, 2)
    assert make_optimizer(model, Recipe(optimizer="adamw")).defaults["betas"] == (0.9, 0.98)
    assert len(make_optimizer(model, Recipe(optimizer="adan")).defaults["betas"]) == 3
    assert make_optimizer(model, Recipe(optimizer="adamw", betas=(0, 0.98))).defaults["betas"] == (0.0, 0.98)
    with pytest.raises(ConfigError, match="second derivatives"):
        make_optimizer(model, Recipe(optimizer="adahessian"))
    for name in ("adan", "adagrad"):
        with pytest.raises(ConfigError, match=f"{name} has no two betas.*leave betas out"):
            make_optimizer(model, Recipe(optimizer=name, betas=(0.5, 0.6)))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="fusedadam is not available here: CUDA"):
            make_optimizer(model, Recipe(optimizer="fusedadam"))


def test_speed_counts_the_images_that_there_are(tmp_path: Path) -> None:
    run = Run(task=Tiny(limit=16), recipe=dataclasses.replace(SHORT, batch=64))
    outcome = execute(run, Results(tmp_path), device="cpu")
    assert outcome["images_per_second"] == pytest.approx(3 * 16 / outcome["seconds"], rel=0.05)


@pytest.mark.parametrize("threads", [-1, 0, 2**20, "4"], ids=repr)
def test_a_number_of_threads_that_no_machine_has_is_refused(threads: object, tmp_path: Path) -> None:
    store = Results(tmp_path)
    path = store.folder(PLAIN.key) / "run.json"
    write_run_file(PLAIN, path.parent, "cpu", 1)
    write_record(path, {**read_record(path), "threads": threads})
    with pytest.raises(StoreError, match="does not describe a run"):
        execute(PLAIN, store, device="cpu")


def test_the_code_of_a_run_is_the_commit_of_this_tree() -> None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("this is no checkout")
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    if Path(environment.__file__).is_relative_to(root):
        assert commit.startswith(environment.code_version().rstrip("+"))
