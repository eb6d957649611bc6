"""A table of the Hub that lacks a part is no whole training set."""

from pathlib import Path

import pytest

from regard.core import DataError
from regard.images import own


@pytest.mark.usefixtures("own_cache")
def test_missing_parts_of_a_table_are_named(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "test-00000-of-00001"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="train-00000-of-00002.parquet is one of 2 parts, 1 of which are there"):
        own.digest(tmp_path)
