import html
import json
import re
from pathlib import Path

import pytest

from pilot_store import key_of
from regard.cli.app import run
from regard.core import ConfigError, StoreError
from regard.files.records import read_record, record_text, write_record
from regard.lab.report import render, write_report
from regard.lab.report.page_data import read_study
from regard.lab.report.study_page import plot
from regard.pages.figures import LIGHT

from .conftest import SCORES, write_study


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the study as it is."""
    return render(write_study(tmp_path_factory.mktemp("page"), SCORES), "pilot", "desk")


def test_the_page_is_one_small_file_that_names_no_other_and_always_the_same(study, page: str):
    assert render(study(), "pilot", "desk") == page
    assert len(page.encode()) < 3_000_000
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", page)
    assert not re.findall(r"url\((?!data:|#)[^)]*\)", page)
    assert "@import" not in page


def test_text_from_the_store_is_escaped(page: str):
    assert "A demonstration &lt;/script&gt;&lt;b&gt;" in page
    assert "</script><b>" not in page
    assert "MiTA <9/9>" not in page
    assert "MiTA &lt;9/9&gt;" in page
    assert "Test &amp; Co" in page


@pytest.mark.filterwarnings("error")
def test_signs_that_steer_or_turn_text_are_written_out(study):
    """Also in the figures, where they have no glyph."""
    results = study()
    path = results / "studies" / "pilot-desk.json"
    path.write_text(record_text(json.loads(path.read_text().replace("MiTA <9/9>", r"a\u001b[31m\u202eb"))))
    page = render(results, "pilot", "desk")
    assert r"a\x1b[31m\u202eb" in page
    assert not set(page) & {"\x1b", "\u202e"}
    assert plot(results, "pilot", "desk", "svg")


def change(folder: Path, **fields: object) -> None:
    """Write the outcome in the folder of a run anew with other fields."""
    path = folder / "outcome.json"
    write_record(path, json.loads(path.read_text()) | fields)


def data_of(page: str) -> dict:
    """The data of its script."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def first_line(page: str) -> str:
    return re.search(r'<p class="gate[^>]*>(.*?)</p>', page, re.DOTALL)[1]


def test_without_a_passed_gate_nothing_is_judged(study):
    scores = {"softmax": (60.0, 60.5, 60.2), "SKA": (70.0, 70.4, 70.1), "MiTA <9/9>": (59.0, 59.2, 59.5),
              "uniform": (56.0, 56.3, 56.1), "w/o": (62.0, 62.4, 62.2)}  # fmt: skip
    page = render(study(scores=scores), "pilot", "desk")
    assert first_line(page).startswith("Mixing tokens does not help at this scale, so no claim is judged.")
    assert "cannot be judged at this scale" in page
    assert 'class="supported"' not in page
    assert page.count('class="notjudged"') == 2


def test_claims_have_their_verdicts(page: str):
    assert first_line(page).startswith("Mixing tokens helps at this scale. Gate passed")
    assert page.count('<li class="supported">') == 1
    assert page.count('<li class="undecided">') == 1
    assert "Of 2 claims, 1 is supported and 1 is undecided." in page
    assert "after Holm's correction over the study's 2 claims, so that" in html.unescape(page)


def test_claims_that_are_not_judged_yet_count_in_the_correction(study):
    scores = SCORES | {"MiTA <9/9>": SCORES["MiTA <9/9>"][:2]}
    page = html.unescape(render(study(scores=scores), "pilot", "desk"))
    assert "1 is not judged" in page
    assert "after Holm's correction over the study's 2 claims, so that" in page


def test_the_table_has_intervals_and_the_papers_numbers(page: str):
    row = re.search(r"<tr class=\"baseline\">.*?</tr>", page, re.DOTALL)[0]
    assert "88.6" in row
    assert "86.8 to 90.5" in row  # 88.633 +- 4.303 * 0.737 / sqrt(3)
    assert ">72.2<" in row
    assert "exactly 5,717,416" in row
    assert "seed 1: 89.20" in row


def test_two_seeds_have_no_interval(study):
    scores = {label: (80.0 + i, 81.0 + i) for i, label in enumerate(("softmax", "SKA", "MiTA <9/9>", "uniform", "w/o"))}
    page = render(study(scores=scores), "pilot", "desk")
    assert "Intervals need at least three seeds." in page
    assert " to 8" not in re.search(r"<tr class=\"baseline\">.*?</tr>", page, re.DOTALL)[0]


def test_failed_and_missing_runs_and_mixtures_are_said(study):
    root = study()
    change(root / key_of(1, 0), status="failed", error="loss is NaN at step 7", metrics={})
    (root / key_of(1, 1) / "outcome.json").unlink()
    change(root / key_of(1, 2), code="fffffff")
    page = render(root, "pilot", "desk")
    assert "SKA: 1 of 2 seeds failed (seed 0: loss is NaN at step 7)." in page
    assert "1 of 15 runs are missing" in page
    assert "(1 failed)" in page
    assert "The table mixes code versions: abc (12 runs), fffffff (1 run)" in page


def test_a_study_without_any_finished_run_still_has_a_page(study):
    root = study()
    for path in root.glob("*/outcome.json"):
        path.unlink()
    assert "15 of 15 runs are missing" in render(root, "pilot", "desk")


def test_rows_without_token_weights_say_so(page: str):
    assert page.count("has no attention weights between tokens") == 1
    assert page.count('alt="attention of') == 4


def test_the_data_of_the_script_is_json(page: str):
    data = data_of(page)
    assert [row["label"] for row in data["rows"]] == ["softmax", "SKA", "MiTA <9/9>", "w/o", "uniform"]
    assert data["rows"][0]["x"]["images_per_second"] == 4000.0
    assert data["rows"][0]["y"]["top1"]["mean"] == pytest.approx(88.633, abs=1e-3)
    assert len(data["curves"]["top1-wide"]["lines"][0]["mean"]) == 12


def shared(root: Path, others: list[float | None]) -> str:
    """The page after the first runs of the store have these shares of others."""
    for path, share in zip(sorted(root.glob("*/outcome.json")), others, strict=False):
        change(path.parent, others=share)
    return " ".join(render(root, "pilot", "desk").split())


def test_times_are_those_of_runs_that_had_the_machine_to_themselves(study, page: str):
    assert "Images/s" in page
    assert "are left out" not in page
    page = shared(study(), [0.5] * 15)
    reason = "other work, such as other runs of the study, used up to 50 % of the processors"
    assert f"Times of 15 runs are left out: {reason}. Runs that" in page
    assert "Images/s" not in page
    assert "training samples per second" not in page
    assert ">20 s<" not in page


def test_a_row_whose_runs_shared_the_machine_has_no_time(study):
    page = shared(study(), [None] * 3 + [0.02] * 12)
    assert "Times of 3 runs are left out: of 3 it is not known whether they were alone." in page
    times = {row["label"]: row["x"]["images_per_second"] for row in data_of(page)["rows"]}
    assert times.pop("softmax") is None
    assert all(time is not None for time in times.values())


def test_errata_of_the_paper_stand_on_the_page_of_their_table(study, page: str):
    assert "Known errata of the paper" not in page
    root = study()
    path = root / "studies" / "pilot-desk.json"
    snapshot = json.loads(path.read_text())
    write_record(path, {**snapshot, "source": "Static Key Attention in Vision, Table 1"})
    page = render(root, "pilot", "desk")
    part = re.search(r'<section aria-labelledby="h-errata">.*?</section>', page, re.DOTALL)[0]
    assert part.count("<li>") == 6
    assert "<strong>Table 1, SKA-ViT-S a.</strong> Printed: 8.1M parameters. Found: 8,249,322" in part
    assert "Six static keys save 1.373M." in part
    assert "CAFormer-S18" not in page


def test_a_page_is_called_by_study_and_scale(study, tmp_path):
    root = study()
    pages = write_report(root, tmp_path / "pages", "pilot")
    assert [page.name for page in pages] == ["pilot-desk.html"]


def test_wrong_names_and_empty_stores_are_explained(study, tmp_path):
    with pytest.raises(ConfigError, match="did you mean pilot"):
        write_report(study(), tmp_path / "pages", "pilto")
    with pytest.raises(StoreError, match="regard study run"):
        write_report(tmp_path / "empty", tmp_path / "pages")


def test_what_was_computed_in_several_ways_is_said_and_not_compared(study, page: str):
    assert "not by time or memory" not in page
    root = study()
    for path in sorted(root.glob("*/outcome.json"))[::2]:
        environment = json.loads(path.read_text())["environment"]
        change(path.parent, environment=environment | {"torch.compile": True, "threads": 1})
    page = render(root, "pilot", "desk")
    assert "<dt>torch.compile</dt><dd>true (8 runs)<br>not recorded (7 runs)</dd>" in page
    assert "<dt>threads</dt><dd>1 (8 runs)<br>not recorded (7 runs)</dd>" in page
    assert "The runs differ in torch.compile and threads: compare rows by MACs and parameters, not by time" in page
    assert '<select id="x-axis"><option value="macs">' in page


def test_a_damaged_outcome_stops_the_page_of_its_study_only(study, tmp_path):
    root = study()
    snapshot = json.loads((root / "studies" / "pilot-desk.json").read_text())
    snapshot |= {"scale": "smoke", "runs": snapshot["runs"][:-1]}
    write_record(root / "studies" / "pilot-smoke.json", snapshot)
    damaged = root / json.loads((root / "studies" / "pilot-desk.json").read_text())["runs"][-1]["key"] / "outcome.json"
    damaged.write_text(damaged.read_text()[:-20])
    with pytest.raises(StoreError, match=rf"{damaged.parent.name}.*1 other pages were written"):
        write_report(root, tmp_path / "pages")
    assert [page.name for page in (tmp_path / "pages").iterdir()] == ["pilot-smoke.html"]


@pytest.mark.parametrize(
    "change",
    [
        {"grid": ["a", "b"]}, {"grid": [3]}, {"grid": [4, 4]}, {"query": ["x;y", 1]}, {"image": "');background:url(x"},
        {"layers": [{"layer": "a"}]}, {"layers": 3}, {"grid": [-3, -4], "query": None}, {"grid": [3.5, 4.2]},
        {"grid": "34", "layers": []}, {"grid": [0, 4], "query": None, "layers": []}, {"query": [3, 0]},
        {"query": [0, -1]}, {"query": [0.5, 1]}, {"query": []},
    ],
    ids=str,
)  # fmt: skip
def test_maps_that_are_none_are_refused(study, change: dict):
    root = study()
    path = root / "000000000000" / "probes" / "maps.json"
    write_record(path, {**read_record(path), **change})
    with pytest.raises(StoreError, match="no attention maps"):
        render(root, "pilot", "desk")


@pytest.mark.parametrize(("format", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_the_plot_for_a_paper_has_plain_colours(study, tmp_path: Path, format: str, start: bytes) -> None:
    file = tmp_path / f"plot.{format}"
    options = ["pilot", "--scale", "desk", "--results", str(study()), "--format", format]
    assert run(["study", "export", *options, "--out", str(file)]) == 0
    content = file.read_bytes()
    assert content.startswith(start)
    if format == "svg":
        assert "#0a00" not in content.decode()
        assert "#0b000" not in content.decode()
        assert LIGHT[0] in content.decode()
    assert run(["study", "export", *options]) == 2


def test_memory_is_the_least_of_a_rows_runs(study) -> None:
    root = study()
    for size, path in enumerate(sorted(root.glob("*/outcome.json"))):
        change(path.parent, memory_bytes=10_000_000 * (size + 1))
    found = read_study(root, "pilot", "desk")
    for row in range(len(found.rows)):
        assert found.average(row, "memory_bytes") == min(run.outcome["memory_bytes"] for run in found.of(row))
    assert ">Memory" in render(root, "pilot", "desk")
