"""Loss and scores against PyTorch, sacreBLEU's functions and its command."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sacrebleu.metrics import BLEU, CHRF

from regard.core import ConfigError
from regard.lab.tasks.jackknife import jackknife_values
from regard.lab.tasks.translation.bleu import bleu, chrf, signature, statistics
from regard.lab.tasks.translation.loss import cross_entropy
from regard.lab.tasks.translation.texts import load


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_those_of_torch(smoothing: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 6, 50, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(1, 50, (4, 6))
    labels[1, 3:] = labels[3, 1:] = 0
    expected = F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=0, label_smoothing=smoothing, reduction="sum"
    )
    loss = cross_entropy(scores, labels, smoothing)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-11)
    gradients = [torch.autograd.grad(3 * value, scores)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def texts(number: int = 60) -> tuple[list[str], list[str]]:
    """References, and translations with some words lost, changed or exchanged."""
    references = list(load("numbers", "en", "de").split("test").target[:number])
    rng, outputs = np.random.default_rng(0), []
    for line in references:
        words = line.split()
        place = int(rng.integers(len(words) - 1))
        if rng.random() < 0.4:
            words[place : place + 2] = words[place + 1 : place - 1 if place else None : -1]
        if rng.random() < 0.4:
            words[int(rng.integers(len(words)))] = "Haus"
        outputs.append(" ".join(words))
    return outputs, references


def test_summed_statistics_give_the_score_of_the_set() -> None:
    outputs, references = texts()
    assert bleu(statistics(outputs, references, "de").sum(0)) == BLEU().corpus_score(outputs, [references]).score
    assert 20 < bleu(statistics(outputs, references, "de").sum(0)) < 90
    assert chrf(outputs, references) == CHRF().corpus_score(outputs, [references]).score


def test_the_mean_of_the_jackknife_values_is_near_the_score() -> None:
    outputs, references = texts()
    counts = statistics(outputs, references, "de")
    values = jackknife_values(counts, bleu)
    assert values.mean() == pytest.approx(bleu(counts.sum(0)), abs=0.5)
    wrong = np.array([a != b for a, b in zip(outputs, references, strict=True)])
    assert values[~wrong].mean() > values[wrong].mean() + 20


def test_nothing_translated_scores_zero() -> None:
    assert bleu(statistics(["", ""], ["ein Haus", "zwei"], "de").sum(0)) == 0


def test_the_command_of_sacrebleu_gives_the_same_score(tmp_path: Path) -> None:
    outputs, references = texts()
    for name, lines in (("out", outputs), ("reference", references)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "reference"), "-i", str(tmp_path / "out")]
    printed = subprocess.run([*command, "-b", "-w", "6"], capture_output=True, text=True, check=True).stdout
    assert float(printed) == pytest.approx(bleu(statistics(outputs, references, "de").sum(0)), abs=1e-6)


def test_the_signature_says_how_words_are_split() -> None:
    assert signature("de").startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "tok:zh" in signature("zh")


@pytest.mark.skipif(find_spec("MeCab") is not None, reason="MeCab is installed")
def test_a_language_that_needs_another_package() -> None:
    with pytest.raises(ConfigError, match="cannot split words of ja"):
        signature("ja")
