"""Pages of the API, made from docstrings without importing anything: a page for each package."""

import ast
from collections.abc import Iterator
from pathlib import Path

from regard.mixers.table import MECHANISMS
from tools.docs_pages import table

from .evidence import ROOT
from .markdown import link
from .mechanisms import page_of as mechanism_page

SOURCE = ROOT / "src" / "regard"
PACKAGES = (
    "core", "files", "projections", "mixers", "mixers/shared", "testing", "swapping", "swapping/ports", "models",
    "images", "measure", "explain", "pages", "advice", "explorer", "lab", "lab/data", "lab/results", "lab/statistics",
    "lab/tasks", "lab/train", "lab/engine", "lab/studies", "lab/report",
)  # fmt: skip
"""Folders of src/regard with a page; mechanisms have their own pages, and verbs their help."""


def page_of(package: str) -> str:
    """The path of a package's page."""
    return f"reference/{package.replace('/', '.')}.md"


def pages() -> Iterator[tuple[str, str]]:
    """(path, content): the names of the root, and every package."""
    yield "reference/index.md", index()
    for package in PACKAGES:
        yield page_of(package), package_page(package)


def modules(package: str) -> list[Path]:
    """The files of a package that have public names, those with names of the root first.

    Folders and mechanisms with a page of their own are left out.
    """
    own = [SOURCE / other for other in PACKAGES if other.startswith(f"{package}/")]
    own += [_file(f"regard.mixers.{module}") for module in MECHANISMS.values()]
    files = [file for file in (SOURCE / package).rglob("*.py") if not any(map(file.is_relative_to, own))]
    first = root_names()
    return sorted(filter(public_names, files), key=lambda file: (dotted(file) not in first, file))


def public_names(file: Path) -> list[str]:
    """Names of the classes and functions that a file defines, without those that begin with an underscore."""
    parts = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [part.name for part in parts if isinstance(part, kinds) and not part.name.startswith("_")]


def dotted(file: Path) -> str:
    """The name of a module."""
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def package_page(package: str) -> str:
    """All public names of a package, module by module."""
    folder = SOURCE / package
    about = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    entries = [f"::: {dotted(file)}" for file in modules(package)]
    return "\n\n".join([f"# regard.{package.replace('/', '.')}", about, *entries]) + "\n"


def index() -> str:
    """The names that `from regard import ...` has, each with a link to its page and the first line about it."""
    rows, mechanisms = [], []
    for module, names in root_names().items():
        for name in names:
            linked = f"[`{name}`]({_page(module, name)})"
            if name in MECHANISMS:
                mechanisms.append(linked)
            else:
                _, about = _definition(module, name) or ("", "")
                rows.append((linked, about.partition(". ")[0].rstrip("."), f"`{module}`"))
    titles = {package: f"`{package.replace('/', '.')}`" for package in PACKAGES}
    packages = ", ".join(link(title, page_of(package), "reference/index.md") for package, title in titles.items())
    return f"""# API

`from regard import ...` has these names; nothing is imported before it is used.

Mechanisms: {", ".join(mechanisms)}.

{table(("name", "what", "module"), sorted(rows))}

Operator functions, each with its plain reference, are in `regard.ops`; the pages of the mechanisms have both. Pages by
package: {packages}.
"""


def _definition(module: str, name: str) -> tuple[str, str] | None:
    """(module, first paragraph about it) where a class or function is defined; None for tuples such as MIXERS."""
    parts = list(ast.walk(ast.parse(_file(module).read_text(encoding="utf-8"))))
    for part in parts:
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and part.name == name:
            return module, (ast.get_docstring(part) or "").split("\n\n")[0].replace("\n", " ")
    for part in parts:
        if isinstance(part, ast.ImportFrom) and part.level and any(alias.name == name for alias in part.names):
            return _definition(f"{module}.{part.module}", name)
    return None


def _file(module: str) -> Path:
    """The file of a module."""
    path = SOURCE.parent / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def root_names() -> dict[str, list[str]]:
    """module -> the names of the root that it has, read from the imports for type checkers."""
    found: dict[str, list[str]] = {}
    for part in ast.walk(ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(part, ast.ImportFrom) and part.module and part.module != "regard":
            for alias in part.names:
                if alias.asname:
                    found.setdefault(part.module, []).append(alias.name)
    return dict(sorted(found.items()))


def _page(module: str, name: str) -> str:
    """The page that has a name, relative to the index, with its anchor where it is a class or function."""
    if name in MECHANISMS:
        return f"../{mechanism_page(name)}#{module}.{name}"
    short = module.removeprefix("regard.")
    fitting = [package for package in PACKAGES if f"{short}.".startswith(f"{package.replace('/', '.')}.")]
    defined = _definition(module, name)
    return f"{max(fitting, key=len).replace('/', '.')}.md" + (f"#{defined[0]}.{name}" if defined else "")
