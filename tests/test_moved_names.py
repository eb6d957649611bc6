"""Names that README and docs had below `regard.hosts` still work for one version, with a warning."""

import subprocess
import sys

import pytest

import regard


@pytest.mark.parametrize(
    ("code", "new"),
    [
        ("from regard.hosts import register; register()", "regard.register_timm"),
        ("from regard.hosts.hugging import save_pretrained, from_pretrained", "regard.save_pretrained"),
        ("from regard.hosts.hosted import Hosted", "regard.Port"),
    ],
)
def test_an_old_path_works_and_names_the_new_one(code: str, new: str) -> None:
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "DeprecationWarning" in done.stderr
    assert new in done.stderr


def test_the_new_names_are_those_of_the_root() -> None:
    from regard.hosts.hosted import Hosted
    from regard.hosts.hugging import save_pretrained

    assert Hosted is regard.Port
    assert save_pretrained is regard.save_pretrained
