"""docs/papers.md lists every table and figure of the four papers, with what runs its rows or why they do not run."""

from timm import is_model

from regard.lab.studies import ANALYSES, STUDIES
from tools.papers_page import NOT_RUN, PAGE, PAPERS, REASONS, page, places, runners


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_each_place_runs_or_says_why() -> None:
    found = runners()
    assert sum(len(places(paper)) for paper in PAPERS) == 49
    for paper in PAPERS:
        for place in places(paper):
            assert bool(found.get((paper, place))) != isinstance(NOT_RUN[paper].get(place), str), (paper, place)
        assert NOT_RUN[paper].keys() <= set(places(paper))


def test_each_study_of_a_paper_is_at_a_place() -> None:
    named = {name for names in runners().values() for name in names}
    sources = {name: source for name, (_, _, source) in {**STUDIES, **ANALYSES}.items()}
    others = {name for name in sources if name not in named}
    assert all("Table" not in sources[name] and "Figure" not in sources[name] for name in others)


def test_what_does_not_run_has_a_known_reason_and_no_model_of_timm() -> None:
    for rows in (rows for paper in NOT_RUN.values() for rows in paper.values() if isinstance(rows, dict)):
        for label, (_, reason) in rows.items():
            assert reason in REASONS
            assert not is_model(label.lower().replace("-", "_"))
