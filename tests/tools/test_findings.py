"""The findings and their pictures follow from the committed evidence."""

import dataclasses
import re
from pathlib import Path

import pytest

from regard.lab.data.boards import PROBED
from regard.lab.studies.probes.names import AVERAGE, BASELINE, NONE
from tools import findings
from tools.site.evidence import ROOT, Evidence, all_evidence, judged

EVIDENCE = all_evidence()


def probe(ability: str, scores: dict[str, float], seeds: int = 3) -> Evidence:
    """A study of an ability."""
    rows = [{"label": label, "mean": score, "n": seeds, "control": False} for label, score in scores.items()]
    return Evidence(
        Path(f"probes_{ability}-desk"), {"study": f"probes_{ability}", "scale": "desk", "rows": rows}, {"rows": []}
    )


def test_the_text_of_readme_is_not_stale() -> None:
    assert (ROOT / findings.PAGE).read_text() == findings.page(EVIDENCE), "run `make generated`"


@pytest.mark.parametrize("name", findings.pictures(EVIDENCE))
def test_the_pictures_have_what_is_drawn(name: str) -> None:
    """Their text, since versions of matplotlib place it differently."""
    committed = (ROOT / name).read_text()
    drawn = [line for line in findings.pictures(EVIDENCE)[name].splitlines() if "<text" in line]
    texts = [line.partition(">")[2].partition("<")[0] for line in drawn]
    assert texts
    assert [text for text in texts if f">{text}<" not in committed] == [], "run `make generated`"


@pytest.mark.parametrize("name", findings.pictures(EVIDENCE))
def test_the_pictures_follow_a_dark_scheme(name: str) -> None:
    """Each text has a colour that the scheme replaces, or that of a cell, which stays."""
    committed = (ROOT / name).read_text()
    assert '[style*="fill: #ffffff"] {fill: #14171a !important}' in committed, "run `make generated`"
    replaced = set(re.findall(r'\[style\*="fill: (#\w+)"\]', committed))
    colours = re.findall(r"<text style=\"[^\"]*fill: (#\w+)", committed)
    assert len(colours) == committed.count("<text ")
    assert set(colours) <= replaced | set(findings.CELL_INK)
    assert not replaced & set(findings.CELL_INK)


def test_only_what_survives_correction_is_a_sentence() -> None:
    text = findings.finding(EVIDENCE)
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    found = [(study, claim) for study, claim in judged(EVIDENCE) if claim["verdict"]["word"] in findings.WORDS[:2]]
    decided = [claim for study, claim in found if study.table["metric"] != "cells"]
    assert len(lines) == len(decided)
    for claim in decided:
        assert claim["verdict"]["holm"] is not False
        assert any(f"{claim['verdict']['interval']['mean']:+.1f}" in line for line in lines)


def test_claims_about_abilities_are_counted_apart() -> None:
    probes = [study for study in EVIDENCE if study.table.get("metric") == "cells"]
    words = [claim["verdict"]["word"] for _, claim in judged(probes)]
    assert probes
    expected = f"Of {len(words)} claims about them {words.count('supported')} are supported, "
    assert expected in findings.finding(EVIDENCE).replace("\n", " ")
    without = findings.finding([study for study in EVIDENCE if study not in probes])
    assert "Probes" not in without
    assert without.split("|")[0] == findings.finding(EVIDENCE).split("|")[0]


def test_sentences_are_of_claims_that_exist() -> None:
    """A sentence in plain words whose claim is no longer decided would be forgotten."""
    claims = {(study.name, claim["a"]) for study, claim in judged(EVIDENCE)}
    assert findings.SENTENCES.keys() <= claims


def test_a_contradicted_claim_is_called_so() -> None:
    study, claim = next((s, c) for s, c in judged(EVIDENCE) if c["verdict"]["word"] == "supported")
    against = {**claim, "verdict": {**claim["verdict"], "word": "contradicted"}}
    changed = dataclasses.replace(study, table={**study.table, "claims": [against]})
    evidence = [changed if found is study else found for found in EVIDENCE]
    assert "| contradicted: " in findings.finding(evidence)


def test_the_profile_is_drawn_once_enough_rows_have_all_abilities() -> None:
    scores = {BASELINE: 97.0, AVERAGE: 25.0, NONE: 10.0, "SKA": 27.0, "MiTA": 95.0}
    assert findings.profile([probe(ability, scores) for ability in PROBED]) is None
    scores["Linear"] = 60.0
    profile = findings.profile([probe(ability, scores) for ability in PROBED])
    assert profile.abilities == tuple(PROBED)
    assert profile.rows["Linear"] == (60.0,) * len(PROBED)
    drawing = findings.svg(findings.profile_figure(profile))
    assert all(f">{text}<" in drawing for text in ("Linear", "60", "no attention", *PROBED))
    assert findings.profile([probe(ability, scores, seeds=2) for ability in PROBED]) is None
