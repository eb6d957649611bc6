"""Write the pages, let MkDocs make the site, check it."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.advice import render_page
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, MkDocsException

from regard.pages.theme import palette
from tools import probes_table, redraw_results
from tools.docs_pages import code, table

from . import checks, mechanisms, papers, reference
from .evidence import RESULTS, ROOT, Evidence, all_evidence
from .markdown import link
from .navigation import navigation
from .stage import adapted, repository_pages

PAGES, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
EXTERNAL = "external-links.txt"
PROBES, ADVICE = "docs/results/probes.html", "docs/results/advice/report.html"
SCRIPT = "assets/javascripts/iframe-worker.js"


class SiteError(RuntimeError):
    """The site could not be built; the message says why and what to do."""


def all_pages() -> dict[str, str | bytes]:
    """path -> content of every page and file of the site."""
    evidence = all_evidence()
    pages = repository_pages()
    for path, content in (*mechanisms.pages(evidence), *papers.pages(evidence)):
        pages[path] = adapted(content) if isinstance(content, str) else content
    pages.update(reference.pages())
    pages["results.md"] = result_pages(evidence)
    pages |= {found.report: redraw_results.page(found.folder) for found in evidence}
    pages[PROBES] = probes_table.page()
    pages[ADVICE] = render_page(sorted((RESULTS / "advice").glob("*.json")))
    pages |= {f"docs/{name}": (ROOT / "docs" / name).read_bytes() for name in ("bench.html", "explore.html")}
    return pages


def result_pages(evidence: list[Evidence]) -> str:
    """The page with a link to every result page."""
    rows = [
        (
            link(found.table["title"], found.report, "results.md"),
            code(found.folder.name),
            str(found.table.get("source", "")),
            str(found.table.get("headline") or found.table.get("question", "")),
        )
        for found in evidence
    ]
    others = {
        "Mechanisms over tokens: time and memory": "docs/bench.html",
        "Where a trained video model looks, and what MiTA changes": "docs/explore.html",
        "What each mechanism can do: probes": PROBES,
        "Is the advice right?": ADVICE,
    }
    more = "\n".join(f"- {link(title, path, 'results.md')}" for title, path in others.items())
    about = link("Results", "docs/results/README.md", "results.md")
    return f"""# All result pages

Each is one file, as `regard report` writes it, with tables that sort, curves and notes. {about} says how each was made.

{table(("page", "folder", "source", "verdicts, or the question"), rows)}

Measured:

{more}
"""


def write(pages: Mapping[str, str | bytes], folder: Path) -> None:
    """Write the pages, a style and a script into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    here = Path(__file__).parent
    files = {**pages, SCRIPT: (here / "iframe-worker.js").read_text(), "assets/regard.css": style()}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def style() -> str:
    """The site's style sheet, with the colours of Regard's charts for the light and the dark theme."""
    shades = palette()
    return (
        f"[data-md-color-scheme=default]{shades['light']}\n[data-md-color-scheme=slate]{shades['dark']}\n"
        + (Path(__file__).parent / "regard.css").read_text()
    )


def make(pages: Path = PAGES, site: Path = SITE, nav: list[Any] | None = None) -> dict[Path, checks.Page]:
    """The site of a folder of pages, checked; returns its HTML pages.

    nav: by default that of these pages.
    Raises: SiteError for warnings of MkDocs, broken links, requests to the network.
    """
    names = {str(path.relative_to(pages)) for path in pages.rglob("*.md")}
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    try:
        config = load_config(
            str(ROOT / "mkdocs.yml"),
            docs_dir=str(pages),
            site_dir=str(site),
            nav=navigation(names) if nav is None else nav,
        )
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    except (Abort, MkDocsException) as error:
        raise SiteError(f"MkDocs refuses a page ({error}); mend what the lines above name, then repeat it") from error
    (site / "404.html").unlink()  # for servers, with links from their root
    built = checks.read(site)
    if found := list(checks.problems(site, built)):
        raise SiteError("\n".join([*found[:40], f"{len(found)} problems; mend these links, then repeat it"]))
    lines = [f"{address}\t{', '.join(where)}" for address, where in checks.external_links(site, built).items()]
    (site / EXTERNAL).write_text("\n".join(lines) + "\n")
    return built
