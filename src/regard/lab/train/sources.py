"""Digests of the user's own code beside a result: the key of a run does not change when a class is edited."""

import ast
import hashlib
import inspect
import logging
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from regard.lab.results.results import Results
from regard.mixers.spelling import parts

from .run import Run

log = logging.getLogger("regard.lab.engine")


def own_sources(run: Run) -> dict[str, str]:
    """The user's own classes and functions that a run names -> a digest of their code, as far as it is in a file."""
    items: list[Any] = [type(run.task), *run.task.extra, *(type(part) for part in parts(run.mixer))]
    own = [item for item in items if item.__module__.partition(".")[0] != "regard"]
    return {f"{item.__module__}.{item.__qualname__}": digest for item in own if (digest := _digest(item))}


def warn_of_edits(runs: Iterable[Run], store: Results) -> None:
    """Say which of the user's own code was edited since these runs were trained; of older outcomes nothing is said."""
    edited: dict[str, None] = {}
    for run in runs:
        before = (store.outcome(run.key) or {}).get("sources") or {}
        edited |= dict.fromkeys(name for name, now in own_sources(run).items() if before.get(name, now) != now)
    if edited:
        log.warning(
            "the code of %s was edited after runs in %s were trained, whose results are those of the old code: raise "
            "the `revision` of the mechanism, or train again in another --results FOLDER (`study run`: or --fresh)",
            ", ".join(edited), store.root,
        )  # fmt: skip


@cache  # the code that runs is that of the file when it was imported
def _digest(item: Any) -> str:
    """Of the definition and of what it uses of its own file; "" without a file."""
    try:
        text = inspect.getsource(sys.modules[item.__module__])
    except (OSError, TypeError, KeyError):
        return ""
    lines, named = text.splitlines(), dict[str, ast.stmt]()
    for node in ast.parse(text).body:
        named |= dict.fromkeys(_defined(node), node)
    used, wanted = dict[str, str](), [item.__qualname__.partition(".")[0]]
    while wanted:
        name = wanted.pop()
        if name in named and name not in used:
            node = named[name]
            start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            used[name] = "\n".join(lines[start - 1 : node.end_lineno])
            wanted += [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return hashlib.sha256("\n".join(used[name] for name in sorted(used)).encode()).hexdigest()[:12] if used else ""


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a file defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
