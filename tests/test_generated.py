"""What is generated from the table of mechanisms is in step with it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from regard import MIXERS, ops
from regard.mixers.table import MECHANISMS

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name: str) -> ModuleType:
    """A script of the folder tools as a module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = tool("generate")


@pytest.mark.parametrize("path", GENERATE.FILES, ids=lambda path: str(path.relative_to(GENERATE.ROOT)))
def test_a_generated_file_is_not_stale(path: Path) -> None:
    assert path.read_text() == GENERATE.FILES[path](), "run `make generated`"


def test_the_table_names_every_mechanism_where_it_is() -> None:
    assert [cls.__name__ for cls in MIXERS] == list(MECHANISMS)
    assert all(cls.__module__ == f"regard.mixers.{MECHANISMS[cls.__name__]}" for cls in MIXERS)


def test_operator_functions_come_with_their_reference() -> None:
    names = set(ops.__all__)
    assert {name for name in names if name.endswith("_reference")} >= {"mita_reference", "softmax_reference"}
    assert {f"{name}_reference" for name in ("mita", "ska", "factors", "agent", "xca")} <= names
