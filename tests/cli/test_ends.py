"""How a command ends: bugs, Ctrl-C, closed streams; names with the signs of formulas."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regard.cli import app
from regard.explain.pictures import figure
from regard.lab.results.results import Results
from regard.pages.charts import chart

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("error", "said", "written"),
    [
        (ZeroDivisionError("first\nsecond"), "ZeroDivisionError: first second; this is a bug", True),
        (MemoryError("2 GiB"), "this machine has too little memory (MemoryError: 2 GiB)", False),
        (PermissionError(13, "denied"), "check the disk, the permissions", False),
    ],
    ids=["bug", "memory", "rights"],
)
@pytest.mark.parametrize("flags", [[], ["--traceback"]], ids=["quiet", "traceback"])
def test_main_reports_a_bug_in_one_line(  # type: ignore[no-untyped-def]
    error: Exception, said: str, written: bool, flags: list[str], tmp_path: Path, capsys, monkeypatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["regard", "fail", "\udcff", *flags])
    monkeypatch.setattr(app.app, "registered_commands", list(app.app.registered_commands))
    app.app.command("fail")(fail)
    assert app.main() == 1
    shown = capsys.readouterr().err
    assert ("Traceback" in shown) == bool(flags)
    assert shown.splitlines()[-1].startswith("regard: ")
    assert said in shown.splitlines()[-1]
    assert flags or shown.count("\n") == 1
    files = list(tmp_path.glob("regard-bug-*.txt"))
    assert len(files) == (written and not flags)
    assert all("ZeroDivisionError" in file.read_text() for file in files)


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "class Own(BaseException): pass\nraise Own", "1/0"])
def test_a_module_that_ends_the_process_is_refused(tmp_path: Path, text: str, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine_that_ends.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert app.run(["card", "SKA", "--import", "mine_that_ends"]) == 2
    assert capsys.readouterr().err.startswith("regard: --import mine_that_ends: ")


@pytest.mark.parametrize("module", ["regard.cli.bugs", "torch.version"], ids=["the verbs", "torch"])
def test_ctrl_c_while_the_command_loads_is_one_line(tmp_path: Path, module: str) -> None:
    """Interrupted when Python says that it has loaded a module."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "regard", "train", "SKA()", "--set", "recipe.epochs=500"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # not so in background jobs
    )  # fmt: skip
    assert any(line.rstrip().endswith(f" {module}") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    lines = [line for line in process.communicate(timeout=300)[1].splitlines() if not line.startswith("import time:")]
    assert (process.returncode, lines) == (130, ["regard: interrupted; finished work is kept"])


@pytest.mark.parametrize(
    "line",
    [
        "{} list studies >&-",
        "{} list studies | head -1",
        "{} study list --json | true; exit ${{PIPESTATUS[0]}}",
        "PYTHONIOENCODING=ascii {} card SKA | cat",
    ],
)
def test_streams_that_are_closed_or_narrow(line: str) -> None:
    command = line.format(f"{sys.executable} -m regard")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_training_goes_on_when_nobody_reads_its_lines_any_more(tmp_path: Path) -> None:
    train = f"train 'SKA()' --host 'vit_desk(depth=2, dim=32, heads=2)' --device cpu --results {tmp_path}"
    short = "--set recipe.epochs=1 --set task.limit=64"
    command = f"{sys.executable} -m regard {train} {short} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    subprocess.run(["bash", "-c", command], env=ENVIRONMENT, check=True, capture_output=True)
    assert [outcome["status"] for outcome in Results(tmp_path).outcomes()] == ["done"]


@pytest.mark.parametrize("name", ["$\\frac{$", "$x_$", "$$", "a_$b^$"])
def test_names_with_the_signs_of_formulas_are_drawn_as_they_are(name: str) -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    assert figure([(name, [(name, lambda axes: None)])], picture, name, trained=False, credit=name, note=name)
    spec = {"kind": "bars", "x": "x", "y": name, "series": "s", "logs": ()}
    sheet = {"title": name, "columns": ["x", name, "s"], "rows": [[name, 1.0, name]], "chart": spec}
    assert name in chart(sheet)
