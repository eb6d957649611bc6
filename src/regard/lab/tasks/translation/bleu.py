"""BLEU and chrF of a whole test set, as sacreBLEU computes them, and BLEU's statistics of each sentence."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.core import ConfigError, require

ORDER = 4
"""The longest n-grams of BLEU."""


def statistics(translations: Sequence[str], references: Sequence[str], language: str) -> np.ndarray:
    """For each sentence its length, that of its reference, matching n-grams and n-grams (n = 1..4): (n, 10) int64.

    Their sum gives the BLEU of the set. language: the target language, which decides how sacreBLEU splits words.
    """
    metric = _metric(language, effective_order=True)  # of a sentence alone, whose score is not used
    rows = []
    for translation, reference in zip(translations, references, strict=True):
        score = metric.sentence_score(translation, [reference])
        rows.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    return np.array(rows, np.int64)


def bleu(total: np.ndarray) -> float:
    """BLEU from summed statistics (10,), in percent."""
    require("sacrebleu")

    from sacrebleu.metrics import BLEU

    numbers = [int(number) for number in total]
    counts, totals = numbers[2 : 2 + ORDER], numbers[2 + ORDER :]
    return float(BLEU.compute_bleu(counts, totals, numbers[0], numbers[1], smooth_method="exp").score)


def chrf(translations: Sequence[str], references: Sequence[str]) -> float:
    """chrF2 of a set, in percent."""
    require("sacrebleu")

    from sacrebleu.metrics import CHRF

    return float(CHRF().corpus_score(list(translations), [list(references)]).score)


def signature(language: str) -> str:
    """What sacreBLEU writes beside a score, so that others can repeat it."""
    metric = _metric(language)
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())


def _metric(language: str, effective_order: bool = False) -> Any:
    require("sacrebleu")

    from sacrebleu.metrics import BLEU

    try:
        return BLEU(trg_lang=language, effective_order=effective_order)
    except (ImportError, RuntimeError) as error:  # words of Japanese and Korean need another package
        raise ConfigError(f"sacreBLEU cannot split words of {language}: {error}") from error
