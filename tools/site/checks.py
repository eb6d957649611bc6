"""What the built site promises: all internal links and anchors lead somewhere, and no page asks the network."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REQUESTS = {"src", "srcset", "poster", "data", "action", "formaction", "background", "manifest", "xlink:href", "href"}
"""Attributes with which a page asks for a file; href only outside of <a>."""
OUTSIDE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
CSS_REQUEST = re.compile(r"(?:url\(|@import)\s*[\"']?\s*(?:https?:)?//", re.IGNORECASE)


@dataclass
class Page(HTMLParser):
    """What a page has: ids, the targets of its links, the files that it asks for, and the text of its styles."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    titles: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._style = False
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.ids.add(value)
            elif name == "href" and tag == "a":
                self.links.append(value)
            elif name in REQUESTS:
                self.requests.append(value)
            elif name == "style":
                self.styles.append(value)

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.styles.append(data)


def read(site: Path) -> dict[Path, Page]:
    """Every HTML file of a site."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def problems(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """A sentence for each link that leads nowhere and for each request to the network."""
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in [*page.links, *page.requests]:
            if not urlsplit(target).scheme and not OUTSIDE.match(target):
                yield from (f"{name}: {problem}" for problem in _missing(path, target, pages))
        yield from (f"{name} asks the network for {target}" for target in page.requests if OUTSIDE.match(target))
        yield from (f"{name} has a style that asks the network" for style in page.styles if CSS_REQUEST.search(style))
    for path in sorted(site.rglob("*.css")):
        if CSS_REQUEST.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} asks the network"


def _missing(path: Path, target: str, pages: dict[Path, Page]) -> Iterator[str]:
    """What an internal link of a page lacks: its file or its anchor."""
    parts = urlsplit(target)
    goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    goal = goal / "index.html" if goal.is_dir() else goal
    anchor = unquote(parts.fragment)
    if not goal.is_file():
        yield f"the link {target} leads to no file"
    elif anchor and goal in pages and anchor not in pages[goal].ids and not anchor.startswith(("__", ":~:")):
        yield f"the link {target} leads to no place on its page"


def external_links(site: Path, pages: dict[Path, Page]) -> dict[str, list[str]]:
    """Address -> the pages that link to it; nobody follows them here."""
    found: dict[str, list[str]] = {}
    for path, page in pages.items():
        for target in dict.fromkeys(page.links):
            if OUTSIDE.match(target) or urlsplit(target).scheme in ("http", "https"):
                found.setdefault(target, []).append(str(path.relative_to(site)))
    return dict(sorted(found.items()))
