"""`regard study`: exit codes, messages, and what is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pilot_store import make_store
from regard.cli.app import run
from regard.cli.tables import without_empty_columns
from regard.files.records import read_record, write_record
from regard.lab.engine.export import import_runs
from regard.lab.engine.table import snapshot_path
from regard.lab.results.layout import TUNING_SEED
from regard.lab.results.results import Results
from regard.lab.statistics.sequential import Looks

ROOT = Path(__file__).parents[1]


def regard(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard", "study", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    sys.path.insert(0, str(ROOT))
    try:
        from pilot_store import make_store
    finally:
        sys.path.remove(str(ROOT))
    make_store(tmp_path)
    return tmp_path


def test_list_is_json_and_loads_no_torch() -> None:
    done = regard("list", "--json")
    assert "quickstart" in [line["name"] for line in json.loads(done.stdout)]
    code = "import sys; from regard.cli.app import run; run(['study', 'list']); print('torch' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert listed.stdout.split()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "quikstart"), "did you mean quickstart?"),
        (("run", "quickstart", "--scale", "smoke", "--rows", "SKB"), "did you mean SKA"),
        (("run", "quickstart", "--scale", "paper"), "no scale 'paper'"),
        (("run", "quickstart", "--workers", "-1"), "--workers is 0 or more"),
        (("run", "quickstart", "--workers", "9" * 12), "--workers is 0 or more, at most 1024"),
        (("run", "quickstart", "--size", "12x"), "height x width"),
        (("run", "esa_costs", "--seeds", "3", "--dry-run"), "which trains nothing: leave out --seeds, --dry-run"),
        (("run", "mita_fig9", "--data-root", "/nowhere"), "--data-root /nowhere is not a folder"),
        (("run", "quickstart", "--dry-run", "--seeds", "0", "--fresh"), "leave out --seeds, --fresh"),
        (("run", "quickstart", "--dry-run", "--on", "ray", "--cpus", "2"), "leave out --on, --cpus"),
        (("run",), "give the name of a study (`regard study list` shows all), or --all"),
        (("run", "quickstart", "--all", "--decide"), "or --all for all of them"),
        (("run", "--all", "--scale", "desk"), "--all plans which studies to decide, each as it is: add --decide"),
        (("run", "--all", "--decide", "--rows", "SKA"), "each as it is: leave out --rows"),
        (("run", "--all", "--decide"), "smoke scale judges no claim"),
        (("run", "--all", "--decide", "--scale", "desk", "--hours", "0"), "--hours is a positive number, not 0"),
        (("run", "quickstart", "--on", "ray", "--memory", "inf"), "Invalid value for '--memory'"),
        (("export", "quickstart", "--format", "xml"), "no format 'xml'"),
        (("export", "quickstart", "--results", "/nowhere"), "no results of quickstart"),
    ],
)
def test_wrong_use_is_exit_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["study", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_wrong_use_of_a_process_is_exit_2() -> None:
    done = regard("run", "quickstart", "--scale", "smoke", "--rows", "SKB")
    assert done.returncode == 2, done.stderr
    assert "did you mean SKA" in done.stderr
    assert "Traceback" not in done.stderr


def test_import_of_nothing_is_exit_2(tmp_path: Path) -> None:
    done = regard("import", str(tmp_path / "nothing"), "--results", str(tmp_path))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_the_scales_of_a_kept_analysis_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses" / "esa_fig1-smoke.json").write_text("{}")
    assert run(["study", "export", "esa_fig1", "--scale", "desk", "--results", str(tmp_path)]) == 1
    assert "no result of esa_fig1 at desk scale" in (message := capsys.readouterr().err)
    assert "there are results with --scale smoke" in message
    assert run(["study", "export", "mita_fig9", "--scale", "desk", "--results", str(tmp_path)]) == 1
    assert "`regard study run` computes it" in capsys.readouterr().err


def test_a_dry_run_shows_no_columns_of_counts_that_nobody_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "run", "quickstart", "--dry-run", "--rows", "w/o"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["label", "params", "macs", "loss"] in lines
    assert run(["study", "run", "quickstart", "--dry-run", "--rows", "w/o", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["params_paper"] is None
    published = [{"row": "a", "paper": None, "exact": ""}, {"row": "b", "paper": 0, "exact": ""}]
    assert without_empty_columns(published) == [{"row": "a", "paper": None}, {"row": "b", "paper": 0}]


def test_export_and_status_of_a_store(store: Path) -> None:
    assert regard("export", "pilot", "--results", str(store)).stdout.startswith(
        "row,seed,top1,loss\nsoftmax,0,88.9,1.0\n"
    )
    table = json.loads(regard("export", "pilot", "--results", str(store), "--format", "json").stdout)
    assert table["claims"][0]["verdict"]["word"] == "supported"
    states = json.loads(regard("status", "--results", str(store), "--json").stdout)
    assert states[0]["runs"] == states[0]["done"] == 15
    assert states[0]["claims"] == "1 supported"


def test_status_counts_the_runs_that_choose_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = ROOT.parent / "docs" / "results" / "quickstart-desk" / "evidence.json"
    import_runs(evidence, store := Results(tmp_path))
    for seed in (TUNING_SEED, 17):
        outcome = {"status": "done", "study": "quickstart", "scale": "desk", "seed": seed, "metrics": {"top1": 50.0}}
        store.finish(f"{seed:012x}", outcome)
    assert run(["study", "status", "--results", str(tmp_path), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["runs"], line["done"], line["tuning"]) == (40, 40, 1)
    code = f"import sys; from regard.cli.app import run; run(['study', 'status', '--results', {str(tmp_path)!r}]); "
    loads = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert loads.stdout.split()[-1] == "False"


def test_status_of_a_missing_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["study", "status"]) == 0  # nothing has run yet
    assert "no results in results" in capsys.readouterr().out
    assert run(["study", "status", "--results", "nowhere"]) == 2
    assert "no folder of results nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_the_quickstart_runs_and_shows(tmp_path: Path) -> None:
    folder = ("--scale", "smoke", "--results", str(tmp_path))
    done = regard("run", "quickstart", *folder, "--rows", "s*", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "judges nothing" not in done.stdout
    assert "not judged: smoke scale" in done.stdout
    lines = regard("export", "quickstart", *folder).stdout.splitlines()
    assert lines[0].startswith("row,seed,top1")
    assert len(lines) == 4
    shown = json.loads(regard("show", "quickstart", *folder, "--json").stdout)
    assert [line["done"] for line in shown if line["row"] == "SKA"] == [1]


def test_seeds_after_a_look_at_verdicts_are_said_to_cost_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a study with a fixed number of seeds; what its own runs lack is added in silence."""
    from regard.cli.study_run import _warn_of_looks
    from regard.lab.results.results import Results
    from regard.lab.studies import load_study

    assert run(["study", "import", str(ROOT.parent / "docs/results/esa_fig3-desk/evidence.json"),
                "--results", str(tmp_path)]) == 0  # fmt: skip
    capsys.readouterr()
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
    assert run(["study", "show", "quickstart", "--results", str(tmp_path), "--json"]) == 0
    rows = {row["row"]: row["done"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {"softmax": 3, "SKA": 3, "MiTA": 3, "w/o": 3, "uniform": 3}
    assert (
        run(["study", "show", "quickstart", "--scale", "desk+x", "--set", "recipe.lr=1", "--results", str(tmp_path)])
        == 2
    )
    assert "leave out --data, --host, --size, --set" in capsys.readouterr().err
