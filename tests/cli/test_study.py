"""`regard study`: exit codes, messages, and what is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import answer, refused
from pilot_store import make_store
from regard.cli.app import run
from regard.cli.tables import without_empty_columns
from regard.files.records import read_record, write_record
from regard.lab.engine.export import import_runs
from regard.lab.engine.table import snapshot_path
from regard.lab.results.layout import TUNING_SEED
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks

EVIDENCE = Path(__file__).parents[2] / "docs" / "results"


def test_the_scales_of_a_kept_analysis_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses" / "esa_fig1-smoke.json").write_text("{}")
    desk = ["--scale", "desk", "--results", str(tmp_path)]
    messages = "no result of esa_fig1 at desk scale", "there are results with --scale smoke"
    refused(capsys, ["study", "export", "esa_fig1", *desk], *messages, code=1)
    refused(capsys, ["study", "export", "mita_fig9", *desk], "`regard study run` computes it", code=1)


def test_a_dry_run_shows_no_columns_of_counts_that_nobody_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "run", "quickstart", "--dry-run", "--rows", "w/o"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["label", "params", "macs", "loss"] in lines
    assert answer(capsys, "study", "run", "quickstart", "--dry-run", "--rows", "w/o")[0]["params_paper"] is None
    published = [{"row": "a", "paper": None, "exact": ""}, {"row": "b", "paper": 0, "exact": ""}]
    assert without_empty_columns(published) == [{"row": "a", "paper": None}, {"row": "b", "paper": 0}]


def test_export_and_status_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path)
    assert run(["study", "export", "pilot", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("row,seed,top1,loss\nsoftmax,0,88.9,1.0\n")
    assert run(["study", "export", "pilot", "--results", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["claims"][0]["verdict"]["word"] == "supported"
    (state,) = answer(capsys, "study", "status", "--results", str(tmp_path))
    assert state["runs"] == state["done"] == 15
    assert state["claims"] == "1 supported"


def test_status_counts_the_runs_that_choose_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_runs(EVIDENCE / "quickstart-desk" / "evidence.json", store := Results(tmp_path))
    for seed in (TUNING_SEED, 17):
        outcome = {"status": "done", "study": "quickstart", "scale": "desk", "seed": seed, "metrics": {"top1": 50.0}}
        store.finish(f"{seed:012x}", outcome)
    (line,) = answer(capsys, "study", "status", "--results", str(tmp_path))
    assert (line["runs"], line["done"], line["tuning"]) == (40, 40, 1)


def test_tables_and_pages_of_results_load_no_torch(tmp_path: Path) -> None:
    """In one process, one after the other."""
    make_store(tmp_path)
    words = [["list"], ["status", "--results", str(tmp_path)], ["export", "pilot", "--results", str(tmp_path)]]
    code = (
        f"import sys; from regard.cli.app import run; codes = [run(['study', *words]) for words in {words!r}]; "
        f"codes.append(run(['report', 'pilot', '--results', {str(tmp_path)!r}, '--out', {str(tmp_path / 'out')!r}])); "
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] False"


def test_nothing_has_run_yet(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["study", "status"]) == 0
    assert "no results in results" in capsys.readouterr().out


@pytest.mark.slow
def test_the_quickstart_runs_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("quickstart", "--scale", "smoke", "--results", str(tmp_path))
    command = [sys.executable, "-m", "regard", "study", "run", *folder, "--rows", "s*", "--seeds", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "judges nothing" not in done.stdout
    assert "not judged: smoke scale" in done.stdout
    assert run(["study", "export", *folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("row,seed,top1")
    assert len(lines) == 4
    assert [line["done"] for line in answer(capsys, "study", "show", *folder) if line["row"] == "SKA"] == [1]


def test_seeds_that_are_too_few_for_claims_are_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("few_seeds.py").write_text(
        "from dataclasses import replace\n"
        "from regard.lab.studies import load_study\n"
        "found = load_study('quickstart')\n"
        "desk = replace(found.setting('smoke'), seeds=2)\n"
        "STUDIES = (replace(found, name='few', settings={'desk': desk}),)\n"
    )
    arguments = ["few", "--scale", "desk", "--import", "few_seeds"]
    assert run(["study", "show", *arguments, "--no-estimate"]) == 0
    assert "no claim is judged at desk scale on 2 seeds: 3 are needed" in capsys.readouterr().out
    assert run(["study", "run", *arguments, "--workers", "0", "--only", "0" * 12]) == 2
    assert "no claim is judged at desk scale on 2 seeds" in capsys.readouterr().err


def test_seeds_after_a_look_at_verdicts_are_said_to_cost_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a study with a fixed number of seeds; what its own runs lack is added in silence."""
    from regard.cli.study_run import _warn_of_looks
    from regard.lab.studies import load_study

    import_runs(EVIDENCE / "esa_fig3-desk" / "evidence.json", Results(tmp_path))
    study, said = load_study("esa_fig3"), {}
    for seeds in (None, 3, 5):
        _warn_of_looks(study, "desk", Results(tmp_path), seeds)
        said[seeds] = capsys.readouterr().err
    assert said[None] == said[3] == ""
    assert said[5].startswith("esa_fig3 has verdicts on 3 seeds already.")


def test_a_study_of_added_seeds_is_shown_with_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path, claims=[], decide=Looks().to_json())
    snapshot = read_record(snapshot_path(tmp_path, "pilot", "desk"))
    write_record(snapshot_path(tmp_path, "quickstart", "desk"), {**snapshot, "study": "quickstart"})
    show = ["study", "show", "quickstart", "--results", str(tmp_path)]
    rows = {row["row"]: row["done"] for row in answer(capsys, *show)}
    assert rows == {"softmax": 3, "SKA": 3, "MiTA": 3, "w/o": 3, "uniform": 3}
    command = [*show, "--scale", "desk+x", "--set", "recipe.lr=1"]
    refused(capsys, command, "leave out --data, --host, --size, --set")
