"""What must not load torch: it takes seconds, and help and lists are asked often."""

import subprocess
import sys

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
    assert not modules & {"torch", "timm", "pandas", "matplotlib", "lightning", "scipy", "sklearn"}


def test_every_public_name_can_be_had() -> None:
    for name in regard.__all__:
        assert getattr(regard, name) is not None, name


def test_every_mechanism_and_projection_is_a_name_of_the_root() -> None:
    for cls in (*regard.MIXERS, *regard.PROJECTIONS):
        assert getattr(regard, cls.__name__) is cls


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sofmax'"):
        regard.Sofmax  # noqa: B018
