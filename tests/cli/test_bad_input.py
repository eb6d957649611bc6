"""Wrong input on the command line: what came, what was expected, what to do; an exit code, and never a traceback.

The tests are `untyped`, since annotation checks would answer before the package does.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from command_line import answer, refused
from layouts_of_boxes import standard
from photos import class_folders
from regard.cli.app import run
from regard.files.atomic import json_text
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.load import load_run
from regard.lab.train.run import read_run

pytestmark = pytest.mark.untyped

HOST = "vit_desk(size=12, patch=2, dim=8, depth=1, heads=2)"
OWN = "vit_desk(size=14, patch=2, dim=8, depth=1, heads=2)"
ON = f"--host '{HOST}' --set recipe.epochs=1"
TRAIN = f"train Softmax {ON}"
STUDY = "study run quickstart"
MAPS = "maps 'vit_desk(size=(12, 20), patch=4, dim=16, depth=2, heads=2)'"
KERNELS = "DynamicConv(kernel=3, groups=4)"
OFFSETS = "maps 'attended_resnet18(stem=1, img_size=12, stages=(2, 3), heads=2, in_chans=1, deformable=True)' digit"
LARGE = "'vit_tiny_patch16_224(depth=1)'"
"""A model for 224 x 224, where the default data are 12 x 12, less than a patch."""

WRONG: tuple[tuple[str, ...], ...] = (
    # verbs and their arguments
    ("lst", "list"),
    ("card", "Missing argument"),
    ("cost Softmax --gird 4x4", "--grid"),
    ("list mixer", "did you mean mixers"),
    ("list --match zzz", "no name of mixers matches 'zzz'"),
    ("check ''", "MECHANISM is empty"),  # as of an unset variable: all mechanisms would be checked
    *((f"cost SKA --import {name}", "a module of your own") for name in ("regard", "regard.mixers", "__main__")),
    ("advise --tokens 0 --dim 384", "give --tokens (or --grid) and --dim, both above 0"),
    ("finetune vit_desk --data digits", "vit_desk has no published weights", "--weights"),
    (f"{TRAIN} --set task.val_seed=3", "val_seed draws the share val", "val is 0"),
    # mechanisms
    ("card None", "needs a mechanism, not None"),
    ("check 'SNE()'", "SNE"),
    (f"train Sofmax {ON}", "unknown name 'Sofmax'", "did you mean Softmax?"),
    (f"train 'MiTA(mm=9)' {ON}", "MiTA has no 'mm'", "it has", " m,", " k,"),
    (f"""train "MiTA(m='a')" {ON}""", "MiTA has m='a'", "a whole number"),
    (f"train 'MiTA(m=7, k=4)' {ON}", "7 windows cannot be laid on 6x6 ", "nearest possible: 5, 6, 8, 9"),
    (f"train 'MiTA(m=9, k=37)' {ON}", "k=37", "has 36 keys", "choose k between 1 and 36"),
    (f"train 'Softmax(projection=FSNE(code=0))' {ON}", "code"),
    (f"""train "__import__('os')" {ON}""", "unknown name '__import__'", "known: "),
    ("cost 'MiTA(m=7, k=4)' --grid 6x6", "nearest possible: 5, 6, 8, 9"),
    ("bench 'MiTA(m=9, k=40)' --grid 6x6", "choose k between 1 and 3"),
    # costs and times
    ("cost Softmax --grid 4by4", "expected height x width"),
    ("cost Softmax --size 32x32", "give --host"),
    ("cost host", "needs --host"),
    ("cost Softmax --accounting mine", "executed or paper"),
    ("cost Softmax --dim 10 --heads 3", "--dim 10 is not a multiple of 3 heads"),
    *((f"cost {mixer} --host {LARGE} --size 7x7", "does not take inputs of 3x7x7") for mixer in ("SKA", "None")),
    ("cost SKA --host vit_desk --grid 64x64", "--grid is of one layer: leave it out with --host"),
    ("cost SKA --host vit_desk --heads 4", "--heads is of one layer"),
    ("taxonomy --strategy rout", "rows have: both; compress; none; route"),
    ("bench SKA --model vit_desk --dim 64", "--dim is of one mechanism: leave it out with --model"),
    ("bench SKA --model vit_desk --part operator", "--part is of one mechanism"),
    ("bench SKA --model vit_desk --grid 4x4", "give --size"),
    ("bench SKA --size 32", "give --model too"),
    ("bench SKA --part head", "unknown part"),
    ("bench SKA --model deit_tinny_patch16_224", "did you mean"),
    ("bench Softmax --dtype fp31", "did you mean fp"),
    *((f"bench SKA --seconds {seconds}", f"seconds is {seconds}; a finite number") for seconds in ("nan", "inf")),
    ("bench SKA --grid 3x3 --seconds -1", "seconds", "-1"),
    ("bench SKA --grid 3x3 --batch 0", "batch", "0"),
    ("bench SKA --grid 3x3 --device tpu", "device", "tpu"),
    ("advise vit_desk --minutes 1", "--minutes needs --data"),
    ("advise vit_desk --data digits --dtype bf16", "--dtype is for costs and times"),
    ("swap-check vit_desk SKA --images 30", "--images needs --data"),
    ("swap-check deit_tinny_patch16_224 SKA", "did you mean"),
    ("swap-check resnet18 SKA", "no attention module"),
    # hosts
    ("train Softmax --host vit_dsk", "there is no host 'vit_dsk'", "vit_desk"),
    ("train Softmax --host 'vit_desk(siz=12)'", "it has no 'siz'", "did you mean", "size"),
    ("train Softmax --host 'vit_desk(size=13, patch=4)' --size 13", "13x13 cannot be cut into patches of 4x4"),
    ("train Softmax --host 'vit_desk(dim=-4)'", "dim"),
    ("train Softmax --host 'vit_desk(patch=0)'", "patch"),
    ("""train Softmax --host "vit_desk(size='a')" """, "size"),
    ("""train Softmax --host "vit_desk(mlp_ratio='x')" """, "mlp_ratio"),
    ("train Softmax --host 'vit_tiny_patch16_224(patch_size=0)'", "patch"),
    (f"train SKA --host {LARGE}", "does not take inputs of 1x12x12", "img_size=, patch_size="),
    (f"train None --host {LARGE}", "does not take inputs of 1x12x12", "img_size=, patch_size="),
    ("train SKA --host 'deit_tiny_patch16_224(pretrained=True)'", "with --set task.init=host"),
    # runs
    (f"{TRAIN} --size 11", "takes images of 12x12, the task has 11x11"),
    (f"{TRAIN} --size 12by12", "'12by12' is not a size", "such as 224x224"),
    (f"{TRAIN} --data digit", "unknown data set 'digit'", "did you mean digits"),
    (f"{TRAIN} --data /no/such/folder", "/no/such/folder does not exist", "class folders"),
    (f"{TRAIN} --data-root /no/such --data cifar10", "--data-root /no/such is not a folder"),
    (f"{TRAIN} --data-root ' '", "--data-root is empty; give a value, or leave it out"),
    (f"{TRAIN} --set recipe.lrr=1", "'recipe.lrr'", "did you mean recipe.lr"),
    (f"{TRAIN} --set recipe.lr=abc", "recipe.lr is a number, not 'abc'"),
    (f"{TRAIN} --set recipe.revision=2", "--set has no field 'recipe.revision'"),
    (f"{TRAIN} --set recipe.batch=1.5", "recipe.batch is a whole number, not 1.5"),
    (f"{TRAIN} --set task.limit=1.5", "task.limit is a whole number, not 1.5"),
    (f"{TRAIN} --set recipe.betas=0.9", "recipe.betas is several numbers"),
    (f"{TRAIN} --set recipe.augment=crp", "unknown augment 'crp'", "did you mean crop"),
    (f"{TRAIN} --set task.init=foo", "--set task.init=foo:", "init is zero, fan_in or host"),
    (f"{TRAIN} --set recipe.optimizer=adamww", "unknown optimizer", "did you mean adamw"),
    (f"{TRAIN} --set 'task.size=(8.5,8.5)'", "size"),
    (f"{TRAIN} --set task.host=5", "host"),
    (f"{TRAIN} --set task.data=5", "data"),
    (f"{TRAIN} --set task.extra=1", "--set has no field 'task.extra'"),
    (f"{TRAIN} --set task.limit=8 --set task.limit=9", "task.limit is set to 8 and to 9"),
    (f"{TRAIN} --set task.digest=bytes --digest index", "task.digest is set to bytes and to index"),
    (f"{TRAIN} --set task.host=vit_desk", "task.host is set to vit_desk(", "set it once"),
    (f"{TRAIN} --set ''", "--set is empty"),
    ("train SKA --set recipe.epochs=0", "--set recipe.epochs=0: epochs"),
    (f"{TRAIN} --digest bytes", "--digest is for your own images, and digits-canvas is a built-in set"),
    (f"{TRAIN} --precision bf16", "--set recipe.precision=bf16: precision is one of", "not 'bf16'"),
    (f"{TRAIN} --device gpu", "--device is auto, cpu, cuda or mps, not 'gpu'"),
    (f"{TRAIN} --workers -1", "--workers is 0 or more, at most 1024, not -1"),
    (f"{TRAIN} --seed -1", "seed is 0 or more, not -1"),
    (f"{TRAIN} --seed {10**20}", f"seed is below 2^63, not {10**20}"),
    (f"{TRAIN} --nodes 2", "torchrun --nnodes 2"),
    (f"{TRAIN} --log csv --log wandb", "--log is given 2 times; give it once"),
    (f"{TRAIN} --log wand", "--log is one of csv, tensorboard, wandb, mlflow, not 'wand'"),
    (f"{TRAIN} --results a --results b", "--results is given 2 times"),
    *((f"train SKA --val {share}", "--val is a share between 0 and 1") for share in ("1.5", "0")),
    (f"eval {12 * '0'}", "has no run", "regard results list"),
    ("finetune no_such_thing --data digits", "no saved folder, no run in results and no model of timm"),
    ("finetune . --data digits", "neither a saved model"),
    # maps
    (f"{MAPS} --mixer Softmax --show terms", "has no terms to show; it has maps"),
    (f"{MAPS} --mixer '{KERNELS}' --show maps", "has no maps to show; it has kernels"),
    (f"{MAPS} --mixer '{KERNELS}' --head 4", "give all, mean or 0 to 3"),
    (f"{MAPS} --mixer XCA", "has nothing to show"),
    (f"{MAPS} --show offset", "did you mean offsets"),
    (f"{OFFSETS} --show kernels", "has no kernels to show; it has offsets"),
    (f"{OFFSETS} --layer 'blocks.*'", "no deformable convolution of maps matches 'blocks.*'; there are layer2"),
    (f"{OFFSETS} --query 6,0", "query 6,0 is outside 6x6"),
    # studies
    ("study run quikstart", "did you mean quickstart?"),
    ("study status quikstart", "did you mean quickstart?"),
    ("study status --scale desc", "no scale 'desc'; did you mean desk"),
    ("study export quikstart", "did you mean quickstart?"),
    ("study export quickstart --format xml", "no format 'xml'"),
    ("study export quickstart --results /nowhere", "no results of quickstart"),
    (f"{STUDY} --set recipe.epochs=many", "--set recipe.epochs is a whole number, not 'many'"),
    (f"{STUDY} --set recipe.epoch=1", "--set has no field 'recipe.epoch'; did you mean recipe.epochs"),
    (f"{STUDY} --set task.data=digits", "--set has no field 'task.data'"),
    (f"{STUDY} --set recipe.epochs=1 --set recipe.epochs=2", "recipe.epochs is set to 1 and to 2"),
    (f"{STUDY} --set recipe.epochs=0", "epochs, batch and accumulate are at least 1, not 0"),
    (f"{STUDY} --on slrum", "did you mean slurm"),
    (f"{STUDY} --on slurm --workers 2", "--on slurm takes --cpus and --memory and --slurm: leave out --workers"),
    (f"{STUDY} --on ray --slurm partition=gpu", "leave out --slurm"),
    (f"{STUDY} --on local --cpus 2", "--on local takes --workers: leave out --cpus"),
    (f"{STUDY} --on local --nodes 2", "--nodes 2 needs a scheduler: take --on slurm, or train one run with: torchrun"),
    (f"{STUDY} --on slurm://head", "there is no place 'slurm://head'"),
    ("study import nothing", "there is no file or folder nothing"),
    ("study run", "give the name of a study (`regard study list` shows all), or --all"),
    (f"{STUDY} --rows Softmx", "no row of quickstart matches 'Softmx'"),
    (f"{STUDY} --scale smoke --rows SKB", "did you mean SKA"),
    (f"{STUDY} --scale paper", "no scale 'paper'"),
    (f"{STUDY} --seeds 0", "1 to 10000, not 0"),
    (f"{STUDY} --data digit", "did you mean digits"),
    (f"{STUDY} --host vit_tinny_patch16_224", "vit_tiny_patch16_224"),
    (f"{STUDY} --workers 999999999999", "--workers is 0 or more, at most 1024"),
    (f"{STUDY} --size 12x", "height x width"),
    (f"{STUDY} --dry-run --seeds 0 --fresh", "leave out --seeds, --fresh"),
    (f"{STUDY} --dry-run --on ray --cpus 2", "leave out --on, --cpus"),
    (f"{STUDY} --on ray --memory inf", "Invalid value for '--memory'"),
    (f"{STUDY} --all --decide", "or --all for all of them"),
    ("study run esa_costs --seeds 3 --dry-run", "which trains nothing: leave out --seeds, --dry-run"),
    ("study run mita_fig9 --data-root /nowhere", "--data-root /nowhere is not a folder"),
    ("study run --all --scale desk", "--all plans which studies to decide, each as it is: add --decide"),
    ("study run --all --decide --rows SKA", "each as it is: leave out --rows"),
    ("study run --all --decide", "smoke scale judges no claim"),
    ("study run --all --decide --scale desk --hours 0", "--hours is a positive number, not 0"),
    # probes
    ("probe SKA --abilities contents", "no ability 'contents'; did you mean content"),
    ("probe SKA --boards bords", "there are no 'bords'"),
    ("probe SKA --scale paper", "desk or smoke, not 'paper'"),
    ("probe all SKA", "all stands alone"),
    ("probe SKA --sweep --abilities place", "leave out --abilities"),
    # folders of results
    *((f"{verb} --results /no/such", "/no/such") for verb in ("results list", "results prune", "report")),
    ("study status --results nowhere", "no folder of results nowhere"),
)
"""A command, and what its message says."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty; no digest that was kept before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0].replace(ON, "..."))
def test_wrong_use_is_2_with_a_message(case: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *messages = case
    assert run(shlex.split(command)) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith(("regard: ", "Error: "))
    assert "Traceback" not in shown.err
    assert not shown.out
    for message in messages:
        assert message in shown.err
    assert not list(here.iterdir())


@pytest.mark.parametrize("command", [["bench", "Softmax"], ["advise", "vit_desk"]], ids=["bench", "advise"])
@pytest.mark.parametrize("device", ["mps", "auto"])
def test_times_are_taken_where_there_is_a_clock(capsys, monkeypatch, command: list[str], device: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    refused(capsys, [*command, "--device", device], "nothing can be timed on 'mps'", "the device is cpu or cuda")


def test_a_dry_run_of_what_cannot_be_built_says_so_beside_its_table(capsys) -> None:
    """Also with --json, whose readers see standard error only."""
    arguments = ["study", "run", "quickstart", "--rows", "Softmax", "--host", "resnet18", "--dry-run"]
    assert run([*arguments, "--json"]) == 1
    shown = capsys.readouterr()
    progress, line = shown.err.strip().splitlines()
    assert progress == "softmax, row 1 of 1"
    assert line.startswith("regard: 1 of 1 rows cannot be built, the first of them softmax: ")
    assert json.loads(shown.out)[0]["error"] in line


# the user's own data


@pytest.fixture
def images(here: Path) -> Path:
    """Two folders of ten images."""
    return class_folders(here / "data", ("class0", "class1"), 10, 24, 20)


def table(images: Path, labels: list, names: str = "") -> Path:
    made = pyarrow.table({"image": [file.read_bytes() for file in sorted(images.rglob("*.png"))], "label": labels})
    pyarrow.parquet.write_table(made.replace_schema_metadata({"class_names": names} if names else {}), "t.parquet")
    return Path("t.parquet")


def on(data: Path, *more: str) -> list[str]:
    return ["train", "Softmax", "--host", OWN, "--size", "14", "--set", "recipe.epochs=1", "--data", str(data), *more]


def test_an_empty_folder(capsys, here: Path) -> None:
    (here / "empty").mkdir()
    refused(capsys, on(here / "empty"), str(here / "empty"), "no images", "one folder for each class")


def test_one_class_only(capsys, here: Path, images: Path) -> None:
    refused(capsys, on(class_folders(here / "one", ["class0"])), "only one class folder (class0)", "at least two")
    refused(capsys, on(table(images, [0] * 20)), "only one class (label 0)", "at least two")


@pytest.mark.parametrize(
    ("labels", "names", "messages"),
    [
        ([0, 7] * 10, '["cat", "dog"]', "label 7 of row 1 is outside 0..1"),
        ([0, -1] * 10, "", "label -1 of row 1 is outside"),
        ([0, 1] * 10, "cat, dog", "class_names in its metadata is not a JSON list"),
        ([0, 1] * 10, "2", "class_names in its metadata is not a JSON list"),
        (["a", "b"] * 10, "", "expected one whole number"),
    ],
    ids=["above", "below", "no JSON", "no list", "words"],
)
def test_a_label_out_of_range(capsys, images: Path, labels: list, names: str, messages: str) -> None:
    refused(capsys, on(table(images, labels, names)), "t.parquet", messages)


def test_a_damaged_parquet(capsys) -> None:
    Path("bad.parquet").write_bytes(b"no table")
    refused(capsys, on(Path("bad.parquet")), "bad.parquet cannot be read as parquet")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_damaged_image_is_named_and_training_stops_or_goes_on(capsys, images, monkeypatch, in_memory: bool) -> None:
    bad = images / "class1" / "3.png"
    bad.write_bytes(bad.read_bytes()[:40] if in_memory else b"no picture")
    if in_memory:
        refused(capsys, on(images), str(bad), "cannot be read as an image", "--set task.corrupt=skip")
    else:
        monkeypatch.setattr("regard.images.own.IN_MEMORY", 0)
    sizes = answer(capsys, *on(images, "--set", "task.corrupt=skip"))["data"]
    assert sizes["train"] + sizes["test"] == 19


def test_an_image_that_went_missing_is_named(capsys, images: Path) -> None:
    """A link whose picture is gone."""
    gone = images / "class1" / "3.png"
    gone.unlink()
    gone.symlink_to(images / "nowhere.png")
    refused(capsys, on(images), str(gone), "cannot be read as an image")


# results, checkpoints and saved models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    results = tmp_path_factory.mktemp("trained") / "results"
    assert run([*shlex.split(TRAIN), "--results", str(results)]) == 0
    (folder,) = results.iterdir()
    return folder


@pytest.fixture
def finished(trained: Path, here: Path) -> Path:
    """A copy of it in the results of the current folder."""
    return Path(shutil.copytree(trained, here / "results" / trained.name))


def test_a_run_is_named_by_its_key_or_its_folder(capsys, tmp_path: Path, finished: Path) -> None:
    first = answer(capsys, "eval", finished.name)
    assert answer(capsys, "eval", str(finished), "--results", str(tmp_path / "elsewhere")) == first
    assert run(["maps", finished.name, "digit", "--out", "maps.png"]) == 0
    assert Path("maps.png").stat().st_size > 1000


def test_a_run_is_scored_in_its_own_precision(capsys) -> None:
    outcome = answer(capsys, *shlex.split(TRAIN), "--precision", "bf16-mixed")
    assert answer(capsys, "eval", outcome["key"])["metrics"] == outcome["metrics"]


def test_other_data_are_scored_as_the_run_saw_its_own(capsys, here: Path, images: Path) -> None:
    """Normalised by the statistics of the training, by classes of the same names."""
    key = answer(capsys, *on(images))["key"]
    model = load_run(here / "results" / key)
    task = read_run(Results("results"), key).task
    record = (Results("results").outcome(key) or {})["data"]
    darker = shutil.copytree(images, here / "darker")
    files = sorted(darker.rglob("*.png"))  # no test images of their own: all are scored, in the order of their names
    for file in files:
        Image.eval(Image.open(file), lambda value: value // 4).save(file)
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    labels = np.array([int(file.parent.name[-1]) for file in files])
    mean, std = (torch.tensor(one) for one in task.statistics())
    with torch.no_grad():
        inputs = torch.from_numpy(pixels[:, :14, :14].copy()) / 255  # of one colour each, at every size
        expected = model(((inputs - mean) / std).permute(0, 3, 1, 2)).argmax(-1).numpy() == labels
    found = task.score_on(str(darker), model, torch.device("cpu"), record)
    assert found.samples.tolist() == expected.tolist()
    assert answer(capsys, "eval", key, "--data", str(darker))["images"] == len(labels)
    assert abs(task.on(str(darker)).statistics()[0][0] - mean[0]) > 0.1
    named = shutil.copytree(images, here / "named")
    (named / "class0").rename(named / "zebra")
    refused(capsys, ["eval", key, "--data", str(named)], "do not have: zebra")
    refused(capsys, ["eval", key, "--data", str(darker), "--split", "held"], "--split is for a run's own data")


def test_grey_images_and_coloured_ones(capsys, here: Path, finished: Path) -> None:
    ten = class_folders(here / "ten", map(str, range(10)))
    refused(capsys, ["eval", finished.name, "--data", str(ten)], "takes images of 1 channels", "has 3")


def test_wrong_numbers_for_a_finished_run(capsys, finished: Path) -> None:
    start = ["eval", finished.name, "--retune"]
    refused(capsys, [*start, "k=x"], "--retune takes whole numbers", "k=x")
    refused(capsys, [*start, "k"], "expected NAME=VALUE")
    refused(capsys, [*start, "k=3"], "Softmax has no 'k'")


def test_another_mechanism_for_a_finished_run(capsys, finished: Path) -> None:
    """Top-k attention of all 36 keys is softmax; another mechanism is another network; what is untrained is named."""

    def loss(*mixer: str) -> tuple[float, str]:
        assert run(["eval", finished.name, "--json", *mixer]) == 0
        shown = capsys.readouterr()
        return json.loads(shown.out)["metrics"]["loss"], shown.err

    plain, _ = loss()
    same, messages = loss("--mixer", "TopK(k=36)")
    assert same == pytest.approx(plain, abs=1e-5)
    assert "untrained" not in messages
    other, messages = loss("--mixer", "Agent(m=4, bias=True)")
    assert abs(other - plain) > 1e-5
    assert "untrained" in messages
    refused(capsys, ["eval", finished.name, "--mixer", "Sofmax()"], "Softmax")
    refused(capsys, ["eval", finished.name, "--mixer", "None"], "this verb needs a mechanism, not None")


def foreign(last: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, last)


def of_another_network(last: Path) -> None:
    state = checkpoint.load(last.parent) or {}
    checkpoint.save(last.parent, {**state, "model": {"weight": torch.zeros(3)}, "ema": None})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda last: last.write_bytes(b"junk"), "no checkpoint can be read"),
        (foreign, "no checkpoint can be read"),
        (of_another_network, "does not fit this run"),
        (Path.unlink, "has no checkpoint"),
    ],
    ids=["junk", "foreign", "other network", "missing"],
)
def test_a_checkpoint_that_is_damaged_or_foreign(
    capsys, finished: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(finished / "last.ckpt")
    refused(capsys, ["eval", finished.name], message, finished.name, code=1)


def test_results_of_another_version(capsys, finished: Path) -> None:
    for name, command in (("outcome.json", shlex.split(TRAIN)), ("run.json", ["eval", finished.name])):
        path = finished / name
        before = path.read_text()
        values = {name: value for name, value in json.loads(before).items() if name != "checksum"}
        path.write_text(json_text({**values, "version": 3}))
        refused(capsys, command, f"{name} has version 3, this Regard reads 2", "--results", code=1)
        path.write_text(before)
    assert run(shlex.split(TRAIN)) == 0


@pytest.mark.parametrize("content", ['{"a": 1', "[]"], ids=["cut", "list"])
def test_a_damaged_run_file(capsys, finished: Path, content: str) -> None:
    (finished / "run.json").write_text(content)
    refused(capsys, ["eval", finished.name], "run.json", "run again", code=1)


def test_folders_and_files_that_are_something_else(capsys, here: Path) -> None:
    refused(capsys, ["maps", str(here), "digit"], "has no model.json", "regard.save", code=1)
    (here / "file").write_text("")
    command = [*shlex.split(TRAIN), "--results", "file/results"]
    refused(capsys, command, "Not a directory", "choose another path", code=1)


@pytest.mark.slow
def test_the_command_itself_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "regard", *shlex.split(f"train 'MiTA(m=7, k=4)' {ON}")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("regard: m=7: 7 windows")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["x" * 5000, f"MiTA({'m=1,' * 1500})"], ids=["letters", "spelling"])
@pytest.mark.parametrize("command", [["maps"], ["study", "export"], ["study", "show"], ["swap-check"]], ids=" ".join)
def test_a_name_of_thousands_of_letters_is_refused(command: list[str], name: str, capsys) -> None:
    assert run([*command, name]) in (1, 2)
    assert len(capsys.readouterr().err) < 2000


@pytest.mark.parametrize("command", [["train", "SKA()"], ["finetune", "timm:test_vit"]], ids=lambda words: words[0])
def test_data_of_another_task_name_it(command: list[str], tmp_path: Path, capsys) -> None:
    standard(tmp_path / "cells")
    words = [*command, "--data", str(tmp_path / "cells"), "--set", "recipe.epochs=1"]
    refused(capsys, words, "classification needs at least two", "give --task detection")
    shutil.copytree(tmp_path / "cells/images", tmp_path / "pictures")
    assert run([*command, "--data", str(tmp_path / "pictures")]) != 0
    assert "--task" not in capsys.readouterr().err


def test_statistics_of_other_channels_are_refused(capsys) -> None:
    words = [*shlex.split(TRAIN), "--set", "task.mean=0.5,0.5,0.5", "--set", "task.std=0.5,0.5,0.5"]
    refused(capsys, words, "task.mean has 3 numbers, the images of digits", "have 1 channels")
