"""`regard finetune`: from a saved folder, a run or timm's weights; what is copied, and what the key holds."""

import dataclasses
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.layers import resample_abs_pos_embed

from command_line import answer, refused
from photos import class_folders
from regard.cli.app import run as command
from regard.cli.finetune import DEFAULTS, bring_start, finetuning_run
from regard.cli.run_options import RunOptions, make_run
from regard.core import ConfigError, Grid
from regard.files.records import write_record
from regard.images.normalise import pretrained_statistics
from regard.lab.data.cued import canvas
from regard.lab.results.results import Results
from regard.lab.tasks import Classification, Segmentation
from regard.lab.train.class_rows import class_rows
from regard.lab.train.execute import execute
from regard.lab.train.initial_weights import Saved, copy_weights
from regard.lab.train.load import load_run, load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run, read_run
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.grids import resample
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.swapping.swap import swap

HOST = "vit_desk(size=12, patch=4, dim=16, depth=2, heads=2)"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(create_model(HOST, SKA(), num_classes=5, in_chans=1), tmp_path / "saved")


STILL = ["recipe.lr=1e-12", "recipe.weight_decay=0.0", "recipe.epochs=1"]
"""A run that hardly moves its weights."""


def still(start: str, results: Path, mixer: str = "", plan: str = "") -> Run:
    options = RunOptions(change=[*STILL, "task.limit=32"], results=results)
    return finetuning_run(start, mixer, "digits-canvas", options, plan=plan)


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Whether weights have the same names and hardly differ."""
    return before.keys() == after.keys() and all(
        torch.allclose(before[name], after[name], atol=1e-6) for name in before
    )


def test_a_saved_model_keeps_its_weights_and_gets_a_new_head(saved: Path, tmp_path: Path) -> None:
    run, store = still(str(saved), tmp_path), Results(tmp_path / "results")
    assert (run.mixer, run.task.size) == (SKA(), (12, 12))
    assert execute(run, store, device="cpu")["status"] == "done"
    before, after = load(saved).state_dict(), load_trained(run, store).state_dict()
    for name in ("head.weight", "head.bias"):
        assert before.pop(name).shape != after.pop(name).shape
    assert same(before, after)
    assert read_run(store, run.key) == run


def test_the_key_holds_the_weights_and_not_the_path(saved: Path, tmp_path: Path) -> None:
    first = still(str(saved), tmp_path)
    other = save(load(saved), tmp_path / "elsewhere")
    assert still(str(other), tmp_path).key == first.key
    model = load(saved)
    with torch.no_grad():
        model.head.bias.add_(1)
    assert still(str(save(model, tmp_path / "moved")), tmp_path).key != first.key
    assert isinstance(first.start, Saved)


def test_a_run_is_trained_on_with_another_mechanism(tmp_path: Path) -> None:
    arguments = ["--results", str(tmp_path), "--json", "--device", "cpu", "--set", "task.limit=32"]
    first = ["train", "Softmax", "--host", HOST, "--set", "recipe.epochs=1", *arguments]
    assert command(first) == 0
    (key,) = [path.parent.name for path in tmp_path.glob("*/outcome.json")]
    run = still(key, tmp_path, "MiTA(m=4, k=3)")
    assert (run.start.key, run.mixer) == (key, MiTA(m=4, k=3))
    assert still(str(tmp_path / key), tmp_path).mixer == Softmax()
    store = Results(tmp_path)
    execute(run, store, device="cpu")
    assert same(load_trained(run.start, store).state_dict(), load_trained(run, store).state_dict())


def test_the_verb_trains_and_prints(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", str(saved), "--data", "digits-canvas", "--mixer", "host", "--results", str(tmp_path / "r")]
    outcome = answer(capsys, *words, "--set", "recipe.epochs=1", "--set", "task.limit=32", "--device", "cpu")
    assert outcome["status"] == "done"
    assert "SKA" not in outcome["spelling"]
    assert "lr=0.0002" in outcome["spelling"]


def test_timm_weights_are_asked_for_and_kept(tmp_path: Path) -> None:
    run = finetuning_run(
        "deit_tiny_patch16_224", "MiTA", "digits", RunOptions(seed=3, change=["recipe.epochs=2"], results=tmp_path)
    )
    assert run.start is None
    assert run.task.host == "deit_tiny_patch16_224(pretrained=True)"
    assert (run.task.size, run.seed, run.mixer) == ((224, 224), 3, MiTA())
    assert getattr(run.task, "init") == "host"  # noqa: B009
    assert (run.recipe.lr, run.recipe.epochs) == (DEFAULTS["lr"], 2)
    sized = finetuning_run("deit_tiny_patch16_224", "", "digits", RunOptions(size="32x48", results=tmp_path))
    assert (sized.task.host, sized.task.size) == ("deit_tiny_patch16_224(pretrained=True)", (32, 48))


def test_a_network_that_takes_any_size_is_trained_further(tmp_path: Path) -> None:
    """It has no option `img_size`."""
    task = Classification(host="resnet10t", data="digits", size=(32, 32), init="host", limit=8)
    first = Run(task=task, mixer=None, recipe=Recipe(epochs=1, batch=8, augment="none"))
    store = Results(tmp_path)
    assert execute(first, store, device="cpu")["status"] == "done"
    for size in ("", "64"):
        changes = ["recipe.epochs=1", "recipe.batch=8", "task.limit=8"]
        run = finetuning_run(first.key, "", "digits", RunOptions(size=size, change=changes, results=tmp_path))
        assert execute(run, store, device="cpu")["status"] == "done"


def test_a_pretrained_host_gets_grey_images_as_its_weights_expect(tmp_path: Path) -> None:
    """From a checkpoint on disk in the place of timm's; mean and deviation are its own, in one channel."""
    small = "depth=1, embed_dim=24, num_heads=2"
    made = timm.create_model("deit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=2)
    torch.save(made.state_dict(), tmp_path / "weights.pth")
    told = {"file": str(tmp_path / "weights.pth"), "mean": (0.2, 0.5, 0.8), "std": (0.5, 0.5, 0.2)}
    start = f"deit_tiny_patch16_224({small}, pretrained_cfg_overlay={told})"
    changes = [*STILL, "task.limit=8", "recipe.batch=4"]
    run = finetuning_run(start, "", "digits", RunOptions(size="32x32", change=changes, results=tmp_path))
    assert run.task.statistics() == ([pytest.approx(0.5)], [pytest.approx(0.4)])
    store = Results(tmp_path / "results")
    assert execute(run, store, device="cpu")["status"] == "done"
    kept = load_trained(run, store).state_dict()["patch_embed.proj.weight"]
    assert torch.allclose(kept, made.patch_embed.proj.weight.sum(1, keepdim=True), atol=1e-6)


def test_a_pretrained_host_is_normalised_as_its_weights_say() -> None:
    """Whatever the data are; the host is asked without weights, and nothing is drawn."""
    state = torch.get_rng_state()
    for name, mean in (("vit_tiny_patch16_224.augreg_in21k", 0.5), ("attended_resnet18", 0.485), ("mobilevit_s", 0.0)):
        assert pretrained_statistics(f"{name}(pretrained=True)", 3)[0][0] == mean
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_of_several_mechanisms_keeps_them(tmp_path: Path) -> None:
    """Also where only some layers are swapped; --mixer replaces them all, --plan those that it names."""
    save(swap(create_model(HOST, SKA()), Softmax(), "blocks.0.*"), tmp_path / "mixed")
    save(swap(create_model(HOST, None), SKA(), "blocks.1.*"), tmp_path / "part")
    mixed, part = (still(str(tmp_path / name), tmp_path) for name in ("mixed", "part"))
    assert (mixed.mixer, part.mixer) == (None, None)
    assert mixed.plan.startswith("blocks.0.attn=Softmax(); blocks.1.attn=SKA()")
    assert part.plan == "blocks.1.attn=SKA()"
    kinds = [type(getattr(block.attn, "mixer", None)).__name__ for block in part.model().blocks]  # type: ignore[union-attr]
    assert kinds[:2] == ["NoneType", "HeadMixer"]
    save(create_model(HOST, SKA()), tmp_path / "one")
    planned = {name: still(str(tmp_path / name), tmp_path, plan="blocks.0.attn=None").plan for name in ("one", "part")}
    assert planned["part"] == "blocks.1.attn=SKA(); blocks.0.attn=None"
    assert planned["one"].startswith("blocks.0.attn=None; blocks.1.attn=SKA()")


def test_a_run_that_is_not_finished_is_no_start(tmp_path: Path) -> None:
    begun = {"spelling": spell(still("deit_tiny_patch16_224", tmp_path))}
    write_record(tmp_path / "there" / "0123456789ab" / "run.json", begun)
    with pytest.raises(ConfigError, match="is not finished"):
        still("0123456789ab", tmp_path / "there")


def test_a_run_of_another_store_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new run has the key that it would have there."""
    task = Classification(host=HOST, data="digits-canvas", size=(12, 12), limit=32)
    first = Run(task=task, mixer=SKA(), recipe=Recipe(epochs=1, batch=32, augment="none"))
    there, here = Results(tmp_path / "there"), Results(tmp_path / "here")
    execute(first, there, device="cpu")
    run = still(str(there.folder(first.key)), here.root)
    assert not here.folder(first.key).exists()  # the rest of a command may be wrong
    bring_start(run, str(there.folder(first.key)), here.root)
    assert f"run {first.key} is copied from" in capsys.readouterr().err
    assert run.key == still(first.key, there.root).key
    assert execute(run, here, device="cpu")["status"] == "done"
    assert here.outcome(first.key) == there.outcome(first.key)


def test_a_run_finds_its_data_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is kept as an absolute one, with which the key of the run does not change."""
    class_folders(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    run = make_run("SKA()", "photos", HOST, RunOptions(size="12x12", change=["recipe.epochs=1"]))
    assert run.task.data == str(tmp_path / "photos")
    assert run.key == dataclasses.replace(run, task=run.task.on("photos")).key
    assert make_run("SKA()", "digits", HOST, RunOptions(size="12x12")).task.data == "digits"
    arguments = ["--results", str(tmp_path / "results"), "--device", "cpu"]
    assert command(["train", "SKA()", "--data", "photos", "--host", HOST, "--size", "12", *arguments,
                    "--set", "recipe.epochs=1"]) == 0  # fmt: skip
    (key,) = [path.parent.name for path in tmp_path.glob("results/*/outcome.json")]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command(["eval", key, *arguments]) == 0


def test_a_run_keeps_its_image_size(tmp_path: Path) -> None:
    task = Classification(host="vit_desk(patch=4, dim=16, depth=1, heads=2)", data="digits", size=(8, 8), limit=32)
    first = Run(task=task, mixer=SKA(), recipe=Recipe(epochs=1, batch=32, augment="none"))
    store = Results(tmp_path)
    execute(first, store, device="cpu")
    changes = ["recipe.epochs=1", "task.limit=32"]
    again = finetuning_run(first.key, "Softmax()", "digits", RunOptions(change=changes, results=tmp_path))
    assert again.task.size == (8, 8)
    assert execute(again, store, device="cpu")["status"] == "done"


def test_a_segmenter_starts_from_a_classifier(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = ["task.limit=4", "recipe.epochs=1", "recipe.batch=2"]
    options = RunOptions(size="84x84", change=changes, results=tmp_path / "results")
    run = finetuning_run(str(saved), "", "cued-digits", options, task="segmentation")
    assert run.task.name == "segmentation"
    model, source = run.task.model(run.mixer, 0), load(saved)
    with caplog.at_level("WARNING"):
        copied, _ = copy_weights(source, model, size=(84, 84))
    assert copied == len(source.state_dict()) - 2  # not the head
    assert "not taken" not in caplog.text
    weights, before = model.state_dict(), load(saved).state_dict()["pos_embed"]
    positions = next(weights[name] for name in weights if name.endswith("pos_embed"))
    assert torch.equal(positions, resample_abs_pos_embed(before, (21, 21), num_prefix_tokens=source.num_prefix_tokens))
    with torch.no_grad():
        keys = [each.blocks[1].attn.regard.operator.keys for each in (load(saved), model.encoder.model)]
        assert torch.equal(keys[1], resample(keys[0], Grid(3, 3), Grid(21, 21)))
    name = next(name for name in weights if name.endswith("blocks.1.mlp.fc1.weight"))
    assert torch.equal(weights[name], source.state_dict()["blocks.1.mlp.fc1.weight"])


def test_what_does_not_fit_another_size_is_named(caplog: pytest.LogCaptureFixture) -> None:
    source, target = (create_model(HOST.replace("12", size), SKA(resize="window")) for size in ("12", "24"))
    with caplog.at_level("WARNING"):
        copy_weights(source, target, size=(24, 24))
    assert "2 learned tensors of another shape are not taken, but drawn anew" in caplog.text
    assert "blocks.1.attn.regard.operator.keys is (2, 9, 8) there and (2, 36, 8) here" in caplog.text


def test_a_small_layer_does_not_fit_by_chance() -> None:
    with pytest.raises(ConfigError, match="no initial weight fits"):
        copy_weights(
            torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, bias=False))
        )


def test_a_segmenter_keeps_its_head_on_other_data(tmp_path: Path) -> None:
    host = "vit_desk(patch=14, dim=16, depth=1, heads=2)"
    task = Segmentation(host=host, data="cued-digits", size=(84, 84), head="cbt(heads=1)", limit=4)
    first = Run(task=task, mixer=Softmax(), recipe=Recipe(epochs=1, batch=4, augment="none", smoothing=0.0))
    execute(first, Results(tmp_path), device="cpu")
    changes = ["task.limit=4", "recipe.epochs=1"]
    run = finetuning_run(first.key, "", "cued-digits", RunOptions(change=changes, results=tmp_path))
    assert (run.task.name, run.task.head, run.start.key) == ("segmentation", "cbt(heads=1)", first.key)


def test_a_segmenter_is_distilled_saved_and_trained_further(tmp_path: Path) -> None:
    """The distilled folder has a plan of layers, the head and the size, which the new run takes over."""
    host = "vit_desk(patch=14, dim=16, depth=2, heads=2)"
    task = Segmentation(host=host, data="cued-digits", size=(84, 84), head="pixels", limit=16)
    first = Run(task=task, mixer=None, recipe=Recipe(epochs=1, batch=8, augment="none", smoothing=0.0))
    execute(first, Results(tmp_path / "results"), device="cpu")
    photos, folder = tmp_path / "photos", tmp_path / "distilled"
    photos.mkdir()
    for index in range(16):
        Image.fromarray(canvas("cued-digits", "train", index).image.squeeze()).save(photos / f"{index}.png")
    layer = "encoder.model.blocks.1.attn=SKA()"
    arguments = ["--steps", "2", "--output-steps", "1", "--out", str(folder), "--device", "cpu"]
    results = ["--results", str(tmp_path / "results")]
    assert command(["distill", first.key, "--plan", layer, "--data", str(photos), *arguments, *results]) == 0
    options = RunOptions(change=[*STILL, "task.limit=16"], results=tmp_path / "results")
    run = finetuning_run(str(folder), "", "cued-digits", options)
    assert (run.task.name, run.task.head, run.task.size, run.plan) == ("segmentation", "pixels", (84, 84), layer)
    assert execute(run, Results(tmp_path / "results"), device="cpu")["status"] == "done"
    assert same(load(folder).state_dict(), load_trained(run, Results(tmp_path / "results")).state_dict())


ROWS = class_rows(lambda number: create_model(HOST, num_classes=number, in_chans=1))


@pytest.mark.parametrize(
    "names", [["dog", "frog", "zebra"], ["frog", "ape", "cat", "dog"], ["cat", "dog", "frog"], ["frog", "cat", "dog"]]
)
def test_outputs_of_a_head_follow_the_names_of_the_classes(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    known = ["cat", "dog", "frog"]
    source, target = (create_model(HOST, num_classes=len(own), in_chans=1) for own in (known, names))
    before = target.head.weight.clone()
    copy_weights(source, target, (known, names), rows=ROWS)
    for index, name in enumerate(names):
        pretrained_statistics = source.head.weight[known.index(name)] if name in known else before[index]
        assert torch.equal(target.head.weight[index], pretrained_statistics)
        assert name not in known or target.head.bias[index] == source.head.bias[known.index(name)]
    assert torch.equal(target.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert (
        (f"1 of {len(names)} outputs start anew" in caplog.text) == bool(caplog.text) == (not set(names) <= set(known))
    )


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s", "crossvit_9_240", "volo_d1_224"])
def test_every_head_follows_the_names_of_the_classes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source, target = (timm.create_model(name, num_classes=3).eval() for _ in range(2))
    rows = class_rows(lambda number: timm.create_model(name, num_classes=number))
    copy_weights(source, target, (["cat", "dog", "elk"], ["elk", "cat", "dog"]), rows=rows)
    image = torch.randn(1, 3, *source.pretrained_cfg["input_size"][1:])
    with torch.no_grad():
        torch.testing.assert_close(target(image), source(image)[:, [2, 0, 1]], rtol=0, atol=1e-5)
    assert not caplog.text


def test_outputs_follow_the_names_where_a_head_has_more_of_them(caplog: pytest.LogCaptureFixture) -> None:
    """task.classes gives heads of one shape to other classes."""
    source, target = (create_model(HOST, num_classes=5, in_chans=1) for _ in range(2))
    before = target.head.weight.clone()
    copy_weights(source, target, (["cat", "dog", "elk"], ["ape", "cat", "dog"]), rows=ROWS)
    assert torch.equal(target.head.weight[[1, 2]], source.head.weight[[0, 1]])
    assert torch.equal(target.head.weight[[0, 3, 4]], before[[0, 3, 4]])
    assert "1 of 3 outputs start anew" in caplog.text


def test_outputs_of_a_saved_model_follow_the_names_too(tmp_path: Path) -> None:
    made = create_model(HOST, num_classes=2)
    folder = save(made, tmp_path / "saved", data={"class_names": ["dog", "cat"]})
    data = class_folders(tmp_path / "photos", mode="L")
    run = finetuning_run(str(folder), "", str(data), RunOptions(change=[*STILL, "recipe.batch=4"], results=tmp_path))
    store = Results(tmp_path / "results")
    assert execute(run, store, device="cpu")["status"] == "done"
    head = load_trained(run, store).state_dict()["head.weight"]
    assert torch.allclose(head, made.head.weight.flip(0), atol=1e-6)


def trained_on(data: str, mixer: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The key of a run on photos, with its results in the current folder."""
    words = ["train", mixer, "--data", data, "--host", HOST, "--size", "12", *SHORT]
    return str(answer(capsys, *words)["key"])


SHORT = ["--set", "recipe.epochs=1", "--set", "recipe.batch=2", "--device", "cpu"]


def test_images_are_normalised_as_the_weights_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With mean and deviation of the first training, not of the new images, from a run and from a saved model."""
    monkeypatch.chdir(tmp_path)
    first, other = class_folders(tmp_path / "first", mode="L"), class_folders(tmp_path / "other", mode="L")
    for file in other.rglob("*.png"):
        Image.eval(Image.open(file), lambda value: 40 + value // 4).save(file)
    key = trained_on("first", "Softmax()", capsys)
    record = Results(tmp_path / "results").outcome(key)["data"]
    folder = save(load_run(tmp_path / "results" / key), tmp_path / "saved", data=record)
    for start in (key, str(folder)):
        run = finetuning_run(start, "", str(other), RunOptions(results=tmp_path / "results"))
        assert run.task.record()["normal"] == record["normal"]
        assert run.task.own_statistics() != tuple(record["normal"])
        changes = ["task.mean=0.5,0.4,0.3", "task.std=0.25,0.2,0.2"]
        again = finetuning_run(start, "", str(other), RunOptions(change=changes, results=tmp_path / "results"))
        assert again.task.record()["normal"] == [[0.5, 0.4, 0.3], [0.25, 0.2, 0.2]]
    same = finetuning_run(key, "", str(first), RunOptions(results=tmp_path / "results")).task
    assert (same.mean, same.std) == ((), ())  # which would give the same run another key
    task = finetuning_run(key, "", "digits-canvas", RunOptions(results=tmp_path / "results")).task  # grey
    assert task.record()["normal"] == [list(part) for part in task.own_statistics()]
    assert task.mean == ()


def test_a_run_whose_data_have_changed_keeps_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be another run, and would train from new weights without a word."""
    monkeypatch.chdir(tmp_path)
    data = class_folders(tmp_path / "photos", mode="L")
    key = trained_on("photos", "SKA()", capsys)
    before = load_run(tmp_path / "results" / key).state_dict()
    assert command(["eval", key]) == 0
    Image.new("L", (12, 12), 77).save(data / "dog" / "new.png")
    refused(capsys, ["eval", key], f"the data of run {key}, or of a run that it started from, have changed")
    refused(capsys, ["eval", key, "--data", "photos"], "photos has changed since the training")
    data.rename(tmp_path / "moved")
    refused(capsys, ["eval", key], f"the data of run {key} cannot be read")
    assert command(["eval", key, "--data", "moved"]) == 0
    still_there = ["--set", "recipe.lr=1e-12", "--set", "recipe.weight_decay=0.0"]
    assert command(["finetune", key, "--data", "moved", *SHORT, *still_there]) == 0
    assert "its weights are the start all the same" in capsys.readouterr().err
    new = [folder.parent for folder in tmp_path.glob("results/*/run.json") if folder.parent.name != key]
    assert len(new) == 1  # no other start was trained
    assert same(before, load_run(new[0]).state_dict())
