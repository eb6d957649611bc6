"""docs/real-networks.md, its picture and README's sentences follow from the committed records."""

import json

import numpy as np
import pytest

from regard.lab.studies.focus_vit import heads, swaps
from tools import real_networks as tool
from tools.site.evidence import ROOT

SWAPPED = {int(name): found for name, found in tool.records(swaps.NAME).items()}
SCORED = tool.records(heads.NAME)


def test_page_and_readme_are_not_stale() -> None:
    assert (ROOT / tool.PAGE).read_text() == tool.page(SWAPPED, SCORED), "run `make generated`"
    assert (ROOT / "README.md").read_text() == tool.readme(SWAPPED, SCORED), "run `make generated`"


def test_the_picture_has_what_is_drawn() -> None:
    """Its text, since versions of matplotlib place it differently."""
    committed = (ROOT / tool.PICTURE).read_text()
    drawn = [line for line in tool.svg(tool.picture(SWAPPED[224])).splitlines() if "<text" in line]
    texts = [line.partition(">")[2].partition("<")[0] for line in drawn]
    assert {"MiTA", "TopK", "SKA"} <= set(texts)
    assert [text for text in texts if f">{text}<" not in committed] == [], "run `make generated`"


def test_numbers_by_hand() -> None:
    """Means of what the records have for each picture, without Regard's statistics."""
    file = ROOT / "docs/results/focus_vit_swaps/224.json"
    scores = json.loads(file.read_text())["found"]["MiTA(m=25, k=25) | all | None"]["correlation"]
    mean, half = np.mean(scores), 1.984 * np.std(scores, ddof=1) / 10
    assert len(scores) == 100
    assert tool.kept(scores) == f"{mean:.2f} [{mean - half:.2f}, {mean + half:.2f}]"
    assert f"| {tool.kept(scores)} |" in (ROOT / tool.PAGE).read_text()
    assert f"{mean:.2f} with `MiTA`" in tool.words(SWAPPED, SCORED)
    right = json.loads((ROOT / "docs/results/focus_vit_heads/imagenette_small.json").read_text())["found"]
    assert f"from {np.mean(right['Softmax() | kept']):.0%}".replace("%", " %") in tool.words(SWAPPED, SCORED)


def test_what_is_missing_is_left_out() -> None:
    some = {key: scores for key, scores in SWAPPED[224].items() if not key.endswith(("0", "1", "2"))}
    assert tool.learned(some, "Linear()") == []
    assert "distill" not in tool.words({224: some}, {})
    assert "Heads" not in tool.words({224: some}, {})
    assert "learned" not in tool.swapped_table(224, some)
    part = {key: scores for key, scores in SWAPPED[336].items() if not key.startswith("SKA")}
    assert tool.by_tokens({224: some, 336: part}) == ""
    assert tool.swapped_table(336, part).splitlines()[-1].endswith("|  |  |")
    assert "Not run yet: 336, 518, 896 pixels" in tool.page({224: some}, {})


def test_the_sentence_on_tokens_has_the_least_and_the_greatest_mean() -> None:
    found = {size: {f"{mixer} | all | None": {"correlation": [0.1 * n]} for mixer in swaps.MIXERS[size]}
             for n, size in enumerate((224, 336, 518), 3)}  # fmt: skip
    assert "from 256 to 1,369 tokens" in tool.by_tokens(found)
    assert "0.30 to 0.50 with `MiTA`" in tool.by_tokens(found)


def test_seeds_of_learning_are_averaged_by_picture() -> None:
    found = {f"SKA() | all | {seed}": {"correlation": [0.1 * seed, 1.0]} for seed in (0, 2)}
    assert tool.learned(found, "SKA()") == pytest.approx([0.1, 1.0])
