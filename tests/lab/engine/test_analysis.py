from dataclasses import replace

import pytest

from pilot_store import key_of, make_store
from regard import ConfigError
from regard.core import StoreError
from regard.files.records import write_record
from regard.lab.engine.analysis import Analysis, Source, analysis_path, csv_text, load_analysis, markdown, run_analysis
from regard.lab.report import write_pages
from regard.lab.results.results import Results
from regard.pages.sheets import Chart, Picture, Sheet

SHEET = Sheet(
    title="Squares",
    columns=("name", "n", "square"),
    rows=(("a", 1, 1), ("a", 2, 4), ("b", 1, None), ("b", 3, 9.5)),
    chart=Chart(x="n", y="square", series="name"),
    published=("square",),
)
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def made(*parts, **fields):
    text = dict(name="demo", title="A <demo>", source="nowhere", question="How?")
    return Analysis(**text, compute=lambda source: parts, **fields)


def test_what_is_computed_is_kept_and_read_again(tmp_path):
    value = run_analysis(made(SHEET, Picture(title="Dot", image=DOT)), Results(tmp_path))
    kept = load_analysis(analysis_path(tmp_path, "demo"))
    assert kept["sheets"] == value["sheets"]
    assert kept["pictures"][0]["title"] == "Dot"
    assert value["code"]
    assert kept["environment"]["torch"]


def test_markdown_rounds_and_csv_does_not(tmp_path):
    value = 71.89999999999999
    rows = (("a|b", value), ("c", None), ("d", 3))
    sheet = Sheet(title="S", columns=("row", "top1"), rows=rows)
    found = run_analysis(made(sheet), Results(tmp_path))
    assert [line for line in markdown(found).splitlines() if line.startswith("| ")][2:] == [
        r"| a\|b | 71.9 |",
        "| c |  |",
        "| d | 3 |",
    ]
    assert repr(value) in csv_text(found)


@pytest.mark.parametrize("kind", ["line", "points", "bars"])
def test_the_page_draws_the_numbers_and_escapes_text(tmp_path, kind):
    sheet = Sheet(
        title="<b>", columns=SHEET.columns, rows=SHEET.rows, chart=Chart(x="n", y="square", series="name", kind=kind)
    )
    run_analysis(made(sheet), Results(tmp_path))
    (page,) = write_pages(tmp_path, tmp_path / "out", "demo")
    text = page.read_text()
    assert "A &lt;demo&gt;" in text
    assert "<b>" not in text
    assert text.count("<svg") == 1
    assert ">9.5<" in text


def test_wrong_sheets_are_refused():
    with pytest.raises(ConfigError, match="2 cells under 3 columns"):
        Sheet(title="t", columns=("a", "b", "c"), rows=((1, 2),))
    with pytest.raises(ConfigError, match="no column 'z'"):
        Sheet(title="t", columns=("a", "b"), rows=(), chart=Chart(x="a", y="z"))


def test_another_version_and_an_empty_store_say_what_to_do(tmp_path):
    path = analysis_path(tmp_path, "demo")
    path.parent.mkdir()
    path.write_text('{"version": 7}')
    with pytest.raises(StoreError, match="version 7"):
        load_analysis(path)
    with pytest.raises(StoreError, match="regard study run"):
        write_pages(tmp_path / "empty", tmp_path / "out")


SHEET_ENTRIES = {"title": "t", "columns": ["a", "b"], "rows": [[1, 2]]}


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": None}, "source is None; a string is expected"), ({"notes": "n"}, "notes"),
        ({"runs": [{"key": []}]}, "runs"), ({"environment": []}, "environment"), ({"sheets": {}}, "sheets"),
        ({"sheets": [{"title": "t"}]}, "columns"), ({"sheets": [SHEET_ENTRIES | {"rows": [[1]]}]}, "1 cells under 2"),
        ({"sheets": [SHEET_ENTRIES | {"rows": 3}]}, "int"), ({"sheets": [SHEET_ENTRIES | {"rows": [[1, {}]]}]}, "{}"),
        ({"sheets": [SHEET_ENTRIES | {"columns": [1, 2]}]}, "columns"),
        ({"sheets": [SHEET_ENTRIES | {"chart": {"x": "a", "y": "z"}}]}, "no column 'z'"),
        ({"sheets": [SHEET_ENTRIES | {"chart": {"x": "a", "y": "b", "kind": "heat"}}]}, "no column ''"),
        ({"sheets": [SHEET_ENTRIES | {"chart": {"x": "a", "y": "b", "kind": "pie"}}]}, "pie"),
        ({"pictures": [{"title": "t", "image": 3}]}, "image"),
        ({"pictures": [{"title": "t", "image": DOT, "layers": {"a": 1}}]}, "layers"),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_result_is_named(tmp_path, change, message):
    path = analysis_path(tmp_path, "demo")
    write_record(path, {**run_analysis(made(SHEET), Results(tmp_path)), **change})
    with pytest.raises(StoreError, match=rf"demo.json is damaged or of another version \(.*{message}"):
        load_analysis(path)


def test_what_a_result_leaves_out_is_empty(tmp_path):
    path = analysis_path(tmp_path, "demo")
    least = {"sheets": [SHEET_ENTRIES], "pictures": [{"title": "Dot", "image": DOT}], "runs": [{"key": "a" * 12}]}
    write_record(path, {**run_analysis(made(), Results(tmp_path)), **least})
    (page,) = write_pages(tmp_path, tmp_path / "out", "demo")
    assert "Runs that were read: 1" in page.read_text()
    assert "## t" in markdown(load_analysis(path))


def test_the_scale_of_the_study_that_is_read_is_in_the_name(tmp_path):
    seen = []

    def compute(source: Source):
        seen.append(source.scale)
        return [SHEET]

    analysis = Analysis(name="demo", title="t", source="s", question="q", compute=compute, of="quickstart")
    run_analysis(analysis, Results(tmp_path), "smoke")
    assert seen == ["smoke"]
    assert analysis_path(tmp_path, "demo", "smoke").name == "demo-smoke.json"
    assert analysis_path(tmp_path, "demo", "smoke").exists()


def test_a_result_names_the_runs_that_it_read_and_their_data(tmp_path):
    store = make_store(tmp_path, {"softmax": [88.9, 89.2], "SKA": [92.3]})
    analysis = made(SHEET, Picture(title="Dot", image=DOT, layers={"shade": DOT}))
    read = replace(analysis, compute=lambda source: source.outcome(key_of(1, 0)) and analysis.compute(source))
    (named,) = run_analysis(read, store)["runs"]
    assert (named["key"], named["row"], named["seed"], named["data"]) == (key_of(1, 0), "SKA", 0, "digits")
    (page,) = write_pages(tmp_path, tmp_path / "out", "demo")
    text = page.read_text()
    assert "Runs that were read: 1" in text
    assert f">{key_of(1, 0)}<" in text
    assert text.count(f"base64,{DOT}") == 3  # the picture as it is, in grey, and the layer over that
    run_analysis(analysis, store)
    assert "The runs that it read" not in write_pages(tmp_path, tmp_path / "out", "demo")[0].read_text()
