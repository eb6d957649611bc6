"""What must not load torch: it takes seconds, and help and lists are asked often."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard


def loaded_after(code: str) -> set[str]:
    """The modules of a fresh process after some code."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split("\n"))


@pytest.mark.parametrize(
    "code",
    [
        "import regard; regard.__version__; dir(regard)",
        "import regard.core; regard.core.Cost; regard.core.RegardError",
        "from regard.cli.app import main",
        "from regard.cli.app import run; run(['--help'])",
        "from regard.cli.app import run; run(['list', 'studies'])",
    ],
    ids=["import", "core", "cli", "help", "list studies"],
)
def test_torch_is_not_loaded(code: str) -> None:
    modules = loaded_after(code)
    assert "regard" in modules
    assert not modules & {"torch", "timm", "pandas", "matplotlib", "lightning_fabric", "scipy", "sklearn"}


def test_a_plan_is_applied_without_advice_and_laboratory(tmp_path: Path) -> None:
    """In production `swap(model, "plan.json")` loads mechanisms and ports, and no package that timm does not."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": "regard-plan", "layers": {"blocks.0.attn": "MiTA(m=4, k=4)"}}')
    model = 'import timm; model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)'
    before = loaded_after(f"{model}; import jaxtyping")
    modules = loaded_after(f"{model}; import regard; regard.swap(model, {str(plan)!r})") - before
    assert {name.partition(".")[0] for name in modules} <= {"regard", "numpy", "torch", "jaxtyping"}
    assert {name.split(".")[1] for name in modules if name.startswith("regard.")} == {
        "core", "files", "mixers", "projections", "swapping"
    }  # fmt: skip


def test_every_public_name_can_be_had() -> None:
    for name in regard.__all__:
        assert getattr(regard, name) is not None, name


def test_every_mechanism_and_projection_is_a_name_of_the_root() -> None:
    for cls in (*regard.MIXERS, *regard.PROJECTIONS):
        assert getattr(regard, cls.__name__) is cls


def test_type_checkers_see_every_name() -> None:
    source = ast.parse(Path(str(regard.__file__)).read_text())
    body = [line for node in source.body if isinstance(node, ast.If) for line in node.body]
    seen: dict[str, object] = {"__version__": regard.__version__}
    exec(compile(ast.Module(body, []), "regard", "exec"), seen)
    names = {*regard.__all__, *(cls.__name__ for cls in (*regard.MIXERS, *regard.PROJECTIONS))}
    assert {name for name in names if seen.get(name) is not getattr(regard, name)} == set()


def test_the_laboratory_has_names_in_the_root() -> None:
    from regard.lab import STUDIES, Claim, Recipe, Results, Row, Run, Study

    assert "quickstart" in STUDIES
    assert {cls.__module__.partition(".")[0] for cls in (Claim, Recipe, Results, Row, Run, Study)} == {"regard"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sofmax'"):
        regard.Sofmax  # noqa: B018


def test_benchmarks_take_what_there_is() -> None:
    """They import inside functions and run seldom: a name that moved would be found when somebody measures."""
    lost, seen = [], 0
    for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("regard"):
                module = importlib.import_module(str(node.module))
                lost += [f"{path.name}: {node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
                seen += 1
    assert seen > 20
    assert lost == []


def scripts() -> dict[str, str]:
    """The texts in tests that are run as scripts: those which import something of regard."""
    found = {}
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and "from regard" in str(node.value):
                found[f"{file.name}:{node.lineno}"] = str(node.value)
    return found


def test_scripts_in_tests_import_what_there_is() -> None:
    """Most of them run in slow tests only, so that a name that was moved would be missed."""
    missing = []
    for place, text in scripts().items():
        for module, names in re.findall(r"^\s*from (regard[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            here = importlib.import_module(module) if importlib.util.find_spec(module) else None
            missing += [f"{place}: {module}.{name}" for name in names.split(", ") if not hasattr(here, name)]
    assert missing == []
