"""The pages of the repository as pages of the site: the same files in the same folders, with what their links need.

Links of pages are followed: a linked page becomes a page, a linked file is copied, a link to a module of Regard leads
to the page with its API.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from regard.mixers.table import MECHANISMS

from .evidence import RESULTS, ROOT
from .markdown import link
from .mechanisms import page_of as mechanism_page
from .reference import PACKAGES
from .reference import page_of as package_page

START = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "docs/results/README.md")
"""Pages beside those of docs/*.md."""
READABLE = (".html", ".svg", ".png", ".json", ".csv", ".txt", ".css")
"""Files that a browser shows; others get the ending .txt."""
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?(?: \"[^\"]*\")?\))")


class StageError(ValueError):
    """A page of the repository links to what cannot be on the site."""


def repository_pages(root: Path = ROOT) -> dict[str, str | bytes]:
    """path -> content of all pages of the repository and of the files that they link to.

    Raises: StageError for a link to a missing file, or to a folder without a README.md.
    """
    found: dict[str, str | bytes] = {}
    names = [*START, *(str(path.relative_to(root)) for path in sorted((root / "docs").glob("*.md")))]
    waiting = [name for name in names if (root / name).exists()]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name], linked = page(root, name)
        for target in linked:
            if target.endswith(".md"):
                waiting.append(target)
            else:
                found[shown_name(target)] = (root / target).read_bytes()
    return found


def page(root: Path, name: str) -> tuple[str, list[str]]:
    """(content, paths of the files that it links to) of a page."""
    linked: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(name), match[2]))
        goal = api_page(target) or result_page(target)
        if goal is None:
            target = existing(root, name, target)
            linked.append(target)
            goal = shown_name(target)
        return match[1] + os.path.relpath(goal, os.path.dirname(name) or ".") + match[3]

    text = adapted((root / name).read_text(encoding="utf-8"))
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [with_links(name, _LINK.sub(replaced, part)) for part in parts[::2]]
    return "".join(parts), linked


def with_links(name: str, text: str) -> str:
    """The text of a page, with links from mechanisms in its tables and from folders of results to their pages.

    The pages of mechanisms exist on the site only, so that the pages of the repository cannot have these links.
    """
    mechanisms = {mechanism: mechanism_page(mechanism) for mechanism in MECHANISMS}
    results = {
        path.parent.name: f"{path.parent.relative_to(ROOT)}/report.html" for path in RESULTS.glob("*/table.json")
    }
    if name != "CHANGELOG.md":
        text = re.sub(r"^\|.*$", lambda row: _linked(row[0], mechanisms, name), text, flags=re.MULTILINE)
    return _linked(text, results, name)


def _linked(text: str, targets: Mapping[str, str], name: str) -> str:
    """The text with a link from each code that is the name of a target, "MiTA" or "MiTA(...)", and no link yet."""
    pattern = rf"(?<!\[)`({'|'.join(map(re.escape, targets))})(\([^`]*\))?`(?!\])"
    return re.sub(pattern, lambda found: link(found[0], targets[found[1]], name), text) if targets else text


def existing(root: Path, name: str, target: str) -> str:
    """The file that a link means, README.md for a folder. Raises: StageError."""
    path = root / target
    if path.is_dir() and (path / "README.md").exists():
        return f"{target}/README.md"
    if not path.is_file():
        kind = "the folder" if path.is_dir() else "the missing file"
        raise StageError(f"{name} links to {kind} {target}: link to a page or to a file that exists")
    return target


def shown_name(target: str) -> str:
    """The path of a copied file."""
    return target if target.endswith((".md", *READABLE)) else f"{target}.txt"


def api_page(target: str) -> str | None:
    """The page with the API of a module below src/regard, None for other files."""
    match = re.fullmatch(r"src/regard/(.+)\.py", target)
    if not match:
        return None
    mechanisms: Mapping[str, str] = {module: name for name, module in MECHANISMS.items()}
    if match[1].startswith("mixers/"):
        module = match[1].removeprefix("mixers/").replace("/", ".")
        if module in mechanisms:
            return mechanism_page(mechanisms[module])
    fitting = [package for package in PACKAGES if match[1].startswith(f"{package}/")]
    return package_page(max(fitting, key=len)) if fitting else None


def result_page(target: str) -> str | None:
    """The page that the site has for a table of docs/results, None for other files."""
    match = re.fullmatch(r"(docs/results/[^/]+)/table\.md", target)
    return f"{match[1]}/report.html" if match else None


def adapted(text: str) -> str:
    """A page as MkDocs reads it: without comments for tests, and commands marked as such.

    Python-Markdown shows the backslash before "|" inside code of a table; GitHub needs it.
    """
    text = re.sub(r"^<!-- [^\n]* -->\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^```(\w*)\n(.*?)^```$", _marked, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", _unescaped, row[0]), text, flags=re.MULTILINE)


def _marked(block: re.Match[str]) -> str:
    return f"```{block[1] or 'sh'}\n{block[2]}```"


def _unescaped(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
