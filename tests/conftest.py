"""Annotation checks for the whole test run, one thread, and where the data sets lie.

JAXTYPING_DISABLE=1 leaves the annotation checks out: torch.compile cannot trace them, and they answer a wrong call
before the package's own messages do. `make test` runs the tests marked `untyped` that way, in a second process.
"""

import os
from pathlib import Path

import pytest

if os.environ.get("JAXTYPING_DISABLE") != "1":
    from jaxtyping import install_import_hook

    install_import_hook("regard", "beartype.beartype")


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with one sub-folder a data set."""
    folder = os.environ.get("REGARD_DATA", "")
    if not folder:
        pytest.skip("needs data sets: set REGARD_DATA to the folder that holds them")
    path = Path(folder)
    if not path.is_dir():
        pytest.skip(f"needs data sets: REGARD_DATA={folder} is not a folder")
    return path
