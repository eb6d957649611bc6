"""Pages follow from the code: tables, errata, links. What they show to type is run by test_documented.py."""

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import typer

from regard import MIXERS, PROJECTIONS
from regard.cli.app import app, run
from regard.lab.studies import ANALYSES, STUDIES
from regard.lab.train.recipe import Recipe
from regard.mixers.shared.executions import RULES
from regard.models.catalog import HOSTS
from regard.swapping.ports import PORTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STALE = "the page is older than the code: run `make generated`"


def docs_pages() -> ModuleType:
    """The script that writes the pages."""
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "tools" / "docs_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITTEN = docs_pages().PAGES


def tables(page: str) -> list[list[str]]:
    """The first column of every table of a page, without its heading.

    tests/swapping/test_matrix.py compares the table of hosts.md that is left out here: what works after a swap.
    """
    text = re.sub(
        r"^## What works after a swap$.*?(?=^## )", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL
    )
    rows = [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    return [[row.split("|")[1].strip().strip("`") for row in table] for table in rows]


FAMILIES = json.loads((DOCS / "ports.json").read_text())["families"]
LIBRARIES = json.loads((DOCS / "libraries.json").read_text())
KINDS = dict.fromkeys((row["library"], *row["classes"], *row["ports"]) for row in LIBRARIES["compared"])
NAMES = {
    "mechanisms.md": [
        *([cls.__name__ for cls in MIXERS],) * 2,
        [mechanism for mechanism, rules in RULES.items() for _ in rules],
        [cls.__name__ for cls in PROJECTIONS],
    ],
    "hosts.md": [
        list(HOSTS),
        [port.__name__ for port in PORTS],
        [*FAMILIES, "all"],
        [f"{library} {LIBRARIES['versions'][library]}" for library, *_ in KINDS],
        [row["class"] for row in LIBRARIES["left"]],
    ],
    "studies.md": [[*STUDIES, *ANALYSES]],
}


@pytest.mark.parametrize("page", NAMES)
def test_the_tables_have_the_names_of_the_code(page: str) -> None:
    assert tables(page) == NAMES[page], STALE


def test_the_recipe_of_the_docs_has_the_fields_and_defaults_of_the_code() -> None:
    section = (DOCS / "tasks.md").read_text().partition("## The recipe")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    written = {name.strip("` "): value for names, value in rows for name in names.split(",")}
    defaults = {field.name: getattr(Recipe(), field.name) for field in fields(Recipe)}
    assert written == {name: str(value).strip("()").replace(", ", ",") or "none" for name, value in defaults.items()}


def test_the_errata_are_what_the_command_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "run", "errata", "--results", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run(["study", "export", "errata", "--results", str(tmp_path), "--format", "md"]) == 0
    assert capsys.readouterr().out.strip() == (DOCS / "errata.md").read_text().strip(), STALE


@pytest.mark.parametrize("page", WRITTEN)
def test_the_page_is_what_the_script_writes(page: str) -> None:
    assert (DOCS / page).read_text() == WRITTEN[page](), STALE


def test_the_picture_has_every_mechanism() -> None:
    drawn = set(re.findall(r">([^<>]+)</text>", (DOCS / "taxonomy.svg").read_text()))
    assert {cls.__name__ for cls in MIXERS} <= drawn, STALE


def readme_tables() -> set[str]:
    return set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*$", (ROOT / "README.md").read_text(), re.MULTILINE))))


def test_the_readme_has_every_mechanism_and_projection() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [cls.__name__ for cls in MIXERS if cls.__name__ not in readme_tables()]
    missing += [cls.__name__ for cls in PROJECTIONS if f"`{cls.__name__}`" not in text]
    assert not missing, f"README.md lacks {missing}"


VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_page_of_commands_has_every_verb() -> None:
    text = (DOCS / "commands.md").read_text()
    assert [verb for verb in VERBS if f"regard {verb}" not in text] == []


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"""\]\(([^)#"]+)\)""", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{page} links to {target}"
