"""The site: its pages are complete, its links lead somewhere, it asks no network, and its search works from files."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="the tools of the site are missing: pip install --group docs")

from regard import MIXERS
from regard.lab.studies.errata import ERRATA
from tools.site import build, checks, mechanisms, papers, reference, stage
from tools.site.evidence import Evidence, all_evidence
from tools.site.formulas import FORMULAS, formula
from tools.site.navigation import navigation

SCORES = {"softmax": 97.5, "uniform average": 26.6, "w/o": 10.0, "SKA": 26.4}
LARGEST = 30e6
"""Bytes of the whole site."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    build.write(build.all_pages(), folder / "pages")
    build.make(folder / "pages", folder / "site")
    return folder / "site"


def small_site(folder: Path, text: str) -> dict[Path, checks.Page]:
    """A site of two pages, with a text on the first."""
    build.write({"README.md": f"# One\n\n{text}\n", "docs/two.md": "# Two\n\n## A part\n"}, folder / "pages")
    return build.make(folder / "pages", folder / "site", nav=["README.md", "docs/two.md"])


# a few seconds


def test_formulas_are_of_mechanisms() -> None:
    assert FORMULAS.keys() <= {cls.__name__ for cls in MIXERS}
    for name in FORMULAS:
        assert re.fullmatch(r'<div class="formula"><math display="block">.*</math></div>', formula(name, ""))
    assert formula("New", "q k") == "`q k`"


def test_a_site_without_mistakes_is_built(tmp_path: Path) -> None:
    pages = small_site(tmp_path, "[two](docs/two.md#a-part), [outside](https://example.org/page)")
    assert {path.name for path in pages} == {"index.html", "two.html"}
    assert (tmp_path / "site" / build.EXTERNAL).read_text().startswith("https://example.org/page\tindex.html\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[two](docs/three.md)", "MkDocs refuses a page"),
        ("[two](docs/two.md#another-part)", "MkDocs refuses a page"),
        ('<a href="docs/three.html">two</a>', r"index\.html: the link docs/three\.html leads to no file"),
        ('<a href="docs/two.html#another-part">two</a>', "leads to no place on its page"),
        ("![picture](https://example.org/picture.png)", "index.html asks the network for https://example.org/"),
        ('<script src="//example.org/script.js"></script>', "index.html asks the network for //example.org/"),
        ('<p style="background: url(https://example.org/a.png)">text</p>', "style that asks the network"),
        ('<style>@import "https://example.org/style.css";</style>', "style that asks the network"),
    ],
)
def test_a_planted_mistake_ends_the_build(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(build.SiteError, match=message):
        small_site(tmp_path, text)


def test_only_opening_fences_become_commands() -> None:
    text = "```python\nx = 1\n```\n\n## Heading\n\n```\nmake test\n```\n"
    assert stage.adapted(text) == text.replace("```\nmake", "```sh\nmake")


def test_comments_for_tests_are_left_out_and_code_in_tables_is_plain() -> None:
    assert stage.adapted("<!-- run here after: x = 1 -->\n| `a \\| b` | c \\| d |\n") == "| `a | b` | c \\| d |\n"


def test_links_to_modules_lead_to_their_api(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[one](src/regard/mixers/softmax.py) [two](src/regard/swapping/swap.py)\n")
    text, linked = stage.page(tmp_path, "README.md")
    assert text == "[one](mechanisms/Softmax.md) [two](reference/swapping.md)\n"
    assert linked == []


def test_names_in_tables_and_folders_of_results_become_links() -> None:
    text = "`SKA` of `quickstart-desk`\n\n| `SKA` | `MiTA(m=9)` | `SKATE` | [`XCA`](x.md) |\n"
    assert stage.with_links("docs/page.md", text) == (
        "`SKA` of [`quickstart-desk`](results/quickstart-desk/report.html)\n\n"
        "| [`SKA`](../mechanisms/SKA.md) | [`MiTA(m=9)`](../mechanisms/MiTA.md) | `SKATE` | [`XCA`](x.md) |\n"
    )


def test_names_of_the_root_have_a_page_and_a_sentence() -> None:
    text = reference.index()
    assert "| [`Grid`](core.md#regard.core.grid.Grid) | height x width patch tokens in rows" in text
    assert "| [`swap`](swapping.md#regard.swapping.swap.swap) |" in text
    assert "[`SKA`](../mechanisms/SKA.md#regard.mixers.static_keys.ska.SKA)" in text


def test_linked_pages_and_files_come_along(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[more](notes.md) `[no](link.md)`\n```python\nx[0](y.md)\n```\n")
    (tmp_path / "notes.md").write_text("[goals](goals.toml)\n")
    (tmp_path / "goals.toml").write_text("a = 1\n")
    with pytest.raises(stage.StageError, match=r"README\.md links to the missing file link\.md"):
        stage.repository_pages(tmp_path)
    (tmp_path / "README.md").write_text("[more](notes.md)\n```python\nx[0](y.md)\n```\n")
    pages = stage.repository_pages(tmp_path)
    assert pages.keys() == {"README.md", "notes.md", "goals.toml.txt"}
    assert pages["notes.md"] == "[goals](goals.toml.txt)\n"


def test_pages_without_a_file_are_left_out_and_new_ones_are_guides() -> None:
    entries = navigation({"README.md", "docs/swap.md", "docs/new.md", "docs/claims.md"})
    assert entries == [
        {"Start": "README.md"},
        {"Guides": [{"Swap in five minutes": "docs/swap.md"}, "docs/new.md"]},
        {"Evidence": [{"Claims of the papers": "docs/claims.md"}]},
    ]


def test_the_page_of_a_mechanism_has_its_evidence() -> None:
    text = mechanisms.results("MiTA", all_evidence())
    assert "`MiTA(dwc=3, m=16, k=16)`" in text
    assert "MiTA + DWC is above Softmax in top1" in text
    assert "Linear is above" not in mechanisms.results("Conv", all_evidence())


def test_abilities_are_those_of_committed_probes_beside_controls() -> None:
    rows = [{"label": label, "mean": mean, "low": None, "control": False} for label, mean in SCORES.items()]
    spellings = [{"label": "SKA", "spelling": "SKA(scale=1.0)"}, {"label": "softmax", "spelling": "Softmax()"}]
    table = {"study": "probes_content", "rows": rows}
    probe = Evidence(Path("probes_content-desk"), table, {"rows": spellings})
    text = mechanisms.abilities("SKA", [probe])
    assert "| `SKA(scale=1.0)` | 26.4 | 97.5 | 26.6 | 10.0 |" in text
    assert "Not measured yet" in mechanisms.abilities("MiTA", [probe])
    assert "Not measured yet" not in mechanisms.abilities("Softmax", []), "the package ships these scores"


def test_every_package_of_the_source_is_on_a_page() -> None:
    without = {"cli"}  # verbs have their help
    folders = {path.name for path in reference.SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders - without == {package for package in reference.PACKAGES if "/" not in package}


# the whole site: about a minute


@pytest.mark.slow
def test_every_mechanism_and_paper_has_a_page(site: Path) -> None:
    for cls in MIXERS:
        text = (site / "mechanisms" / f"{cls.__name__}.html").read_text()
        assert "<math" in text
        assert f'src="{cls.__name__}.png"' in text
        assert (site / "mechanisms" / f"{cls.__name__}.png").stat().st_size > 5_000
        assert f"{cls.__module__}.{cls.__name__}" in text, "the API is missing"
        assert "<svg" in text.partition("What it costs")[2]
        assert all(heading in text for heading in ("Options", "Evidence", "What it can do"))
    for name, (title, _) in papers.PAPERS.items():
        text = (site / "papers" / f"{name}.html").read_text()
        assert title in text
        assert text.count("<tr>") > len(ERRATA[title])


@pytest.mark.slow
def test_a_study_has_the_place_in_its_paper_as_heading(site: Path) -> None:
    text = (site / "papers" / "sne.html").read_text()
    assert re.search(r"<h3[^>]*>Table 2: <a", text)
    assert "70.9" in text.partition("N12 SNE")[2][:60], "the printed number is not beside its row"


@pytest.mark.slow
def test_every_committed_study_is_on_the_page_of_its_paper(site: Path) -> None:
    text = "".join((site / "papers" / f"{name}.html").read_text() for name in papers.PAPERS)
    committed = [found for found in all_evidence() if found.table["source"] != "Regard"]
    assert committed
    assert [found.folder.name for found in committed if found.report not in text] == []


@pytest.mark.slow
def test_links_and_requests_of_the_whole_site(site: Path) -> None:
    pages = checks.read(site)
    assert list(checks.problems(site, pages)) == []
    assert len(pages) > 80
    attributes = re.compile(r"<(?!a\b)[a-z][^<>]*\s(?:src|href|srcset|data|action)=[\"']?(?:https?:)?//")
    assert [path for path in pages if attributes.search(path.read_text())] == []
    assert "unpkg" not in "".join(page.text for page in pages.values())


@pytest.mark.slow
def test_the_site_is_small(site: Path) -> None:
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < LARGEST


@pytest.mark.slow
@pytest.mark.browser
def test_search_works_from_files_and_nothing_is_asked_of_the_network(site: Path, browser: Any) -> None:
    requests: list[str] = []
    errors: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "mechanisms" / "MiTA.html").as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("static keys")
    found = page.locator(".md-search-result__link").first
    found.wait_for(timeout=20_000)
    target = found.get_attribute("href") or ""
    for name in ("index.html", "papers/ska.html", "reference/core.html", "docs/choosing.html"):
        page.goto((site / name).as_uri())
    page.close()
    assert ".html" in target
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
