"""The base install: what works without the extra `lab`, and what says that it is missing."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hidden_packages import HIDDEN
from regard.core import MissingExtra, require

ROOT = Path(__file__).parents[1]
NAMES = {"scikit-learn": "sklearn"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def package(requirement: str) -> str:
    name = re.split("[<>=!~ ]", requirement)[0]
    return NAMES.get(name, name.replace("-", "_"))


LAB = {package(requirement) for requirement in project()["optional-dependencies"]["lab"]}


def run(script: Path, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """A script in a process without the packages of `lab`."""
    command = [sys.executable, str(ROOT / "tests" / "hidden_packages.py"), str(script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_the_base_install_works_and_names_what_is_missing() -> None:
    done = run(ROOT / "tools" / "base_install.py")
    assert done.returncode == 0, done.stderr[-2000:]


def test_swapping_works_and_training_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, regard, regard.lab\n"
        "from regard.lab.train.execute import execute\n"
        "model = regard.create_model('vit_desk', None)\n"
        "regard.swap(model, regard.SKA())\n"
        "model(torch.randn(2, 3, 32, 32))\n"
        "run = regard.lab.Run(task=regard.lab.Classification(host='vit_desk', data='digits', size=(8, 8)),\n"
        "    mixer=None, recipe=regard.lab.Recipe(epochs=1), seed=0)\n"
        "for use in (lambda: execute(run, regard.lab.Results('results')), regard.lab.Results('results').frame):\n"
        "    try:\n"
        "        use()\n"
        "    except regard.RegardError as error:\n"
        "        print(error)\n"
    )
    done = run(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [f"{name} is not installed; pip install 'regard[lab]'" for name in ("lightning_fabric", "pandas")]
    assert done.stdout.splitlines() == told


def test_every_package_of_lab_is_hidden_in_these_tests() -> None:
    assert LAB <= HIDDEN


def test_lowest_versions_are_the_lower_bounds() -> None:
    lines = (ROOT / "requirements" / "lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in (*project()["dependencies"], *project()["optional-dependencies"]["lab"]):
        name, bound = requirement.partition(",")[0].split(">=")
        parts = (bound.split(".") + ["0", "0"])[:3]
        assert lowest.pop(name).split(".") == parts, requirement
    assert lowest == {}


def test_late_imports_of_lab_name_the_extra() -> None:
    """A function that imports a package of `lab` calls `require` before, itself or in the module's helper."""
    silent = []
    for path in sorted((ROOT / "src" / "regard").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(name in text for name in LAB) else ():
            if not isinstance(node, ast.FunctionDef):
                continue
            required = {
                ast.literal_eval(call.args[0])
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "require"
            }
            imported = {
                name.partition(".")[0]
                for line in ast.walk(node)
                if isinstance(line, ast.Import | ast.ImportFrom)
                for name in ([line.module or ""] if isinstance(line, ast.ImportFrom) else [a.name for a in line.names])
                if not (isinstance(line, ast.ImportFrom) and line.level)
            }
            silent += [f"{path.name}: {node.name}: {name}" for name in imported & LAB - required]
    assert silent == REQUIRED_BY_CALLERS


REQUIRED_BY_CALLERS = [
    "distributed.py: in_processes: lightning_fabric",
    "environment.py: make_fabric: lightning_fabric",
    "sharding.py: sharding_strategy: lightning_fabric",
    "torchrun.py: fabric_of: lightning_fabric",
]
"""`execute` calls them, which requires the package first."""


def test_a_package_that_another_one_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match=r"not_there_at_all is not installed; pip install 'regard\[lab\]'"):
        require("broken_package")
    require("json")
