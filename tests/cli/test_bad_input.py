"""Wrong input on the command line: what came, what was expected, what to do; an exit code, and never a traceback.

The tests are `untyped`, since annotation checks would answer before the package does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from regard.cli.app import run
from regard.files.atomic import json_text, write_atomically
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.load import load_run
from regard.lab.train.run import read_run

pytestmark = pytest.mark.untyped

HOST = "vit_desk(size=12, patch=2, dim=8, depth=1, heads=2)"
OWN = "vit_desk(size=14, patch=2, dim=8, depth=1, heads=2)"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def train(results: Path, mixer: str = "Softmax", *more: str, host: str = HOST) -> list[str]:
    return ["train", mixer, "--host", host, "--set", "recipe.epochs=1", "--results", str(results), *more]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *messages: str, code: int = 2) -> str:
    """The message of a command that fails as it should."""
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("regard: "), shown.err
    assert "Traceback" not in shown.err
    for message in messages:
        assert message in shown.err
    return shown.err


@pytest.mark.parametrize(
    ("mixer", "messages"),
    [
        ("Sofmax", ("unknown name 'Sofmax'", "did you mean Softmax?")),
        ("MiTA(mm=9)", ("MiTA has no 'mm'", "it has", " m,", " k,")),
        ("MiTA(m='a')", ("MiTA has m='a'", "a whole number")),
        ("MiTA(m=7, k=4)", ("7 windows cannot be laid on 6x6 ", "nearest possible: 5, 6, 8, 9")),
        ("MiTA(m=9, k=37)", ("k=37", "has 36 keys", "choose k between 1 and 36")),
        ("Softmax(projection=FSNE(code=0))", ("code",)),
        ("__import__('os')", ("unknown name '__import__'", "known: ")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_mechanism(capsys, results: Path, mixer: str, messages: tuple[str, ...]) -> None:
    refused(capsys, train(results, mixer), *messages)
    assert not list(results.glob("*/outcome.json"))


@pytest.mark.parametrize("mixer", ["SKA()", "host", "None"])
def test_images_that_a_host_does_not_take(capsys, results: Path, mixer: str) -> None:
    """The default data are 12 x 12, less than a patch of a model for 224 x 224."""
    messages = ("does not take inputs of 1x12x12", "img_size=, patch_size=")
    refused(capsys, train(results, mixer, host="vit_tiny_patch16_224(depth=1)"), *messages)
    assert not list(results.glob("*/outcome.json"))


@pytest.mark.parametrize(
    "host",
    [
        "vit_desk(dim=-4)",
        "vit_desk(patch=0)",
        "vit_desk(heads=0)",
        "vit_desk(size='a')",
        "vit_desk(mlp_ratio='x')",
        "vit_tiny_patch16_224(patch_size=0)",
    ],
)
def test_options_that_a_host_cannot_be_made_with(capsys, results: Path, host: str) -> None:
    refused(capsys, train(results, host=host))
    assert not list(results.glob("*/outcome.json"))


@pytest.mark.parametrize("change", ["size=(8.5,8.5)", "host=5", "data=5"])
def test_fields_of_a_wrong_kind(capsys, results: Path, change: str) -> None:
    refused(capsys, train(results, "Softmax", "--set", f"task.{change}"), change.partition("=")[0])


@pytest.mark.parametrize("more", [["--device", "tpu"], ["--seconds", "-1"], ["--seconds", "nan"], ["--batch", "0"]])
def test_timing_with_a_wrong_option(capsys, more: list[str]) -> None:
    refused(capsys, ["bench", "Softmax", "--grid", "3x3", *more], more[0].strip("-"), more[1])


@pytest.mark.parametrize("command", [["bench", "Softmax"], ["advise", "vit_desk"]], ids=["bench", "advise"])
@pytest.mark.parametrize("device", ["mps", "auto"])
def test_times_are_taken_where_there_is_a_clock(capsys, monkeypatch, command: list[str], device: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    refused(capsys, [*command, "--device", device], "nothing can be timed on 'mps'", "the device is cpu or cuda")


@pytest.mark.parametrize("mixer", ["SKA()", "None"])
def test_the_cost_at_a_size_that_a_host_does_not_take(capsys, mixer: str) -> None:
    arguments = ["cost", mixer, "--host", "vit_tiny_patch16_224(depth=1)", "--size", "7x7"]
    refused(capsys, arguments, "does not take inputs of 3x7x7")


@pytest.mark.parametrize("verb", ["cost", "bench"])
@pytest.mark.parametrize(
    ("mixer", "messages"),
    [("MiTA(m=7, k=4)", "nearest possible: 5, 6, 8, 9"), ("MiTA(m=9, k=40)", "choose k between 1 and 3")],
    ids=["m", "k"],
)
def test_what_cannot_be_built_has_no_cost_and_no_time(capsys, verb: str, mixer: str, messages: str) -> None:
    assert run([verb, mixer, "--grid", "6x6"]) == 2
    assert messages in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "more", "messages"),
    [
        ("vit_dsk", (), ("there is no host 'vit_dsk'", "vit_desk")),
        ("vit_desk(siz=12)", (), ("it has no 'siz'", "did you mean", "size")),
        ("vit_desk(size=13, patch=4)", ("--size", "13"), ("13x13 cannot be cut into patches of 4x4",)),
        (HOST, ("--size", "11"), ("takes images of 12x12, the task has 11x11",)),
        (HOST, ("--size", "12by12"), ("'12by12' is not a size", "such as 224x224")),
        (HOST, ("--data", "digit"), ("unknown data set 'digit'", "did you mean digits")),
        (HOST, ("--data", "/no/such/folder"), ("/no/such/folder does not exist", "class folders")),
        (HOST, ("--data-root", "/no/such", "--data", "cifar10"), ("--data-root /no/such is not a folder",)),
        (HOST, ("--set", "recipe.lrr=1"), ("'recipe.lrr'", "did you mean recipe.lr")),
        (HOST, ("--set", "recipe.lr=abc"), ("recipe.lr is a number, not 'abc'",)),
        (HOST, ("--set", "recipe.batch=1.5"), ("recipe.batch is a whole number, not 1.5",)),
        (HOST, ("--set", "task.limit=1.5"), ("task.limit is a whole number, not 1.5",)),
        (HOST, ("--set", "recipe.betas=0.9"), ("recipe.betas is several numbers",)),
        (HOST, ("--set", "recipe.augment=crp"), ("unknown augment 'crp'", "did you mean crop")),
        (
            HOST,
            ("--set", "task.init=foo"),
            (
                "--set task.init=foo:",
                "init is zero, fan_in or host",
            ),
        ),
        (HOST, ("--set", "recipe.optimizer=adamww"), ("unknown optimizer", "did you mean adamw")),
        (HOST, ("--precision", "bf16"), ("--set recipe.precision=bf16: precision is one of", "not 'bf16'")),
        (HOST, ("--device", "gpu"), ("--device is auto, cpu, cuda or mps, not 'gpu'",)),
        (HOST, ("--workers", "-1"), ("--workers is 0 or more, at most 1024, not -1",)),
        (HOST, ("--seed", "-1"), ("seed is 0 or more, not -1",)),
        (HOST, ("--log", "csv", "--log", "wandb"), ("--log is given 2 times; give it once",)),
        (HOST, ("--results", "elsewhere"), ("--results is given 2 times",)),
        (HOST, ("--set", "task.limit=8", "--set", "task.limit=9"), ("task.limit is set to 8 and to 9",)),
        (HOST, ("--set", "task.digest=bytes", "--digest", "index"), ("task.digest is set to bytes and to index",)),
        (HOST, ("--digest", "bytes"), ("--digest is for your own images, and digits-canvas is a built-in set",)),
        (HOST, ("--set", "task.host=vit_desk"), ("task.host is set to vit_desk(", "set it once")),
        (HOST, ("--seed", "3", "--data-root", " "), ("--data-root is empty; give a value, or leave it out",)),
        (HOST, ("--set", ""), ("--set is empty",)),
        (HOST, ("--log", "wand"), ("--log is one of csv, tensorboard, wandb, mlflow, not 'wand'",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value and value[0].startswith("--") else "",
)
def test_a_wrong_option(capsys, results: Path, host: str, more: tuple[str, ...], messages: tuple[str, ...]) -> None:
    refused(capsys, train(results, "Softmax", *more, host=host), *messages)
    assert not results.exists()


def test_a_dry_run_of_what_cannot_be_built_says_so_beside_its_table(capsys) -> None:
    """Also with --json, whose readers see standard error only."""
    arguments = ["study", "run", "quickstart", "--rows", "Softmax", "--host", "resnet18", "--dry-run"]
    assert run([*arguments, "--json"]) == 1
    shown = capsys.readouterr()
    progress, line = shown.err.strip().splitlines()
    assert progress == "softmax, row 1 of 1"
    assert line.startswith("regard: 1 of 1 rows cannot be built, the first of them softmax: ")
    assert json.loads(shown.out)[0]["error"] in line


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["run", "quikstart"], "did you mean quickstart?"),
        (["run", "quickstart", "--rows", "Softmx"], "no row of quickstart matches 'Softmx'"),
        (["run", "quickstart", "--seeds", "0"], "1 to 10000, not 0"),
        (["run", "quickstart", "--data", "digit"], "did you mean digits"),
        (["run", "quickstart", "--host", "vit_tinny_patch16_224"], "vit_tiny_patch16_224"),
        (["show", "quikstart"], "did you mean quickstart?"),
        (["status", "quikstart"], "did you mean quickstart?"),
        (["status", "--scale", "desc"], "no scale 'desc'; did you mean desk"),
        (["export", "quikstart"], "did you mean quickstart?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_study(capsys, arguments: list[str], messages: str, results: Path) -> None:
    refused(capsys, ["study", *arguments, "--results", str(results)], messages)


# the user's own data


def class_folders(root: Path, classes: int = 2, images: int = 10, dark: bool = False) -> Path:
    for label in range(classes):
        (root / f"class{label}").mkdir(parents=True)
        for i in range(images):
            pixels = np.full((20, 24, 3), (100 * label + i) % 256 // (4 if dark else 1), np.uint8)
            Image.fromarray(pixels).save(root / f"class{label}" / f"{i}.png")
    return root


def table(folder: Path, labels: list, names: str = "") -> Path:
    files = sorted(class_folders(folder / "pictures").rglob("*.png"))
    made = pyarrow.table({"image": [file.read_bytes() for file in files], "label": labels})
    pyarrow.parquet.write_table(
        made.replace_schema_metadata({"class_names": names} if names else {}), folder / "t.parquet"
    )
    return folder / "t.parquet"


def on(results: Path, data: Path, *more: str) -> list[str]:
    return train(results, "Softmax", "--size", "14", "--data", str(data), *more, host=OWN)


def test_an_empty_folder(capsys, tmp_path: Path, results: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(capsys, on(results, tmp_path / "empty"), str(tmp_path / "empty"), "no images", "one folder for each class")


def test_one_class_only(capsys, tmp_path: Path, results: Path) -> None:
    refused(capsys, on(results, class_folders(tmp_path / "one", 1)), "only one class folder (class0)", "at least two")
    refused(capsys, on(results, table(tmp_path, [0] * 20)), "only one class (label 0)", "at least two")


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
def test_a_label_out_of_range(capsys, tmp_path: Path, results: Path, labels: list, names: str, messages: str) -> None:
    refused(capsys, on(results, table(tmp_path, labels, names)), "t.parquet", messages)


def test_a_damaged_parquet(capsys, tmp_path: Path, results: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    refused(capsys, on(results, tmp_path / "bad.parquet"), "bad.parquet cannot be read as parquet")


def test_a_damaged_image_is_named_and_training_stops_or_goes_on(capsys, tmp_path: Path, results: Path) -> None:
    root = class_folders(tmp_path / "data")
    bad = root / "class1" / "3.png"
    bad.write_bytes(bad.read_bytes()[:40])
    refused(capsys, on(results, root), str(bad), "cannot be read as an image", "--set task.corrupt=skip")
    assert run([*on(results, root, "--set", "task.corrupt=skip"), "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["data"]
    assert sizes["train"] + sizes["test"] == 19


def test_a_damaged_image_of_a_set_too_large_for_memory(capsys, tmp_path: Path, results: Path, monkeypatch) -> None:
    monkeypatch.setattr("regard.images.own.IN_MEMORY", 0)
    root = class_folders(tmp_path / "data")
    (root / "class1" / "3.png").write_bytes(b"no picture")
    assert run([*on(results, root, "--set", "task.corrupt=skip"), "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["data"]
    assert sizes["train"] + sizes["test"] == 19


def test_an_image_that_went_missing_is_named(capsys, tmp_path: Path, results: Path) -> None:
    """A link whose picture is gone."""
    root = class_folders(tmp_path / "data")
    (root / "class1" / "3.png").unlink()
    (root / "class1" / "3.png").symlink_to(root / "nowhere.png")
    refused(capsys, on(results, root), str(root / "class1" / "3.png"), "cannot be read as an image")


# results, checkpoints and saved models


@pytest.fixture
def finished(capsys, results: Path) -> str:
    """The key of a finished run."""
    assert run([*train(results), "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["key"])


def test_evaluation_of_what_is_not_there(capsys, results: Path) -> None:
    refused(capsys, ["eval", "0" * 12, "--results", str(results)], "has no run", "regard results list")


def test_a_run_is_named_by_its_key_or_its_folder(capsys, tmp_path: Path, results: Path, finished: str) -> None:
    assert run(["eval", finished, "--results", str(results)]) == 0
    first = capsys.readouterr().out
    assert run(["eval", str(results / finished), "--results", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out == first
    picture = ["maps", finished, "digit", "--results", str(results), "--out", str(tmp_path / "maps.png")]
    assert run(picture) == 0
    assert (tmp_path / "maps.png").stat().st_size > 1000


def test_a_run_is_scored_in_its_own_precision(capsys, results: Path) -> None:
    assert run([*train(results), "--precision", "bf16-mixed", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert run(["eval", outcome["key"], "--results", str(results), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == outcome["metrics"]


def test_other_data_are_scored_as_the_run_saw_its_own(capsys, tmp_path: Path, results: Path) -> None:
    """Normalised by the statistics of the training, by classes of the same names."""
    root = class_folders(tmp_path / "data")
    assert run([*on(results, root), "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    model = load_run(results / key)
    task = read_run(Results(results), key).task
    record = (Results(results).outcome(key) or {})["data"]
    darker = class_folders(tmp_path / "darker", dark=True)
    files = sorted(darker.rglob("*.png"))  # no test images of their own: all are scored, in the order of their names
    images = np.stack([np.asarray(Image.open(file)) for file in files])
    labels = np.array([int(file.parent.name[-1]) for file in files])
    mean, std = (torch.tensor(one) for one in task.statistics())
    with torch.no_grad():
        pixels = torch.from_numpy(images[:, :14, :14].copy()) / 255  # of one colour each, at every size
        expected = model(((pixels - mean) / std).permute(0, 3, 1, 2)).argmax(-1).numpy() == labels
    found = task.score_on(str(darker), model, torch.device("cpu"), record)
    assert found.samples.tolist() == expected.tolist()
    assert run(["eval", key, "--results", str(results), "--data", str(darker)]) == 0
    assert capsys.readouterr().out.endswith(f"on {len(labels)} images\n")
    assert abs(task.on(str(darker)).statistics()[0][0] - mean[0]) > 0.1
    named = class_folders(tmp_path / "named")
    (named / "class0").rename(named / "zebra")
    refused(capsys, ["eval", key, "--results", str(results), "--data", str(named)], "do not have: zebra")


def test_grey_images_and_coloured_ones(capsys, tmp_path: Path, results: Path, finished: str) -> None:
    root = class_folders(tmp_path / "ten", 10)
    for number in range(10):
        (root / f"class{number}").rename(root / str(number))
    arguments = ["eval", finished, "--results", str(results), "--data", str(root)]
    refused(capsys, arguments, "takes images of 1 channels", "has 3")


def test_wrong_numbers_for_a_finished_run(capsys, results: Path, finished: str) -> None:
    start = ["eval", finished, "--results", str(results), "--retune"]
    refused(capsys, [*start, "k=x"], "--retune takes whole numbers", "k=x")
    refused(capsys, [*start, "k"], "expected NAME=VALUE")
    refused(capsys, [*start, "k=3"], "Softmax has no 'k'")


def test_another_mechanism_for_a_finished_run(capsys, results: Path, finished: str) -> None:
    """Top-k attention of all 36 keys is softmax; another mechanism is another network; what is untrained is named."""

    def scores(mixer: str = "") -> tuple[dict[str, float], str]:
        chosen = ["--mixer", mixer] if mixer else []
        assert run(["eval", finished, "--results", str(results), "--json", *chosen]) == 0
        shown = capsys.readouterr()
        return json.loads(shown.out)["metrics"], shown.err

    plain, _ = scores()
    same, messages = scores("TopK(k=36)")
    assert same["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert "untrained" not in messages
    other, messages = scores("Agent(m=4, bias=True)")
    assert abs(other["loss"] - plain["loss"]) > 1e-5
    assert "untrained" in messages
    start = ["eval", finished, "--results", str(results), "--mixer"]
    refused(capsys, [*start, "Sofmax()"], "Softmax")
    refused(capsys, [*start, "None"], "this verb needs a mechanism, not None")


@pytest.mark.parametrize("content", ["junk", "foreign", "other network", "missing"])
def test_a_checkpoint_that_is_damaged_or_foreign(capsys, results: Path, finished: str, content: str) -> None:
    last = results / finished / "last.ckpt"
    if content == "junk":
        last.write_bytes(b"junk")
    elif content == "foreign":
        torch.save({"weights": torch.zeros(3)}, last)
    elif content == "other network":
        state = checkpoint.load(last.parent) or {}
        checkpoint.save(last.parent, {**state, "model": {"weight": torch.zeros(3)}, "ema": None})
    else:
        last.unlink()
    messages = {"other network": "does not fit this run", "missing": "has no checkpoint"}
    message = messages.get(content, "no checkpoint can be read")
    refused(capsys, ["eval", finished, "--results", str(results)], message, finished, code=1)


def test_results_of_another_version(capsys, results: Path, finished: str) -> None:
    for name in ("outcome.json", "run.json"):
        path = results / finished / name
        before = path.read_text()
        values = {name: value for name, value in json.loads(before).items() if name != "checksum"}
        path.write_text(json_text({**values, "version": 3}))
        arguments = train(results) if name == "outcome.json" else ["eval", finished, "--results", str(results)]
        refused(capsys, arguments, f"{name} has version 3, this Regard reads 2", "--results", code=1)
        path.write_text(before)
    assert run(train(results)) == 0


def test_a_snapshot_of_another_version(capsys, results: Path) -> None:
    fields = {"rows": [], "runs": [], "metric": "top1", "baseline": "a", "study": "pilot", "scale": "desk"}
    write_atomically(results / "studies" / "pilot-desk.json", json_text({**fields, "version": 3}))
    refused(capsys, ["study", "export", "pilot", "--results", str(results)], "has version 3", code=1)


@pytest.mark.parametrize("content", ['{"a": 1', "[]"], ids=["cut", "list"])
def test_a_damaged_run_file(capsys, results: Path, finished: str, content: str) -> None:
    (results / finished / "run.json").write_text(content)
    refused(capsys, ["eval", finished, "--results", str(results)], "run.json", "run again", code=1)


def test_a_folder_that_is_no_saved_model(capsys, tmp_path: Path) -> None:
    refused(capsys, ["maps", str(tmp_path), "digit"], "has no model.json", "regard.save", code=1)


def test_a_file_where_results_should_be(capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(capsys, train(tmp_path / "file" / "results"), "Not a directory", "choose another path", code=1)


@pytest.mark.slow
def test_the_command_itself_shows_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "regard", *train(tmp_path, "MiTA(m=7, k=4)")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("regard: m=7: 7 windows")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "SKA", "--model", "vit_desk", "--dim", "64"],
            "--dim is of one mechanism: leave it out with --model",
        ),
        (["bench", "SKA", "--model", "vit_desk", "--part", "operator"], "--part is of one mechanism"),
        (["cost", "SKA", "--host", "vit_desk", "--grid", "64x64"], "--grid is of one layer: leave it out with --host"),
        (["cost", "SKA", "--host", "vit_desk", "--heads", "4"], "--heads is of one layer"),
    ],
)
def test_options_of_one_layer_are_refused_beside_a_model(capsys, arguments: list[str], message: str) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["regard", "regard.mixers", "__main__"])
def test_a_module_that_is_not_the_users_is_refused(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cost", "SKA()", "--import", module]) == 2
    assert "a module of your own" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, f"MiTA({'m=1,' * 1500})"], ids=["letters", "spelling"])
@pytest.mark.parametrize("command", [["maps"], ["study", "export"], ["study", "show"], ["swap-check"]], ids=" ".join)
def test_a_name_of_thousands_of_letters_is_refused(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, name]) in (1, 2)
    assert len(capsys.readouterr().err) < 2000


def test_an_empty_argument_is_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    """As of an unset variable: `regard check ""` would check all mechanisms."""
    assert run(["check", ""]) == 2
    assert "MECHANISM is empty" in capsys.readouterr().err
