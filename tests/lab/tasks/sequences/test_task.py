"""The task of sequences: batches, scores, records, predictions, and runs that are killed."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from regard.core import ConfigError, DataError, DeviceError, UnsupportedError
from regard.lab.results.results import Results
from regard.lab.studies.mita import table5
from regard.lab.tasks import TASKS
from regard.lab.tasks.sequences import Sequences, data
from regard.lab.tasks.sequences.baseline import bag_of_symbols
from regard.lab.tasks.sequences.tokens import Split, Tokens
from regard.lab.train.execute import execute
from regard.lab.train.load import load_run
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from streams import equal_batches, joined

CPU = torch.device("cpu")
RECIPE = Recipe(epochs=4, batch=16, augment="none", lr=3e-3)
HOST = "sequence_encoder(dim=16, depth=1, ffn=16, hidden=16)"
DIGITS = Sequences(host=HOST, data="digits", limit=64)


def table(folder, pairs=False, train=60):
    """Texts whose label is the order of two letters, which no count of symbols tells."""
    rng = np.random.default_rng(0)
    header = "text1\ttext2\tlabel" if pairs else "text\tlabel"
    for split, count in (("train", train), ("test", 20)):
        lines = [header]
        for _ in range(count):
            label = int(rng.integers(2))
            line = "".join(rng.choice(list("xyz"), int(rng.integers(1, 6)))) + ("ab" if label else "ba")
            lines.append(f"{line}\t{line[::-1]}\t{label}" if pairs else f"{line}\t{'ab' if label else 'ba'}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_it_is_a_task_with_defaults_for_every_named_set():
    assert Sequences in TASKS
    for name in data.NAMED:
        defaults = Sequences.defaults(name)
        task = Sequences(data=name, **defaults["task"])
        task.check(Recipe(**defaults["recipe"]))
        trial = task.trial(MiTA(m=4, k=4), outputs=7)
        pairs = name in ("aan", "matching-mini")
        assert trial.inputs[0].shape == ((1, 2, task.tokens) if pairs else (1, task.tokens))
        assert trial.model(trial.inputs[0]).shape == (1, 7)
        assert task.sample_counts()[0] > 0
    assert trial.loss(3).isfinite()
    assert trial.forward(2).shape == (2, 7)


@pytest.mark.parametrize(
    ("study", "steps", "warmup"),
    [
        (table5.LISTOPS, 5_000, 1_000),
        (table5.TEXT, 20_000, 8_000),
        (table5.RETRIEVAL, 30_000, 800),
        (table5.IMAGE, 35_000, 175),
        (table5.PATHFINDER, 62_400, 312),
    ],
)
def test_published_settings_can_be_trained(study, steps, warmup):
    setting = study.settings["paper"]
    task, recipe = setting.task, setting.recipe
    task.check(recipe)
    total = recipe.epochs * (task.sample_counts()[0] // recipe.batch)
    assert abs(total - steps) <= total / recipe.epochs / 2  # whole epochs
    assert recipe.lr_at(round(warmup / steps * total) - 1, total) == pytest.approx(1e-4)
    assert recipe.lr_at(total - 1, total) < 1e-6
    model = task.trial(None).model
    assert model.pool == "padded_mean"
    assert model.mask == (task.data in ("listops", "imdb", "aan"))  # the others have no padding


def test_batches_are_a_function_of_seed_and_number(tmp_path):
    task = Sequences(host=HOST, data=str(table(tmp_path)), length=8)
    assert task.batches_per_epoch(RECIPE) == 3
    whole = list(task.batches(RECIPE, 5, 0, 6))
    assert equal_batches(whole[4:], task.batches(RECIPE, 5, 4, 6))
    assert equal_batches(whole[:2], joined([list(task.batches(RECIPE, 5, 0, 2, part=(i, 2))) for i in range(2)]))
    assert not torch.equal(whole[0][0], next(task.batches(RECIPE, 6, 0, 1))[0])
    rows = sorted(tuple(row.tolist()) for ids, _ in whole[:3] for row in ids)
    everything = sorted(tuple(row.tolist()) for row in torch.from_numpy(task.train_split().ids(np.arange(60), 8)))
    assert all(row in everything for row in rows)
    with pytest.raises(DeviceError, match="a batch of 16 cannot be divided into 3"):
        list(task.batches(RECIPE, 5, 0, 1, part=(0, 3)))


def test_attention_learns_an_order_that_counts_do_not_tell(tmp_path):
    task = Sequences(host=HOST, data=str(table(tmp_path, train=200)), length=8)
    recipe = Recipe(epochs=15, batch=40, augment="none", lr=2e-2, smoothing=0.0)
    outcome = execute(Run(task=task, mixer=Softmax(), recipe=recipe), Results(tmp_path / "results"), device="cpu")
    assert outcome["metrics"]["top1"] >= 95
    assert outcome["details"]["bag_of_bytes"] < 75
    assert outcome["macs"] > 0


def test_a_run_is_loaded_without_its_data(tmp_path):
    (tmp_path / "data").mkdir()
    task = Sequences(host=HOST, data=str(table(tmp_path / "data")), length=8)
    run = Run(task=task, mixer=MiTA(m=2, k=2), recipe=dataclasses.replace(RECIPE, epochs=1))
    outcome = execute(run, (store := Results(tmp_path / "results")), device="cpu")
    record = outcome["data"]
    assert record["class_names"] == ["ab", "ba"]
    truncated = sum(len(line.split("\t")[0]) > 8 for line in (tmp_path / "data" / "train.tsv").read_text().split("\n"))
    assert record["truncated"]["train"] == truncated
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    model = load_run(store.folder(run.key))
    built = task.model(run.mixer, run.seed, record=record)
    assert built.state_dict().keys() == model.state_dict().keys()
    lines = tmp_path / "lines.txt"
    lines.write_text("xyab\nzzzba and more\n")
    predicted = task.predict(model, [str(lines), "xyab"], CPU, record)
    assert predicted[0]["file"] == str(lines)
    assert [item["text"] for item in predicted[0]["predictions"]] == ["xyab", "zzzba and more"]
    assert predicted[0]["predictions"][1]["truncated"] is True
    first = predicted[0]["predictions"][0]
    assert predicted[1] == first
    assert {item["label"] for item in first["top"]} == {"ab", "ba"}
    assert sum(item["probability"] for item in first["top"]) == pytest.approx(1, abs=1e-5)
    with pytest.raises(UnsupportedError):
        task.draw(lines, predicted[0])


def test_bad_sources_are_named(tmp_path):
    task = Sequences(host=HOST, data=str(table(tmp_path, pairs=True)), length=8)
    record = task.record()
    model = task.model(None, 0, record=record)
    assert task.predict(model, ["ab\tba"], CPU, record)[0]["label"] in ("0", "1")
    for line, message in (("no tab", "has 1 texts; expected two"), ("a\t ", "has an empty text")):
        with pytest.raises(DataError, match=message):
            task.predict(model, [line], CPU, record)
    (tmp_path / "lines.txt").write_text("a\tb\nc\n")
    with pytest.raises(DataError, match=r"lines\.txt, line 2 has 1 texts"):
        task.predict(model, [tmp_path / "lines.txt"], CPU, record)
    with pytest.raises(DataError, match="there is no file none.txt"):
        task.predict(model, ["none.txt"], CPU, record)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        task.predict(model, [tmp_path / "bad.txt"], CPU, record)


def test_pixels_are_predicted_from_image_files(tmp_path):
    from PIL import Image

    record = DIGITS.record()
    assert (record["padded"], record["length"], record["vocabulary"]) == (False, 64, 257)
    model = DIGITS.model(Softmax(), 0)
    assert not model.mask  # no sequence is padded, so that no mechanism needs a mask
    pixels = DIGITS.test_split().tokens.symbols[:64].reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    predicted = DIGITS.predict(model, [tmp_path / "digit.png"], CPU, record)[0]
    scores = model(*DIGITS.example())[0].softmax(-1)
    assert predicted["label"] == str(int(scores.argmax()))
    assert len(predicted["top"]) == 5
    with pytest.raises(DataError, match="there is no image"):
        DIGITS.predict(model, [tmp_path / "none.png"], CPU, record)


def test_pixels_are_grey_values_row_by_row():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    found = {tuple(row) for row in np.round(bunch.images.reshape(-1, 64) * 255 / 16).astype(int).tolist()}
    split = DIGITS.train_split()
    assert all(tuple((row - 1).tolist()) in found for row in split.ids(np.arange(10), 64))


def test_score_equals_a_count_by_hand():
    model = DIGITS.model(Softmax(), 0)
    score = DIGITS.score(model, CPU)
    split = DIGITS.test_split()
    with torch.no_grad():
        logits = model(torch.from_numpy(split.ids(np.arange(64), 64)))
    right = logits.argmax(-1).numpy() == split.labels
    assert np.array_equal(score.samples, right)
    assert score.metrics["top1"] == pytest.approx(100 * right.mean())
    picked = logits.log_softmax(-1)[torch.arange(64), torch.from_numpy(split.labels)]
    assert score.metrics["loss"] == pytest.approx(-picked.mean().item(), rel=1e-5)
    assert DIGITS.chance == 100 * np.bincount(split.labels).max() / 64


def test_other_data_need_the_same_symbols_and_classes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    task = Sequences(host=HOST, data=str(table(tmp_path / "a")), length=8)
    model, record = task.model(None, 0), task.record()
    assert task.score_on(task.data, model, CPU, record).metrics == task.score(model, CPU).metrics
    with pytest.raises(DataError, match="takes bytes, digits has pixels"):
        task.score_on("digits", model, CPU, {**record, "length": 64})
    with pytest.raises(DataError, match="has pairs of bytes"):
        task.score_on(str(table(tmp_path / "b", pairs=True)), model, CPU, record)
    renamed = (tmp_path / "a" / "train.tsv").read_text().replace("\tab", "\tyes")
    (tmp_path / "renamed.tsv").write_text(renamed)
    with pytest.raises(DataError, match="other classes"):
        task.score_on(str(tmp_path / "renamed.tsv"), model, CPU, record)


def test_a_table_without_a_test_is_scored_whole_unless_it_was_trained_on(tmp_path):
    for name in ("a", "other"):
        (tmp_path / name).mkdir()
        (table(tmp_path / name, train=60 + 10 * (name == "other")) / "test.tsv").unlink()
    task = Sequences(host=HOST, data=str(tmp_path / "a"), length=8)
    model, record = task.model(None, 0), task.record()

    def number(name):
        return len(task.score_on(str(tmp_path / name), model, CPU, record).samples)

    assert (number("a"), number("other")) == (12, 70)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert number("copy") == 12  # its other rows were trained on
    with (tmp_path / "a" / "train.tsv").open("a") as stream:
        stream.write("xyab\tab\n")
    with pytest.raises(DataError, match="has changed since the training"):
        number("a")


def test_the_baseline_counts_symbols_and_nothing_else():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    counted = Split(Tokens.of([b"a" * (3 + 3 * y) + b"bc" for y in labels]), labels)
    ordered = Split(Tokens.of([b"abab" if y else b"baba" for y in labels]), labels)
    assert bag_of_symbols(counted, counted, 16, 257) == 100
    share = 100 * np.bincount(labels).max() / 200
    assert bag_of_symbols(ordered, ordered, 16, 257) == pytest.approx(share)
    assert bag_of_symbols(counted, counted, 3, 257) == pytest.approx(share)  # "aaa" in both


def test_wrong_hosts_and_uses_are_explained():
    for host, message in (
        ("sequence_encoder(length=5)", "leave length out of the host .*: set task.length"),
        ("sequence_encoder(vocabulary=5)", "the data tell it"),
        ("vit_desk", "cannot be built"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(DIGITS, host=host).model(None, 0)
    with pytest.raises(DataError, match="no samples reserved for tuning"):
        dataclasses.replace(DIGITS, split="held").test_split()
    with pytest.raises(ConfigError, match="has no image size"):
        DIGITS.in_host("sequence_encoder", (8, 8))
    with pytest.raises(ConfigError, match="removes attention"):
        DIGITS.model(Softmax(), 0, removed=True)


def test_the_key_has_the_length(tmp_path):
    task = Sequences(host=HOST, data=str(table(tmp_path)))
    key, same, other = (
        Run(task=dataclasses.replace(task, **length)).key for length in ({}, {"length": 512}, {"length": 500})
    )
    assert key == same != other
