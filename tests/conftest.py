"""Annotation checks for the whole test run, one thread, and the folder of the data sets.

JAXTYPING_DISABLE=1 leaves the annotation checks out: torch.compile cannot trace them, and they reject wrong
arguments before the package's own checks do. `make test` runs the tests marked `untyped` that way, in a second process.
"""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# `make test`: few examples, always the same. `make fuzz`: new ones in each round
settings.register_profile("test", derandomize=True, max_examples=60, deadline=None, database=None)
settings.register_profile(
    "fuzz", max_examples=1500, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

if os.environ.get("JAXTYPING_DISABLE") != "1":
    from jaxtyping import install_import_hook

    # only where shapes are annotated: a checked call costs 0.1 ms, and mypy checks the other types
    package = Path(__file__).parents[1] / "src"
    annotated = [file for file in package.rglob("*.py") if "from jaxtyping import" in file.read_text(encoding="utf-8")]
    install_import_hook(
        [".".join(file.relative_to(package).with_suffix("").parts) for file in annotated], "beartype.beartype"
    )

# many tests start a process, which would compile every module again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# tests use neither the network nor published weights in the cache of this machine
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(Path(__file__).parent / "no-weights")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="", metavar="K/N", help="Run the Kth of N parts of the tests, 1/8 to 8/8.")


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests; the part of a test depends on its name alone."""
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        selected = [item for item in items if crc32(item.nodeid.encode()) % parts == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected


def pytest_collection_finish() -> None:
    """What has been imported stays: without this each full collection of garbage, of which measuring a peak of memory
    begins with one, looks at some million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with a subfolder for each data set."""
    folder = os.environ.get("REGARD_DATA", "")
    if not folder:
        pytest.skip("needs data sets: set REGARD_DATA to the folder that holds them")
    path = Path(folder)
    if not path.is_dir():
        pytest.skip(f"needs data sets: REGARD_DATA={folder} is not a folder")
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium, of playwright."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine; apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone, which is empty and not below its `tmp_path`."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
