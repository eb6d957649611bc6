"""Modules that only POSIX systems have: every module of Regard is imported without them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib, pkgutil, sys
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
import regard
names = [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.") if "__main__" not in module.name]
for name in names:
    importlib.import_module(name)
from pathlib import Path
from regard.files.atomic import one_writer, write_atomically
with one_writer(Path(sys.argv[1])):
    write_atomically(sys.argv[1] + "/a", "text")
print(len(names))
"""


@pytest.mark.slow
def test_every_module_is_imported_without_posix(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200
    assert (tmp_path / "store" / "a").read_text() == "text"
