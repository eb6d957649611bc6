"""Whether the tests notice wrong code: forty mutations of operators, swapping and the store, chosen by a seed.

python tools/mutations.py choose                            # draw the lines anew; tests of lines drawn again stay
python tools/mutations.py run --out FILE [--only ID ...]    # apply each in a scratch copy, and run its tests
python tools/mutations.py record --out FILE                 # these results become `caught_before` of the list

The list is tools/mutations.json: a changed line of a function, whose file may move below src/regard, and tests, which
may move below tests/. A mutation is "caught", "survived", "no longer found", or an "error": the test that catches it
fails without it too. `left_out` are those drawn that change nothing, each with the reason.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".json")
SEED, SECONDS, ONE_THREAD = 2026, 400, {"OMP_NUM_THREADS": "1"}
AREAS = {"mixers": (18, 1), "projections": (2, 1), "swapping": (12, 1), "store": (8, 2)}  # how many; in a file
GPU = ("triton", "flex", "varlen", "cuda", "gpu")
OPERATORS = {
    "Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">"), "Eq": ("==", "!="),
    "NotEq": ("!=", "=="), "Is": ("is", "is not"), "IsNot": ("is not", "is"), "In": ("in", "not in"),
    "NotIn": ("not in", "in"), "Add": ("+", "-"), "Sub": ("-", "+"), "Mult": ("*", "+"), "Div": ("/", "*"),
    "FloorDiv": ("//", "*"), "BitAnd": ("&", "|"), "BitOr": ("|", "&"), "And": ("and", "or"), "Or": ("or", "and"),
}  # fmt: skip
OPPOSITE = {"min": "max", "amin": "amax", "clamp_min": "clamp_max", "minimum": "maximum", "argmin": "argmax"}
OPPOSITE |= {there: here for here, there in OPPOSITE.items()}
AXES = ("sum", "mean", "softmax", "cumsum", "amax", "amin", "argmax", "cat", "sort", "topk", "gather", "unsqueeze")
SITE = "import sys; sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in type(one).__module__]"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(qualified name, node) of every function of a file, those of classes and functions included."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef)
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def executed(node: ast.AST) -> Iterator[Any]:
    """The nodes of a function's body without annotations, warnings, what is raised, texts, and inner functions."""
    for child in node.body if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node):
        if not isinstance(node, ast.AnnAssign) or child is not node.annotation:
            yield child
            skipped = isinstance(child, ast.Call) and ast.unparse(child.func) == "warnings.warn"
            if not skipped and not isinstance(child, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.ClassDef):
                yield from executed(child)


def changes(node: Any, line: str) -> Iterator[tuple[str, Any, Any, str]]:
    """What can be mutated at a node in one line: (kind, first column, end column, new text)."""
    here = node.col_offset, node.end_col_offset
    match node:
        case ast.BinOp(op=ast.Mult() | ast.Div(), left=left, right=right) if "scale" in ast.unparse(right):
            yield "scale", left.end_col_offset, node.end_col_offset, ")" * (line[left.end_col_offset] == ")")
        case (
            ast.Compare(left=left, ops=[operator], comparators=[right])
            | ast.BoolOp(op=operator, values=[left, right])
            | ast.BinOp(left=left, op=operator, right=right)
        ) if (name := type(operator).__name__) in OPERATORS and "'" not in ast.unparse(right):
            start, end = left.end_col_offset, right.col_offset  # brackets between them stay
            yield type(node).__name__.lower(), start, end, line[start:end].replace(*OPERATORS[name], 1)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "not", *here, line[operand.col_offset : node.end_col_offset]
        case ast.Constant(value=bool(value)):
            yield "true, false", *here, str(not value)
        case ast.Constant(value=int(value)) if line[node.col_offset - 1] != "-":
            yield "number", *here, str(value + 1)
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "deleted", *here, "pass"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            yield from call_changes(node, name, line)


def call_changes(node: ast.Call, name: str, line: str) -> Iterator[tuple[str, Any, Any, str]]:
    """The least instead of the greatest, without a keyword, over another axis, with two arguments exchanged."""
    if name in OPPOSITE:
        yield "min, max", node.func.end_col_offset - len(name), node.func.end_col_offset, OPPOSITE[name]
    for word in node.keywords if node.args else ():
        if word.arg not in (None, "strict", "sorted", "dim", "dtype", "device"):
            yield "keyword", word.col_offset - 2, word.end_col_offset, ""
    for value in (*node.args, *(word.value for word in node.keywords if word.arg == "dim")):
        if name in AXES and (text := ast.unparse(value)) in ("-1", "-2"):
            yield "axis", value.col_offset, value.end_col_offset, "-2" if text == "-1" else "-1"
    match node.args:
        case [ast.Name() | ast.Attribute() as one, ast.Name() | ast.Attribute() as two, *_] if name != "isinstance":
            texts = (line[each.col_offset : each.end_col_offset] for each in (two, one))
            yield "arguments", one.col_offset, two.end_col_offset, ", ".join(texts)


def candidates(file: Path) -> Iterator[dict[str, str]]:
    """Every mutation of a file, of lines that occur once in their function."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for name, function in functions(ast.parse("\n".join(lines))):
        own = Counter(line.strip() for line in lines[function.lineno - 1 : function.end_lineno])
        for node in executed(function):
            number = getattr(node, "lineno", 0)
            line = lines[number - 1] if number and number == node.end_lineno else "-"
            gpu = any(word in f"{file.stem} {name} {line}".lower() for word in GPU)
            if own[line.strip()] == 1 and line.isascii() and not gpu:
                for kind, start, end, new in changes(node, line):
                    text = {"before": line.strip(), "after": (line[:start] + new + line[end:]).strip()}
                    yield {"file": file.relative_to(ROOT).as_posix(), "function": name, "kind": kind, **text}


def choose() -> None:
    """Write the list: in each area a kind is drawn, then a mutation of it, in a file that has few so far."""
    known = json.loads(LIST.read_text())
    before = {(one["function"], one["after"]): one for one in known["mutations"] + known["left_out"]}
    chosen: list[dict[str, Any]] = []
    for area, (number, most) in AREAS.items():
        pool = [one for file in sorted((ROOT / "src/regard" / area).rglob("*.py")) for one in candidates(file)]
        draw, kinds, used = random.Random(f"{SEED} {area}"), sorted({one["kind"] for one in pool}), Counter[str]()
        while number:
            kind = draw.choice(kinds)
            one = draw.choice([one for one in pool if one["kind"] == kind])
            same = before.get((one["function"], one["after"]), {})
            used[one["file"]] += 1
            if used[one["file"]] <= most and "why" not in same:
                chosen.append({"id": f"{area}-{AREAS[area][0] - number + 1}", **one, "tests": same.get("tests", [])})
                number -= 1
    write(LIST, {"mutations": chosen, "left_out": known["left_out"]})


def write(path: Path, value: Any) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def found(tree: Path, mutation: dict[str, Any]) -> tuple[Path | None, str]:
    """The file that has the function with the line, and its mutated text; files of the same path or name come first."""
    path = tree / mutation["file"]
    order = sorted((tree / "src" / "regard").rglob("*.py"), key=lambda one: (one != path, one.name != path.name, one))
    for file in order:
        text = file.read_text(encoding="utf-8")
        for name, function in functions(ast.parse(text)) if mutation["before"] in text else ():
            lines, first = text.splitlines(keepends=True), function.lineno - 1
            for number, line in enumerate(lines[first : function.end_lineno], first):
                if name == mutation["function"] and line.strip() == mutation["before"]:
                    lines[number] = line.replace(mutation["before"], mutation["after"])
                    return file, "".join(lines)
    return None, ""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A copy of this tree, from which `regard` is imported even where it is installed as editable."""
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    with tempfile.TemporaryDirectory(prefix="regard-mutations-") as folder:
        tree = Path(folder).resolve() / "tree"
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in filter(lambda one: (ROOT / one).is_file(), names):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        Path(folder, "sitecustomize.py").write_text(SITE)
        where = python(tree, "-c", "import regard; print(regard.__file__)")[1].strip()
        if not Path(where).is_relative_to(tree):
            raise SystemExit(f"regard is imported from {where}, not from the scratch copy")
        yield tree


def python(tree: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of an interpreter in the scratch copy; 137 where it does not end."""
    paths = {"PYTHONPATH": f"{tree.parent}{os.pathsep}{tree / 'src'}", "XDG_CACHE_HOME": str(tree.parent / "cache")}
    command = ["timeout", "-s", "KILL", str(SECONDS), sys.executable, *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ | ONE_THREAD | paths, text=True, capture_output=True)
    return done.returncode, done.stdout


def failing(tree: Path, selection: str, *further: str) -> str:
    """The first test of a selection that fails; "" if all pass, or where there is none any more."""
    words = shlex.split(selection)
    names, options = ([one for one in words if one.startswith("tests/") is path] for path in (True, False))
    places = [[tree / name] if (tree / name).exists() else (tree / "tests").rglob(Path(name).name) for name in names]
    files = [str(file) for place in places for file in sorted(place)]
    if not files:
        return ""
    code, output = python(tree, "-m", "pytest", "-x", "-q", *files, *options, *further)
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [*lines, f"exit {code}"][0].split(" - ")[0] if code not in (0, 5) else ""


def outcome(tree: Path, mutation: dict[str, Any]) -> dict[str, Any]:
    """Apply one mutation, run its tests, restore the file; a test that fails without it too is an error."""
    start, (file, text) = time.monotonic(), found(tree, mutation)
    if file is None or not mutation["tests"]:
        return {"result": "no tests" if file else "no longer found", "by": "", "seconds": 0}
    plain = file.read_text(encoding="utf-8")
    shutil.rmtree(tree / ".pytest_cache", ignore_errors=True)
    try:
        file.write_text(text, encoding="utf-8")
        fails = ((selection, test) for selection in mutation["tests"] if (test := failing(tree, selection)))
        selection, test = next(fails, ("", ""))
    finally:
        file.write_text(plain, encoding="utf-8")
    seconds = round(time.monotonic() - start)
    result = "survived" if not test else "error" if failing(tree, selection, "--last-failed") else "caught"
    return {"result": result, "by": test, "seconds": seconds}


def run(out: Path, only: list[str]) -> None:
    """Run all mutations, or those that are named; the results are written after each, those of others stay."""
    results = json.loads(out.read_text()) if out.exists() else {}
    with scratch() as tree:
        for mutation in json.loads(LIST.read_text())["mutations"]:
            if not only or mutation["id"] in only:
                results[mutation["id"]] = outcome(tree, mutation)
                print(mutation["id"], *results[mutation["id"]].values(), flush=True)
                write(out, results)
    print(*(f"{number} {result}" for result, number in Counter(one["result"] for one in results.values()).items()))


def record(file: Path) -> None:
    """Write results into the list: whether today's tests catch each mutation, in which test, and in what time."""
    known, results = json.loads(LIST.read_text()), json.loads(file.read_text())
    for mutation in known["mutations"]:
        if one := results.get(mutation["id"]):
            caught = {"caught": True, "survived": False}.get(one["result"], "error")
            mutation |= {"caught_before": caught, "by": one["by"], "seconds": one["seconds"]}
    write(LIST, known)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["choose", "run", "record"])
    parser.add_argument("--out", type=Path, help="the file of results", default=Path("mutations-results.json"))
    parser.add_argument("--only", nargs="+", default=[], metavar="ID")
    options = parser.parse_args()
    actions = {"choose": choose, "run": lambda: run(options.out, options.only), "record": lambda: record(options.out)}
    actions[options.command]()


if __name__ == "__main__":
    main()
