"""The task: a run on the user's own texts from training to prediction, and what it refuses."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.cli.run_options import RunOptions, make_run
from regard.core import ConfigError, DataError, UnsupportedError
from regard.lab.results.results import Results
from regard.lab.tasks import Translation
from regard.lab.tasks.translation.alignment import alignments
from regard.lab.tasks.translation.networks.seq2seq import DecoderLayer, EncoderLayer
from regard.lab.tasks.translation.texts import _load, load
from regard.lab.train.execute import execute
from regard.lab.train.load import load_run
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.measure.cost import count_macs
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.mita.mita import MiTA
from regard.mixers.polaformer import PolaFormer
from regard.mixers.softmax import Softmax

HOST = "translator(dim=32, depth=1, heads=4, hidden=32, drop=0.1)"
RECIPE = Recipe(
    epochs=2, batch=8, augment="none", optimizer="adam", weight_decay=0.0, schedule="rsqrt", warmup=0.2, lr=5e-3
)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """64 of the generated sentences for training, and four short ones for the test."""
    return write(tmp_path / "texts")


def write(folder: Path) -> Path:
    folder.mkdir()
    sentences = load("numbers", "en", "de").split("train")
    pairs = list(zip(sentences.source, sentences.target, strict=True))
    for split, part in (("train", pairs[:64]), ("val", sorted(pairs[64:264], key=lambda pair: len(pair[0]))[:4])):
        for language, lines in zip(("en", "de"), zip(*part, strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def task(data: Path | str, **changes: Any) -> Translation:
    return Translation(**{"host": HOST, "data": str(data), "vocabulary": 400, "beam": 2, **changes})


def test_a_run_translates_without_its_training_data(folder: Path, tmp_path: Path) -> None:
    """Scores and their samples are stored, and the texts may be gone when new sentences are translated.

    The mean of the weights of two epochs is evaluated, and loaded.
    """
    run = Run(task=task(folder), mixer=Factors(terms="1111"), recipe=replace(RECIPE, average=2))
    store = Results(tmp_path / "results")
    outcome = execute(run, store, device="cpu")
    assert outcome["status"] == "done"
    assert set(outcome["metrics"]) == {"bleu", "chrf", "loss"}
    assert outcome["metrics"]["loss"] < 5.5 < np.log(400)
    assert outcome["macs"] > 0
    assert outcome["sampled"] == "bleu"
    assert outcome["data"]["signature"].startswith("nrefs:1|")
    stored = store.folder(run.key)
    again = run.task.score(load_run(stored), CPU)
    assert again.metrics == outcome["metrics"]
    assert again.samples.shape == (4,)
    shutil.rmtree(folder)
    _load.cache_clear()
    model = load_run(stored)
    (tmp_path / "new.txt").write_text("today the child sells two rolls\nhis aunt needs three books\n")
    predictions = run.task.predict(model, ["the child sells ten rolls", tmp_path / "new.txt"], CPU, outcome["data"])
    assert [next(iter(item.values())) for item in predictions] == [
        "the child sells ten rolls", "today the child sells two rolls", "his aunt needs three books",
    ]  # fmt: skip
    assert [item.get("line") for item in predictions] == [None, 1, 2]
    assert all(isinstance(item["translation"], str) for item in predictions)
    alignment = predictions[1]["alignment"]
    assert np.array(alignment["weights"]).shape == (len(alignment["target"]), len(alignment["source"]))
    assert "".join(alignment["source"][:-1]).replace("▁", " ")[1:] == "today the child sells two rolls"
    image = run.task.draw("x", predictions[1])
    assert len(np.unique(np.asarray(image))) > 10


@pytest.mark.parametrize("data", ["numbers", "multi30k", "own"])
def test_the_command_line_has_defaults_for_all_data(data: str, folder: Path) -> None:
    run = make_run("Softmax()", str(folder) if data == "own" else data, "", RunOptions(), task="translation")
    assert isinstance(run.task, Translation)
    assert run.recipe.schedule == "rsqrt"
    assert run.recipe.average > 0
    assert run.recipe.epochs == {"numbers": 7, "multi30k": 6, "own": 60}[data]
    assert make_run("Softmax()", "", "", RunOptions(), task="translation").task.data == "numbers"


def test_the_parts_of_a_batch_have_the_gradient_of_the_whole(folder: Path) -> None:
    problem = task(folder, host=HOST.replace("drop=0.1", "drop=0.0"))
    model = problem.model(Softmax(), 0)
    gradients = []
    for parts in ([(0, 1)], [(0, 3), (1, 3), (2, 3)]):
        total = torch.zeros(())
        for part in parts:
            batch = next(problem.batches(RECIPE, 0, 2, 3, part=part))
            total = total + problem.loss(model, batch, RECIPE, CPU) / len(parts)
        gradients.append(torch.autograd.grad(total, model.embedding.weight)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def attentions(model: Any) -> list[str]:
    layers = [layer for layer in model.modules() if isinstance(layer, EncoderLayer | DecoderLayer)]
    own = [type(layer.self_attn.attn.config).__name__ if layer.self_attn else "None" for layer in layers]
    return [*own, *(type(layer.cross_attn.config).__name__ for layer in layers if isinstance(layer, DecoderLayer))]


def test_the_mechanism_is_where_the_place_says() -> None:
    """Encoder, decoder and cross-attention of one layer each."""
    host = "translator(dim=32, depth=1, heads=4, hidden=32, cross='Factors(terms=\"1111\")')"
    numbers = task("numbers", host=host)
    assert attentions(numbers.build(DynamicConv(kernel=3, groups=4), 300)) == ["DynamicConv", "DynamicConv", "Factors"]
    assert attentions(numbers.build(None, 300)) == ["Softmax", "Softmax", "Factors"]
    assert attentions(numbers.build(None, 300, removed=True)) == ["None", "None", "Factors"]
    encoder = replace(numbers, place="encoder")
    assert attentions(encoder.build(MiTA(m=2, k=2), 300)) == ["MiTA", "Softmax", "Factors"]
    assert attentions(encoder.build(None, 300, removed=True)) == ["None", "Softmax", "Factors"]
    cross = replace(numbers, place="cross", host=HOST)
    assert attentions(cross.build(Factors(terms="0000"), 300)) == ["Softmax", "Softmax", "Factors"]


def test_initial_weights_depend_on_the_seed_alone(folder: Path) -> None:
    models = [task(folder).model(Softmax(), seed) for seed in (0, 0, 1)]
    weights = [model.embedding.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_alignments_are_the_weights_of_the_cross_attention() -> None:
    """Uniform with the average of all words, and zero for padding."""
    model = task("numbers", host=HOST, place="cross").build(Factors(terms="0000"), 300).eval()
    source = torch.tensor([[5, 6, 7, 2], [5, 6, 2, 0]])
    weights = alignments(model, source, torch.tensor([[1, 8], [1, 9]]))
    expected = torch.tensor([[0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0]])[:, None].expand(2, 2, 4)
    torch.testing.assert_close(weights, expected)
    with pytest.raises(ConfigError, match="the decoder has layers 0 to 0, not 1"):
        alignments(model, source, torch.tensor([[1], [1]]), 1)


def test_a_cross_attention_without_weights_translates_without_an_alignment() -> None:
    problem = task("numbers", place="cross", limit=30)
    record = problem.record()
    (softmax,) = problem.predict(problem.model(Softmax(), 0), ["two"], CPU, record)
    assert "alignment" in softmax
    (prediction,) = problem.predict(problem.model(PolaFormer(), 0), ["two"], CPU, record)
    assert "translation" in prediction
    assert "alignment" not in prediction
    with pytest.raises(UnsupportedError, match="for a cross-attention with weights"):
        problem.draw("two", prediction)


def test_copying_the_source_is_the_trivial_answer(tmp_path: Path) -> None:
    folder = write(tmp_path / "texts")
    (folder / "val.de").write_text((folder / "val.en").read_text())
    assert task(folder).chance == pytest.approx(100)
    assert task("numbers").chance < 2


def test_other_texts_are_scored_with_the_vocabulary_of_the_run(folder: Path, tmp_path: Path) -> None:
    problem = task(folder)
    model, record = problem.model(Softmax(), 0), problem.record()
    other = write(tmp_path / "other")
    for language in ("en", "de"):
        lines = (other / f"val.{language}").read_text().splitlines()
        (other / f"val.{language}").write_text("\n".join(lines[:3]) + "\n")
    score = problem.score_on(str(other), model, CPU, record)
    assert len(score.samples) == 3


def test_a_trial_needs_no_data() -> None:
    trial = task("/nowhere").trial(Factors(terms="1111"))
    assert trial.loss(2).item() == pytest.approx(np.log(400), rel=0.3)
    assert trial.forward(2).shape[0] == 2
    assert count_macs(trial.model, trial.inputs) > 400 * 32 * 16


def test_a_limit_takes_the_first_sentences() -> None:
    problem = task("numbers", limit=30)
    assert (len(problem.train_sentences()), len(problem.test_sentences())) == problem.sample_counts() == (30, 30)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"place": "decoder"}, "place is self, encoder or cross"),
        ({"split": "train"}, "split is test, val or held"),
    ],
    ids=str,
)
def test_wrong_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task("numbers", **changes)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("vit_desk", "has no host 'vit_desk'; known: translator"),
        ("translator(wide=3)", "no option 'wide'"),
        ("translator(vocabulary=3)", "no option 'vocabulary'"),
        ("translator(attention='Softmax()')", "attention of the host is what the mechanism replaces"),
        ("translator(dim=30)", "dim 30 is not a multiple of 4 heads"),
    ],
)
def test_wrong_hosts(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task("numbers", host=host).build(Softmax(), 300)


def test_a_decoder_cannot_lose_its_source() -> None:
    with pytest.raises(ConfigError, match='compare with Factors."0000".'):
        task("numbers", place="cross").build(None, 300, removed=True)


def test_inputs_that_cannot_be_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task("numbers", longest=40, limit=50)
    model, record = problem.model(Softmax(), 0), problem.record()
    (tmp_path / "new.txt").write_text("one\n\ntwo\n")
    monkeypatch.chdir(tmp_path)
    for source, message in (
        ("missing.txt", "there is no file missing.txt"),
        (Path("missing"), "there is no file missing"),
        ("  ", "the text is empty"),
        ("one two " * 40, r"the text, line 1|the text: the sentence has \d+ tokens, more than longest=40"),
        ("new.txt", r"new.txt, line 2: the text is empty"),
    ):
        with pytest.raises(DataError, match=message):
            problem.predict(model, [source], CPU, record)
