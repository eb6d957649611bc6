"""What must not load torch: it takes seconds, and help and lists are asked often."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import regard
import regard.lab


def loaded_by(code: str, before: str = "") -> set[str]:
    """The modules that some code loads in a fresh process, after other code."""
    script = f"import sys\n{before}\nthen = {{*sys.modules}}\n{code}\nprint(*{{*sys.modules}} - then, file=sys.stderr)"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr.split()
    )


def test_torch_is_not_loaded() -> None:
    modules = loaded_by(
        "import regard, regard.core; regard.__version__; dir(regard); regard.core.Cost; regard.core.RegardError\n"
        "from regard.cli.app import main, run; run(['--help']); run(['list', 'studies'])"
    )
    assert "regard.core.cost" in modules
    assert not modules & {"torch", "timm", "pandas", "matplotlib", "lightning_fabric", "scipy", "sklearn"}


def test_a_plan_is_applied_without_advice_and_laboratory(tmp_path: Path) -> None:
    """In production `swap(model, "plan.json")` loads mechanisms and ports, and no package that timm does not."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": "regard-plan", "layers": {"blocks.0.attn": "MiTA(m=4, k=4)"}}')
    model = 'import timm, jaxtyping; model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)'
    modules = loaded_by(f"import regard; regard.swap(model, {str(plan)!r})", model)
    assert {name.partition(".")[0] for name in modules} <= {"regard", "numpy", "torch", "jaxtyping"}
    assert {name.split(".")[1] for name in modules if name.startswith("regard.")} == {
        "core", "files", "mixers", "projections", "swapping"
    }  # fmt: skip


@pytest.mark.parametrize("package", [regard, regard.lab])
def test_every_name_can_be_had_and_type_checkers_see_it(package: ModuleType) -> None:
    source = ast.parse(Path(str(package.__file__)).read_text())
    body = [line for node in source.body if isinstance(node, ast.If) for line in node.body]
    seen: dict[str, object] = {"__package__": package.__name__, "__version__": regard.__version__}
    exec(compile(ast.Module(body, []), "names", "exec"), seen)
    expected = {name: getattr(package, name) for name in package.__all__}
    if package is regard:
        expected |= {cls.__name__: cls for cls in (*regard.MIXERS, *regard.PROJECTIONS)}
    assert {n for n, value in expected.items() if not seen.get(n) is getattr(package, n) is value} == set()


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
