"""The order of the pages. A page whose file does not exist is left out; a new page of docs/ stands among the guides."""

from collections.abc import Collection
from typing import Any

from regard.mixers.table import FAMILIES

from .mechanisms import page_of as mechanism_page
from .papers import PAPERS
from .papers import page_of as paper_page
from .reference import PACKAGES
from .reference import page_of as package_page

Entry = dict[str, Any]

GUIDES = {
    "Half the time for a network that you have": "docs/half-the-time.md",
    "Swap in five minutes": "docs/swap.md",
    "Would a cheaper attention do?": "docs/advice.md",
    "Fine-tune with your own loop": "docs/fine-tuning.md",
    "Your own model": "docs/your-own-model.md",
    "The command line": "docs/commands.md",
    "Tasks and your own data": "docs/tasks.md",
    "Training": "docs/training.md",
    "Studies that decide": "docs/deciding.md",
    "Probes": "docs/probes.md",
    "On a cluster": "docs/cluster.md",
}
EVIDENCE = {
    "Findings": "docs/findings.md",
    "What a swap keeps of a real network": "docs/real-networks.md",
    "The papers, table by table": "docs/papers.md",
    "Claims of the papers": "docs/claims.md",
    "Results": "docs/results/README.md",
    "All result pages": "results.md",
    "Studies and analyses": "docs/studies.md",
    "Errata": "docs/errata.md",
    "How speed is measured": "benchmarks/README.md",
}
PROJECT = {
    "Contributing": "CONTRIBUTING.md",
    "Why a swapped layer renames parameters": "docs/architecture/host-names.md",
    "Whether files are found": "docs/findability.md",
    "Changes": "CHANGELOG.md",
}
ELSEWHERE = ("docs/choosing.md", "docs/mechanisms.md", "docs/hosts.md", *PROJECT.values())
"""Pages of docs/ that are neither guides nor evidence."""
SHORT_TITLES = {
    "mita": "Mixture-of-Top-k Attention",
    "ska": "Static Key Attention",
    "sne": "Query, Key and Value Embedding",
    "esa": "Spatial Attention Mechanisms",
}


def navigation(pages: Collection[str]) -> list[Entry]:
    """The navigation for these pages, as in mkdocs.yml. pages: paths below the folder of pages."""
    placed = {*GUIDES.values(), *EVIDENCE.values(), *ELSEWHERE}
    further = sorted(p for p in pages if p.startswith("docs/") and p.count("/") == 1 and p.endswith(".md"))
    guides: list[Any] = [*_entries(GUIDES), *(page for page in further if page not in placed)]
    families = [
        {_title(kind): [{name: mechanism_page(name)} for name in members]} for kind, members in FAMILIES.items()
    ]
    entries: list[Entry] = [
        {"Start": "README.md"},
        {"Which attention?": "docs/choosing.md"},
        {"Guides": guides},
        {"Mechanisms": [{"All mechanisms": "docs/mechanisms.md"}, *families, {"Hosts": "docs/hosts.md"}]},
        {"Evidence": [*_entries(EVIDENCE), {"Papers": [{SHORT_TITLES[name]: paper_page(name)} for name in PAPERS]}]},
        {"API": [{"Names": "reference/index.md"}, *({p.replace("/", "."): package_page(p)} for p in PACKAGES)]},
        {"Project": _entries(PROJECT)},
    ]
    return kept(entries, pages)


def kept(entries: list[Any], pages: Collection[str]) -> list[Any]:
    """The entries whose pages exist; a section without any is left out."""
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            result += [entry] if entry in pages else []
            continue
        ((title, value),) = entry.items()
        value = kept(value, pages) if isinstance(value, list) else value
        if value and (isinstance(value, list) or value in pages):
            result.append({title: value})
    return result


def _entries(titles: dict[str, str]) -> list[Entry]:
    return [{title: page} for title, page in titles.items()]


def _title(kind: str) -> str:
    """A family's sentence as the title of a section: its first part, without emphasis."""
    short = kind.partition(":")[0].replace("*", "").partition(",")[0]
    return short[0].upper() + short[1:]
