"""Who may import whom.

core <- projections <- mixers <- hosts <- {measure, tasks} <- lab <- studies <- report <- cli.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "regard"
LAYERS = {
    "core": 0,
    "store": 1,
    "projections": 1,
    "mixers": 2,
    "ops": 3,
    "testing": 3,
    "swapping": 4,
    "models": 5,
    "explain": 6,
    "measure": 7,
    "tasks": 7,
    "train": 8,
    "lab": 9,
    "advice": 9,
    "studies": 10,
    "report": 11,
    "cli": 12,
}
FILES = sorted(SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
PACKAGES = {"PIL": "pillow", "performer_pytorch": "performer-pytorch", "sklearn": "scikit-learn"}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, also those inside functions."""
    package = ("regard", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def against_the_arrow(path: Path) -> list[str]:
    """Imports of a later or a neighbouring layer; the root's lazy table may name everything."""
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return []
    found = []
    for line, module in imported(path):
        parts = module.split(".")
        if parts[0] != "regard" or parts[1:] in (["__version__"], []):
            continue
        other = parts[1]
        if other != own and (other not in LAYERS or LAYERS[other] >= LAYERS[own]):
            found.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_arrow(path: Path) -> None:
    assert not against_the_arrow(path)


def test_every_package_has_a_layer() -> None:
    names = {
        path.name.removesuffix(".py")
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert names - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_are_loaded_by_name_in_lazy_tables_only(path: Path) -> None:
    loads = [
        line for line, module in imported(path) if module in {"importlib", "importlib.import_module", "importlib.util"}
    ]
    assert path.name == "__init__.py" or not loads, f"{path}:{loads}"


def test_the_rule_sees_a_wrong_import(tmp_path: Path) -> None:
    assert [name for _, name in imported(SOURCE / "core" / "mixer.py") if name.startswith("regard")][:1] == [
        "regard.core.card.Card"
    ]
    assert LAYERS["mixers"] < LAYERS["hosts"]


def test_dependencies_are_what_is_imported() -> None:
    wanted = PROJECT["dependencies"] + [name for extra in PROJECT["optional-dependencies"].values() for name in extra]
    declared = {re.match(r"[\w-]+", name)[0] for name in wanted}
    tops = {module.split(".")[0] for path in FILES for _, module in imported(path)}
    assert {PACKAGES.get(top, top) for top in tops - sys.stdlib_module_names - {"regard"}} == declared
