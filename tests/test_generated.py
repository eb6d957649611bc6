"""What is generated from the table of mechanisms is in step with it."""

from pathlib import Path

import pytest

from regard import MIXERS, ops
from regard.mixers.table import MECHANISMS
from tools import generate


@pytest.mark.parametrize("path", generate.FILES, ids=lambda path: str(path.relative_to(generate.ROOT)))
def test_a_generated_file_is_not_stale(path: Path) -> None:
    assert path.read_text() == generate.FILES[path](), "run `make generated`"


def test_the_table_names_every_mechanism_where_it_is() -> None:
    assert [cls.__name__ for cls in MIXERS] == list(MECHANISMS)
    assert all(cls.__module__ == f"regard.mixers.{MECHANISMS[cls.__name__]}" for cls in MIXERS)


def test_operator_functions_come_with_their_reference() -> None:
    names = {name for name in ops.__all__ if name.islower() and not name.endswith("_plan")}
    helpers = {"factor_logits", "pool_landmarks"}
    assert {name for name in names if not name.endswith("_reference") and f"{name}_reference" not in names} == helpers
