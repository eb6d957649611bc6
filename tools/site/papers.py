"""A page for every paper: its tables counted and trained again beside print, verdicts, errata, what was not run."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.lab.engine.analysis import Analysis, run_analysis
from regard.lab.engine.analysis import markdown as analysis_markdown
from regard.lab.engine.study import Study
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES, STUDIES, load_analysis, load_study
from regard.lab.studies.errata import ERRATA
from regard.lab.studies.papers import ESA_PAPER, MITA_PAPER, MITA_SOURCE, SKA_PAPER, SNE_PAPER
from regard.pages.phrasing import number
from tools.docs_pages import code, table

from .evidence import ROOT, Evidence
from .markdown import interval, link, size

PAPERS = {
    "mita": (MITA_PAPER, MITA_SOURCE),
    "ska": (SKA_PAPER, SKA_PAPER),
    "sne": (SNE_PAPER, SNE_PAPER),
    "esa": (ESA_PAPER, ESA_PAPER),
}
"""Name of the page -> title of the paper, and how the sources of its studies begin."""
TIMED = ("mita_fig5",)
"""Analyses that measure this machine: not part of a page."""
BUILDS_MODELS = ("host_counts",)
"""Analyses that build all models of two papers, which takes most of a minute; their command is named."""
LONGEST = 60
"""Rows of a table on the page; longer ones are on the result page or printed by the command."""


def page_of(name: str) -> str:
    """The path of a paper's page."""
    return f"papers/{name}.md"


def pages(evidence: Sequence[Evidence]) -> Iterator[tuple[str, str]]:
    """(path, content) of every paper's page."""
    for name in PAPERS:
        yield page_of(name), page(name, evidence)


def page(name: str, evidence: Sequence[Evidence]) -> str:
    """The page of a paper."""
    title, source = PAPERS[name]
    studies = [study for study in map(load_study, STUDIES) if study.source.startswith(source)]
    analyses = [analysis for analysis in map(load_analysis, ANALYSES) if source in analysis.source]
    counted = [a for a in analyses if not a.of and a.name not in (*TIMED, *BUILDS_MODELS)]
    by_name: dict[str, list[Evidence]] = {}
    for found in evidence:
        by_name.setdefault(found.name, []).append(found)
    parts = [f"# {title}", introduction(name, title), "## Trained again"]
    trained = [trained_again(name, study, found) for study in studies for found in by_name.get(study.name, ())]
    parts += trained or ["Nothing of it has been trained here yet."]
    read = [sheets_of(name, found) for a in analyses for found in by_name.get(a.name, ())]
    parts += ["## Read from these networks", *read] if read else []
    parts += ["## Counted again", *(counted_again(analysis) for analysis in counted)] if counted else []
    parts += [errata(title), not_run(name, [*studies, *analyses], {*by_name, *(a.name for a in counted)})]
    return "\n\n".join(parts) + "\n"


def introduction(name: str, title: str) -> str:
    """What the page has, and what it is not."""
    results = link("results", "docs/results/README.md", page_of(name))
    deciding = link("corrected", "docs/deciding.md", page_of(name))
    register = ROOT / "docs" / "claims.md"
    claims = f" All its claims: {link('the register', 'docs/claims.md', page_of(name))}." if register.exists() else ""
    return (
        f"The tables and figures of *{title}*, carried out again. Training was done on small data with small models; a "
        f"table beside print compares directions, not numbers. Verdicts are {deciding} over the claims of a study; "
        f"{results} has what else a reader must know of each.{claims}"
    )


def trained_again(name: str, study: Study, found: Evidence) -> str:
    """A study's table beside the printed one, its gate and its verdicts."""
    printed = {row.label: row.paper for setting in _paper_settings(study) for row in setting.rows}
    lines = {line["label"]: line for line in found.table["rows"]}
    metric, baseline = found.table["metric"], found.table["baseline"]
    rows = [
        _row(label, printed.get(label, {}), lines.get(label), metric) for label in dict.fromkeys([*lines, *printed])
    ]
    heads = ["row", "printed", "here", f"minus {baseline}, here", "seeds", "MACs, here"]
    if not any(row[1] for row in rows):
        rows, heads = [(row[0], *row[2:]) for row in rows if row[2]], [heads[0], *heads[2:]]
    title = link(found.table["title"], found.report, page_of(name))
    place = found.table["source"].removeprefix(f"{PAPERS[name][1]}, ")
    verdicts = "\n".join(f"- {claim['text']}: {claim['verdict']['sentence']}" for claim in found.claims)
    return f"""### {place}: {title}

{found.snapshot["question"]} Metric: {metric}. Here: {found.setting}.

{found.table["gate"]["sentence"]} {found.table["headline"]}

{table(heads, rows)}

{verdicts}"""


def _paper_settings(study: Study) -> list[Any]:
    return [study.settings["paper"]] if "paper" in study.settings else []


def _row(label: str, paper: Mapping[str, Any], line: Mapping[str, Any] | None, metric: str) -> tuple[str, ...]:
    printed = number(paper[metric]) if metric in paper else ""
    if line is None:
        return label, printed, "", "", "", ""
    shown = f"{label} (control)" if line["control"] else label
    difference = interval(line.get("difference"), sign=True)
    return shown, printed, interval(line), difference, str(line["n"]), size(line["macs"])


def sheets_of(name: str, found: Evidence) -> str:
    """An analysis of trained networks: its question, its short tables, a link to its page."""
    value = {**found.table, "sheets": [s for s in found.table["sheets"] if len(s["rows"]) <= LONGEST]}
    return _analysis(value, link("page with charts", found.report, page_of(name)))


def counted_again(analysis: Analysis) -> str:
    """An analysis that trains nothing, computed now."""
    with tempfile.TemporaryDirectory() as folder:
        value = run_analysis(analysis, Results(Path(folder)))
    left = [s for s in value["sheets"] if len(s["rows"]) > LONGEST]
    value["sheets"] = [s for s in value["sheets"] if s not in left]
    return _analysis(value, f"`regard study run {analysis.name}` makes it")


def _analysis(value: Mapping[str, Any], where: str) -> str:
    """An analysis below a heading of the third level."""
    text = analysis_markdown({**value, "notes": value["notes"]})
    text = text.replace("\n## ", "\n#### ").replace("# ", "### ", 1)
    return f"{text.rstrip()}\n\n{where}."


def errata(title: str) -> str:
    """What cannot be as it is printed."""
    heads = ("where", "printed", "found", "how to see it")
    return f"## Errata\n\n{table(heads, [tuple(erratum) for erratum in ERRATA[title]])}"


def not_run(name: str, entries: Sequence[Study | Analysis], done: set[str]) -> str:
    """The studies and analyses without committed results."""
    rows = [
        (code(entry.name), entry.title, entry.source.rpartition(", ")[2])
        for entry in entries
        if entry.name not in done
    ]  # fmt: skip
    if not rows:
        return "## Not run here yet\n\nNothing: every table and figure has results."
    about = link("studies", "docs/studies.md", page_of(name))
    return f"""## Not run here yet

`regard study show NAME --scale desk` says the hours on your machine, `regard study run NAME --scale desk` carries it
out ({about}).

{table(("name", "what", "in the paper"), rows)}"""
