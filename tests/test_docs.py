"""Pages follow from the code: tables, errata, links. What they show to type is run by test_documented.py."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from regard import MIXERS, PROJECTIONS
from regard.cli.app import app, run
from regard.lab.studies import ANALYSES, STUDIES
from regard.lab.train.recipe import Recipe
from regard.models.catalog import HOSTS
from regard.swapping.ports import PORTS
from tools.docs_pages import PAGES as WRITTEN

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STALE = "the page is older than the code: run `make generated`"


MECHANISMS = [cls.__name__ for cls in MIXERS]
NAMES = {
    "README.md": [f"`{name}`" for name in (*MECHANISMS, *(cls.__name__ for cls in PROJECTIONS))],
    "docs/commands.md": [f"regard {verb}" for verb in typer.main.get_command(app).commands],  # type: ignore[attr-defined]
    "docs/mechanisms.md": [f"| `{name}` |" for name in (*MECHANISMS, *(cls.__name__ for cls in PROJECTIONS))],
    "docs/hosts.md": [f"| `{name}` |" for name in (*HOSTS, *(port.__name__ for port in PORTS))],
    "docs/studies.md": [f"| `{name}` |" for name in (*STUDIES, *ANALYSES)],
    "docs/taxonomy.svg": [f">{name}</text>" for name in MECHANISMS],
}


@pytest.mark.parametrize("page", NAMES)
def test_a_page_has_every_name_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in NAMES[page] if name not in text] == [], STALE


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


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"""\]\(([^)#"]+)\)""", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{page} links to {target}"
