"""Write what follows from the table of mechanisms: `make generated`. tests/test_generated.py fails when they are stale.

Written are `regard/mixers/__init__.py`, `regard/ops.py`, the mechanisms in `regard/__init__.py` and README's table of
them, as plain text that is committed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from regard.mixers.table import FAMILIES, MECHANISMS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "regard"
NOTE = "Generated from mixers/table.py: run `make generated`, do not edit."


def exported(module: str) -> list[str]:
    """What a mechanism's file lists in `__all__`: its configuration and its operator functions."""
    path = SOURCE / "mixers" / Path(*module.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise SystemExit(f"{path} has no __all__: list its configuration and its operator functions there")


def functions() -> Iterator[tuple[str, list[str]]]:
    """(module, operator functions) of every mechanism that has some."""
    for name, module in MECHANISMS.items():
        names = sorted(item for item in exported(module) if item != name)
        if names:
            yield module, names


def imports(module: str, names: list[str]) -> str:
    """One import statement, over several lines where it is long."""
    line = f"from regard.mixers.{module} import {', '.join(names)}"
    return line if len(line) <= 120 else line.partition("import ")[0] + "import (\n" + _lines(names, quoted=False) + ")"


def _lines(names: list[str], quoted: bool = True) -> str:
    return "".join(f'    "{name}",\n' if quoted else f"    {name},\n" for name in names)


def mixers() -> str:
    """regard/mixers/__init__.py."""
    doc = f'"""Mechanisms: one file or folder each, with its operator, its reference, its configuration.\n\n{NOTE}\n"""'
    lines = sorted((f"from .{module} import {name} as {name}" for name, module in MECHANISMS.items()), key=_order)
    return "\n".join([doc, "", *lines, "", "MIXERS = (", *(f"    {name}," for name in MECHANISMS), ")", ""])


def ops() -> str:
    """regard/ops.py."""
    doc = f'"""The operator functions of all mechanisms and their plain references.\n\n{NOTE}\n"""'
    by_module = dict(functions())
    lines = [imports(module, by_module[module]) for module in sorted(by_module)]
    names = [name for names in by_module.values() for name in names]
    return "\n".join([doc, "", *lines, "", "__all__ = [", _lines(names) + "]", ""])


def root() -> str:
    """regard/__init__.py: the mechanisms between the marks."""
    lines = [f"    from regard.mixers.{module} import {name} as {name}" for name, module in MECHANISMS.items()]
    block = "\n".join(["if TYPE_CHECKING:", *sorted(lines, key=_order)])
    text = between((SOURCE / "__init__.py").read_text(), "# generated: imports", block)
    entries = [f'    "{name}": "regard.mixers.{module}",' for name, module in MECHANISMS.items()]
    return between(text, "    # generated: names", "\n".join(entries))


def readme() -> str:
    """README.md: the table of mechanisms between the marks."""
    rows = [f"| {', '.join(f'`{name}`' for name in family)} | {kind} |" for kind, family in FAMILIES.items()]
    table = "\n".join(["| mechanisms | kind |", "|---|---|", *rows])
    return between((ROOT / "README.md").read_text(), "<!-- generated: mechanisms -->", table)


def between(text: str, mark: str, content: str) -> str:
    """Text with other content between a mark and the next line that ends the marked part."""
    end = mark.replace("generated: ", "end of generated: ")
    if text.count(mark) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected one pair of lines {mark.strip()!r} and {end.strip()!r}")
    before, _, rest = text.partition(f"{mark}\n")
    return f"{before}{mark}\n{content}\n{end}{rest.partition(end)[2]}"


def _order(line: str) -> tuple[str, str]:
    """As ruff sorts imports."""
    _, module, _, name, *_ = line.split()
    return module.lower(), name


FILES = {
    SOURCE / "mixers" / "__init__.py": mixers, SOURCE / "ops.py": ops, SOURCE / "__init__.py": root,
    ROOT / "README.md": readme,
}  # fmt: skip


def write(path: Path, text: str) -> None:
    """Write a file of the repository that differs, and say so."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    """Write every file that differs."""
    for path, make in FILES.items():
        write(path, make())


if __name__ == "__main__":
    main()
