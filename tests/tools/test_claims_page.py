"""The register has every claim of every study once, and its page is what evidence and counts say."""

from collections import Counter

import pytest

from regard.core import ConfigError
from regard.lab.engine.study import Claim
from regard.lab.studies import ANALYSES, STUDIES, load_study
from regard.lab.studies.paper_claim import KINDS, PaperClaim, text_of
from regard.lab.studies.register import REGISTER
from tools import claims_page
from tools.claims_page import PAGE, digits, fates
from tools.site.evidence import all_evidence, judged

ENTRIES = [(paper, entry) for paper, entries in REGISTER.items() for entry in entries]
OF_PAPERS = [name for name, (_, _, source) in STUDIES.items() if source != "Regard"]


@pytest.mark.parametrize("name", OF_PAPERS)
def test_every_claim_of_a_study_is_in_one_entry(name: str) -> None:
    found = {
        text_of(claim): [entry.id for _, entry in ENTRIES if entry.judged_by(name, claim)]
        for claim in load_study(name).claims
    }
    assert {text: ids for text, ids in found.items() if len(ids) != 1} == {}


def test_every_judge_of_an_entry_exists() -> None:
    claims = [(name, claim) for name in STUDIES for claim in load_study(name).claims]
    for paper, entry in ENTRIES:
        for judge in entry.judges:
            alone = PaperClaim(entry.id, entry.place, entry.says, judges=(judge,))
            assert any(alone.judged_by(name, claim) for name, claim in claims), (paper, entry.id, judge)
        assert not entry.study or entry.study in STUDIES
        assert not entry.analysis or entry.analysis in ANALYSES
        assert not entry.counts or claims_page.matching(entry.counts), (paper, entry.id)


def test_ids_are_unique() -> None:
    assert [key for key, n in Counter((paper, entry.id) for paper, entry in ENTRIES).items() if n > 1] == []


def test_an_entry_needs_a_judge_or_a_reason() -> None:
    with pytest.raises(ConfigError, match="needs a judge"):
        PaperClaim("t1", "Table 1", "It is better.")


@pytest.mark.slow
def test_the_page_is_not_stale_and_every_arithmetic_claim_is_judged() -> None:
    assert PAGE.read_text(encoding="utf-8") == claims_page.page(), "run `make generated`"
    pairs = [pair for pairs in fates().values() for pair in pairs]
    assert all(found.lines for _, found in pairs)
    assert {found.state for entry, found in pairs if entry.kind == "arithmetic"} <= set(claims_page.JUDGED)
    page = PAGE.read_text(encoding="utf-8")
    for kind, name in KINDS.items():
        states = [found.state for entry, found in pairs if entry.kind == kind]
        n = sum(state in claims_page.JUDGED for state in states)
        assert f"| {name} | {len(states)} | {n} |" in page


@pytest.mark.slow
def test_every_committed_verdict_on_a_claim_of_a_paper_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for study, claim in judged(all_evidence()):
        now = [text_of(c) for c in load_study(study.name).claims] if study.name in OF_PAPERS else []
        if claim["text"].partition(" (direction")[0] in now:
            assert claim["verdict"]["sentence"].partition("; ")[0] in page


@pytest.mark.parametrize(
    ("printed", "count", "doubled", "verdict"),
    [
        (5.7e6, 5_717_416, False, "rounded"),
        (6.1e6, 6_173_608, False, "cut off"),
        (1.2e9, 1_253_683_200, False, "cut off"),
        (22e6, 22_050_664, False, "rounded"),
        (5.0e9, 4_950_000_000, False, "rounded"),
        (0.625e9, 625_100_000, True, "rounded"),
        (8.1e6, 8_249_328, False, "differs by +1.8%"),
        (1.1e9, 1_510_141_440, False, "differs by +37.3%"),
        (0.64e9, 628_175_360, True, "differs by -1.8%"),
    ],
)
def test_planted_numbers_are_told_from_printed_ones(printed: float, count: int, doubled: bool, verdict: str) -> None:
    assert digits(printed, count, doubled) == verdict


def test_a_size_that_only_the_paper_judges_is_not_part_of_the_text() -> None:
    assert text_of(Claim("a", "b", "top1", by=0.7)) == "a is above b in top1"
    assert text_of(Claim("a", "b", "top1", within=1.0)) == "a is as good as b in top1, within 1"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ({"supported"}, "supported"), ({"supported", "suggested"}, "suggested"),
        ({"supported", "undecided"}, "undecided"), ({"supported", "not judged"}, "undecided"),
        ({"not judged"}, "not judged"), ({"supported", "contradicted"}, "contradicted"),
        ({"suggested against", "undecided"}, "suggested against"),
    ],
)  # fmt: skip
def test_a_claim_of_several_holds_only_if_all_do(words: set[str], verdict: str) -> None:
    assert claims_page.together(words) == verdict
