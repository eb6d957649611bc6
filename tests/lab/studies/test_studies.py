"""Every study and analysis of the catalogue: it builds, its keys differ, and (slow) its smoke scale runs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from regard import ConfigError
from regard.lab.engine.analysis import Source, run_analysis
from regard.lab.engine.dry_run import dry_run
from regard.lab.engine.run_study import run_study
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES, STUDIES, load_analysis, load_study
from regard.lab.studies.published_sizes import parameters

EVIDENCE = sorted((Path(__file__).parents[3] / "docs" / "results").glob("*/evidence.json"))
# without attention to the encoder a translation does not know its source
CONTROLS = {"esa_fig3_encoder_decoder": 1, "video_motion": 4}
PAPER = [study for name in STUDIES if "paper" in (study := load_study(name)).settings]
SIZED = [study.name for study in PAPER if any(row.exact for row in study.rows("paper"))]
SMOKE = [name for name in STUDIES if "smoke" in load_study(name).settings]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_whole(name):
    study = load_study(name)
    assert study.name == name
    assert study.question.endswith("?")
    for scale, setting in study.settings.items():
        assert study.baseline in {row.label for row in setting.rows}, f"{scale} scale has no baseline"
        if setting.recipe is not None:
            keys = [run.key for _, run in study.runs(scale)]
            assert len(set(keys)) == len(keys), f"{scale} scale: two rows are the same run"
        assert scale != "desk" or len(setting.numbers) >= 3
        if scale != "paper":
            controls = sum(row.control for row in setting.rows)
            assert controls == CONTROLS.get(name, 2), f"{scale} scale has {controls} controls"


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_says_what_it_answers(name):
    analysis = load_analysis(name)
    assert analysis.name == name
    assert analysis.question.endswith("?")
    assert analysis.of in ("", *STUDIES)


@pytest.mark.parametrize("name", [name for name in ANALYSES if load_analysis(name).of])
def test_an_analysis_without_its_runs_names_the_study(name, tmp_path):
    analysis = load_analysis(name)
    with pytest.raises(ConfigError, match=f"no results of {analysis.of} at desk scale"):
        analysis.compute(Source(Results(tmp_path), "desk"))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("ska_table8", ["CvT base"]),
        ("ska_table1", ["CIFAR-100 SKA a"]),
        ("ska_fig3", ["16 heads"]),
        ("ska_table4", ["gelu"]),
        ("mita_table2", ["Linear", "MHLA", "Agent + bias"]),
        ("mita_table3", ["ViT-5", "MiTA + DWC"]),
        *(pytest.param(name, [], id=name, marks=pytest.mark.slow) for name in SIZED),
    ],
)
def test_rows_have_their_sizes(name, labels):
    """Of the models that a run would train; the integers are by hand or those of the authors' code."""
    setting = load_study(name).setting("paper")
    rows = [row for row in setting.rows if row.exact and row.label in (labels or row.label)]
    assert rows
    for row in rows:
        with torch.device("meta"):
            model = setting.task_of(row).trial(row.mixer).model
        assert parameters(model) == row.exact["params"], row.label


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("mita_table2", "Linear,FLatten,PolaFormer,MHLA,BRA,Agent + bias"),
        ("mita_table3", "*"),
        ("mita_table6", "random,learned,conv,dwconv,ToMe,*only"),
        ("mita_table7", "Linear,Agent 9"),
        ("mita_fig6", "m 9*"),
        ("mita_growth", "*"),
        ("mita_recall", "avg2d,2 experts"),
        ("sne_counting", "2 layers,P-SNE,*codes,code 64"),
        ("mita_experts", "*"),
        ("ska_cka", "*"),
        ("ska_offset", "relu,no scale,8 heads"),
        *(pytest.param(name, "*", marks=pytest.mark.slow) for name in ("esa_table2", "esa_table3")),
    ],
)
def test_small_rows_take_a_step(name, rows):
    lines = dry_run(load_study(name), "smoke", rows)
    assert len(lines) >= 2
    assert {line.label: line.error for line in lines if line.error} == {}
    assert all(math.isfinite(line.loss) for line in lines if line.loss is not None)


@pytest.mark.parametrize("name", ["mita_table1", "ska_table6", "ska_table7", "ska_fig4", "errata"])
def test_an_analysis_of_costs_computes(name, tmp_path):
    value = run_analysis(load_analysis(name), Results(tmp_path))
    assert all(sheet["rows"] for sheet in value["sheets"])


def test_the_formulas_of_ska_table_6_are_ours(tmp_path):
    (sheet,) = run_analysis(load_analysis("ska_table6"), Results(tmp_path))["sheets"]
    verdicts = {row[sheet["columns"].index("verdict")] for row in sheet["rows"]}
    assert verdicts == {"equal"}
    assert len(sheet["rows"]) == 44


@pytest.mark.parametrize("file", EVIDENCE, ids=lambda file: file.parent.name)
def test_committed_evidence_is_of_the_rows_of_today(file):
    """Other claims and notes are free; another setting would leave the published runs without a row."""
    snapshot = json.loads(file.read_text())["snapshot"]
    study = load_study(snapshot["study"])
    rows = {row.label: row for row in study.rows(snapshot["scale"])}
    keys = {(run["row"], run["seed"]): run["key"] for run in snapshot["runs"]}
    assert {(label, seed): study.run(snapshot["scale"], rows[label], seed).key for label, seed in keys} == keys


@pytest.mark.parametrize("name", STUDIES)
def test_claims_have_the_sign_and_the_size_of_the_papers_numbers(name):
    """Numbers and claims are written down apart, so that each confirms the other. Table 5 of MiTA prints its claims as
    means over four tasks, each of which is a study."""
    if name.startswith("mita_table5"):
        pytest.skip("the paper claims the mean of the four tasks")
    study = load_study(name)
    for setting in study.settings.values():
        printed = {row.label: row.paper.get(study.metric) for row in setting.rows}
        for claim in study.claims:
            values = [printed.get(label) for label in (claim.a, claim.b, *(claim.than or ()))]
            if None in values or claim.metric != study.metric:
                continue
            difference = sum(sign * value for sign, value in zip((1, -1, -1, 1), values, strict=False))
            if claim.within is not None:
                assert abs(difference) <= claim.within, claim
            else:
                assert difference > 0, claim
                assert claim.by is None or claim.by == pytest.approx(difference, abs=0.05), claim


@pytest.mark.parametrize("name", STUDIES)
def test_a_published_weight_has_its_tag(name):
    """A bare name of timm loads its newest weights, often of other data than the paper's, unlike a study's own."""
    study = load_study(name)
    for setting in study.settings.values():
        own = {item.__name__ for item in setting.task.extra}
        hosts = [host for row in setting.rows if (host := setting.task_of(row).host).partition("(")[0] not in own]
        hosts += [row.teacher for row in setting.rows if isinstance(row.teacher, str)]
        for host in hosts:
            assert "pretrained=True" not in host or "." in host.partition("(")[0] or "pretrained_cfg=" in host, host


@pytest.mark.parametrize(
    ("name", "other", "scales", "labels"),
    [
        ("mita_experts", "mita_table6", "desk", {"1 expert": "avg2d"}),
        ("mita_experts", "mita_table2", "desk", {"Softmax": "Softmax"}),
        ("mita_growth", "probes_content", "desk", {"softmax at 36": "softmax", "MiTA 9/9 at 36": "MiTA"}),
        ("esa_placement", "esa_fig3_segmentation", "smoke desk paper", ["1111", "w/o", "0000"]),
        ("esa_insertion", "esa_table2", "desk paper", ["0110", "1111", "0010 + deformable", "w/o", "0000"]),
    ],
)
def test_rows_of_two_studies_are_the_same_runs(name, other, scales, labels):
    """Nothing is trained twice. labels: here -> there, or of both."""

    def keys(study, scale):
        return {row.label: run.key for row, run in load_study(study).runs(scale, seeds=3)}

    for scale in scales.split():
        here, there = keys(name, scale), keys(other, scale)
        for label in labels:
            assert here[label] == there[labels[label] if isinstance(labels, dict) else label]
        if name in ("mita_growth", "esa_placement"):
            assert len(set(here.values()) & set(there.values())) == len(labels)


def test_rows_are_compared_with_their_own_host():
    rows = {row.label: row for row in load_study("ska_table1").rows("paper") if not row.control}
    against = {label: row.against for label, row in rows.items() if row.against}
    assert len(against) == 24
    assert all((rows[o].task, rows[o].mixer) == (rows[label].task, None) for label, o in against.items())
    assert against["CIFAR-100 CaiT SKA b"] == "CIFAR-100 CaiT"


def test_titles_of_the_catalogue_and_of_studies_name_one_source():
    for name, (_, _, source) in {**STUDIES, **ANALYSES}.items():
        numbers = set(re.findall(r"\d+", source.partition(",")[2]))
        assert numbers <= set(re.findall(r"\d+", (load_study if name in STUDIES else load_analysis)(name).source)), name


def test_studies_and_analyses_are_not_confused():
    with pytest.raises(ConfigError, match="trains nothing"):
        load_study("errata")
    with pytest.raises(ConfigError, match="ska_table1"):
        load_study("ska_tabel1")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_the_smoke_scale_of_every_row_runs(name, tmp_path):
    counts = run_study(load_study(name), "smoke", Results(tmp_path), seeds=1, workers=2)
    assert counts["failed"] == counts["died"] == 0
    assert counts["done"] == len(load_study(name).runs("smoke", seeds=1))


@pytest.mark.slow
def test_codes_and_accuracies_are_read_from_transfer_runs(tmp_path):
    store = Results(tmp_path)
    run_study(load_study("sne_table4"), "smoke", store, rows="linear,SNE,F-SNE 8,P-SNE", seeds=1, workers=2)
    codes = run_analysis(load_analysis("sne_fig4"), store, "smoke")
    norms = codes["sheets"][0]["rows"]
    matrices = [sheet for sheet in codes["sheets"] if sheet["chart"]]
    assert [sheet["title"].removeprefix("F-SNE 8: ") for sheet in matrices] == [
        "codes before and after", "codes before transfer", "codes after transfer",
    ]  # fmt: skip
    assert [row[:2] for row in norms] == [("F-SNE 8", "before"), ("F-SNE 8", "after")]
    assert norms[0][2] != norms[1][2]
    points, fit = run_analysis(load_analysis("sne_fig5"), store, "smoke")["sheets"]
    assert len(points["rows"]) == 4
    assert fit["rows"][0][1] == 4
