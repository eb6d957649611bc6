"""Who may import whom: the library never imports the laboratory, layers go in one direction, and there are no circles.

All imports count: late ones, and those for types.
"""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "regard"
ORDER = [
    {"core"},
    {"files", "projections"},
    {"mixers"},
    {"ops", "testing"},
    {"swapping"},
    {"models"},
    {"images", "measure", "explain"},
    {"pages"},
    {"advice"},
    {"explorer"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
LAB_ORDER = [{"data", "results", "statistics"}, {"tasks"}, {"train"}, {"engine"}, {"studies"}, {"report"}]
LAYERS, LAB_LAYERS = (
    {name: number for number, names in enumerate(order) for name in names} for order in (ORDER, LAB_ORDER)
)
FILES = sorted(SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "PIL": "pillow",
    "faster_coco_eval": "faster-coco-eval",
    "grpc": "ray",  # whose extra "client" brings it
    "lightning_fabric": "lightning-fabric",
    "mlflow": "mlflow-skinny",
    "performer_pytorch": "performer-pytorch",
    "sklearn": "scikit-learn",
    "triton": "torch",  # whose wheels for Linux bring it
    "yaml": "timm",  # which needs it
}


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module) of every import, also those inside functions."""
    found: list[tuple[int, str]] = []
    package = ("regard", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found += ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
    return found


def allowed(own: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether a module may import another one, both as their parts below `regard`."""
    if own[0] != other[0]:
        return LAYERS.get(other[0], len(ORDER)) < LAYERS[own[0]]
    if own[0] != "lab" or own[1] == other[1]:
        return True
    return LAB_LAYERS.get(other[1], len(LAB_ORDER)) < LAB_LAYERS[own[1]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_arrow(path: Path) -> None:
    """Neither a later nor a neighbouring layer; the lazy tables of the root and of the laboratory name everything."""
    own = path.relative_to(SOURCE).with_suffix("").parts
    ours = [(line, tuple(module.split("."))[1:]) for line, module in imported(path) if module.startswith("regard.")]
    if own not in (("__init__",), ("lab", "__init__")):
        assert [at for at in ours if at[1] != ("__version__",) and not allowed(own, at[1])] == []


@pytest.mark.parametrize(("folder", "layers"), [(SOURCE, LAYERS), (SOURCE / "lab", LAB_LAYERS)], ids=["regard", "lab"])
def test_every_package_has_a_layer(folder: Path, layers: Mapping[str, int]) -> None:
    names = {
        path.name.removesuffix(".py")
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert names - {"__init__"} == set(layers)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_are_loaded_by_name_in_lazy_tables_only(path: Path) -> None:
    loads = [
        line for line, module in imported(path) if module in {"importlib", "importlib.import_module", "importlib.util"}
    ]
    # a user's own module is named on the command line, a package of an extra by `require`
    by_name = (SOURCE / "core" / "user_module.py", SOURCE / "core" / "errors.py")
    assert path.name == "__init__.py" or path in by_name or not loads, f"{path}:{loads}"


def graph(sources: Mapping[str, Path]) -> dict[str, set[str]]:
    """module -> the modules of the package that it imports anywhere."""
    found: dict[str, set[str]] = {}
    for module, path in sources.items():
        names = {name for _, name in imported(path)}
        names |= {name.rpartition(".")[0] for name in names if name not in sources}
        found[module] = {name for name in names if name in sources and name != module}
    return found


def circle(edges: Mapping[str, set[str]]) -> set[str]:
    """The modules of one circle of imports, none without one."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_there_are_no_circles() -> None:
    lazy = {SOURCE / "__init__.py", SOURCE / "lab" / "__init__.py"}
    files = {path: ".".join(["regard", *path.relative_to(SOURCE).with_suffix("").parts]) for path in FILES}
    modules = {name.removesuffix(".__init__"): path for path, name in files.items() if path not in lazy}
    assert circle(graph(modules)) == set()


def test_the_rules_see_a_circle_and_a_wrong_import(tmp_path: Path) -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()
    assert "regard.core.card.Card" in {name for _, name in imported(SOURCE / "core" / "mixer.py")}
    assert not allowed(("advice", "user_model"), ("lab", "results"))
    assert not allowed(("lab", "tasks", "base"), ("lab", "train", "loop"))
    assert allowed(("lab", "train", "loop"), ("lab", "tasks", "base"))


def test_dependencies_are_what_is_imported() -> None:
    wanted = PROJECT["dependencies"] + [name for extra in PROJECT["optional-dependencies"].values() for name in extra]
    declared = {re.match(r"[\w-]+", name)[0] for name in wanted}
    tops = {module.split(".")[0] for path in FILES for _, module in imported(path)}
    tops |= {"tensorboard", "sqlalchemy", "alembic"}  # Fabric's logger imports the first, MLflow the others
    tops |= {"onnx", "onnxscript"}  # torch.onnx imports them
    assert {PACKAGES.get(top, top) for top in tops - sys.stdlib_module_names - {"regard"}} == declared
