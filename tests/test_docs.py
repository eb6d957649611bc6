"""The written pages are in step with the code: names, the errata, links, and the commands of the README."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from regard import MIXERS, PROJECTIONS, parse
from regard.cli.app import app, run
from regard.models.catalog import HOSTS
from regard.studies import ANALYSES, STUDIES
from regard.swapping.ports import PORTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STALE = "the page is older than the code: run `python docs/make.py`"


def tables(page: str) -> list[list[str]]:
    """The first column of every table of a page, without its heading."""
    found: list[list[str]] = []
    inside = False
    for line in (DOCS / page).read_text().splitlines():
        if not line.startswith("|"):
            inside = False
        elif not inside:
            inside = True
            found.append([])
        elif not line.startswith("| ---"):
            found[-1].append(line.split("|")[1].strip().strip("`"))
    return found


NAMES = {
    "mechanisms.md": [[cls.__name__ for cls in MIXERS]] * 2 + [[cls.__name__ for cls in PROJECTIONS]],
    "hosts.md": [list(HOSTS), [port.__name__ for port in PORTS]],
    "studies.md": [[*STUDIES, *ANALYSES]],
}


@pytest.mark.parametrize("page", NAMES)
def test_the_tables_have_the_names_of_the_code(page: str) -> None:
    assert tables(page) == NAMES[page], STALE


def test_the_errata_are_what_the_command_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "run", "errata", "--results", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run(["study", "export", "errata", "--results", str(tmp_path), "--format", "md"]) == 0
    assert capsys.readouterr().out.strip() == (DOCS / "errata.md").read_text().strip(), STALE


def test_the_pages_are_written_by_the_script() -> None:
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {*module.PAGES, "choosing.md"} == {path.name for path in DOCS.glob("*.md")}  # the guide is written by hand
    assert module.studies() == (DOCS / "studies.md").read_text(), STALE


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


VERBS = typer.main.get_command(app)


def commands() -> list[str]:
    """The lines of the README and of the guide that begin with `regard`, without their comments."""
    text = (ROOT / "README.md").read_text() + (DOCS / "choosing.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    return [line for kind, block in blocks if not kind for line in block.splitlines() if line.startswith("regard ")]


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_readme_can_be_parsed(line: str) -> None:
    """Known verbs and options; spelled mechanisms can be read."""
    words = shlex.split(line, comments=True)[1:]
    command = VERBS
    while getattr(command, "commands", None) and words:
        assert words[0] in command.commands, line  # type: ignore[attr-defined]
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    assert words or not any(parameter.required for parameter in arguments), line
    assert {word for word in words if word.startswith("--")} <= options, line
    for word in words:
        if re.fullmatch(r"[A-Z]\w+\(.*\)", word):
            parse(word)


def test_the_readme_names_every_verb() -> None:
    text = (ROOT / "README.md").read_text()
    assert [verb for verb in VERBS.commands if f"regard {verb}" not in text] == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{name}" for name in (*NAMES, "choosing.md"))]
)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{page} links to {target}"
