"""What may come into a store from outside: versions, kinds of values, and which runs belong to a study that is there.

Needs no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.core import StoreError

from .results import check_version

_TEXT: tuple[type, ...] = (str,)
_LIST: tuple[type, ...] = (list,)
_FIELDS: tuple[type, ...] = (dict, type(None))
_NUMBER: tuple[type, ...] = (int, float, type(None))
_WHOLE: tuple[type, ...] = (int, type(None))
_SAID = (str, type(None))

_OUTCOME = {
    "status": _TEXT, "key": _TEXT, "metrics": _FIELDS, "environment": _FIELDS, "data": _FIELDS, "probes": _FIELDS,
    "seconds": _NUMBER, "parameters": _WHOLE, "macs": _WHOLE, "bits": _SAID, "error": _SAID, "study": _SAID,
    "row": _SAID,
}  # fmt: skip
_SNAPSHOT = {
    "study": _TEXT, "scale": _TEXT, "metric": _TEXT, "baseline": _TEXT, "rows": _LIST, "runs": _LIST,
    "claims": _LIST, "notes": _LIST, "data": _FIELDS, "title": _TEXT, "variant": _TEXT, "task": _TEXT, "recipe": _TEXT,
}  # fmt: skip
_ROW = {
    "label": _TEXT, "spelling": _TEXT, "host": _TEXT, "paper": _FIELDS, "exact": _FIELDS, "notes": _LIST,
    "parameters": _WHOLE, "macs": _WHOLE, "card": _FIELDS,
}  # fmt: skip
_CARD = {"title": _TEXT}
_RUN = {"key": _TEXT, "row": _TEXT, "seed": (int,)}
_CLAIM = {"a": _TEXT, "b": _TEXT, "metric": _TEXT, "within": _NUMBER, "by": _NUMBER, "than": (list, type(None))}
_PLACE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.+")


def check_outcome(path: Path, value: Any) -> None:
    """Raises: StoreError naming the file if a value is no outcome of this version."""
    _check(path, "an outcome", value, _OUTCOME, ("status", "key"))
    check_version(path, value)
    _check_key(path, value["key"])
    if value["status"] not in ("done", "failed"):
        raise StoreError(f"{path}: a run is {value['status']!r}, expected done or failed; the file is damaged")
    _check_numbers(path, "the metric", value.get("metrics"))


def check_snapshot(path: Path, value: Any) -> None:
    """Raises: StoreError naming the file if a value is no snapshot of this version."""
    _check(path, "a snapshot", value, _SNAPSHOT, ("study", "scale", "metric", "baseline", "rows", "runs"))
    check_version(path, value)
    claims = value.get("claims") or []
    rows, runs = ("row", value["rows"], _ROW, ("label",)), ("run", value["runs"], _RUN, tuple(_RUN))
    for what, items, kinds, needed in (rows, runs, ("claim", claims, _CLAIM, ("a", "b", "metric"))):
        for item in items:
            _check(path, f"a {what} of a snapshot", item, kinds, needed)
    for claim in claims:
        than = claim.get("than")
        if than is not None and [type(label) for label in than] != [str, str]:
            raise StoreError(f"{path}: a claim has than {than!r}, expected two labels; the file is damaged")
    for row in value["rows"]:
        for name in ("paper", "exact"):
            _check_numbers(path, f"the {name} number", row.get(name))
        if row.get("card"):
            _check(path, "a card", row["card"], _CARD, ("title",))
    _check_runs(path, value)


def _check_runs(path: Path, value: Mapping[str, Any]) -> None:
    """Each run is of a row that is there, and no run stands for two seeds, or two runs for one."""
    labels = [row["label"] for row in value["rows"]]
    seeds: dict[str, int] = {}
    keys: dict[tuple[str, int], str] = {}
    for run in value["runs"]:
        row, seed, key = run["row"], run["seed"], run["key"]
        _check_key(path, key)
        if labels.count(row) != 1:
            raise StoreError(f"{path}: run {key} is of {row!r}, which is not one row of the snapshot; it is damaged")
        if seeds.setdefault(key, seed) != seed or keys.setdefault((row, seed), key) != key:
            raise StoreError(
                f"{path}: run {key} of {row!r}, seed {seed}, is listed with another seed or run; it is damaged"
            )


def _check_numbers(path: Path, what: str, values: Mapping[str, Any] | None) -> None:
    for name, number in (values or {}).items():
        if not isinstance(number, int | float | None):
            raise StoreError(f"{path}: {what} {name!r} is {number!r}, expected a number; the file is damaged")


def check_name(path: Path, value: Mapping[str, Any]) -> None:
    """Raises: StoreError naming the file if a snapshot's study and place cannot stand in the name of its own."""
    name = f"{value['study']}-{value['scale']}{value.get('variant') or ''}"
    if not set(name) <= _PLACE:
        raise StoreError(f"{path}: a snapshot is of {name!r}; that is not the name of a study and its scale")


def same_rows(mine: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Labels that stand in two snapshots for one mechanism in one host."""
    known = {row["label"]: (row.get("spelling"), row.get("host")) for row in mine.get("rows") or ()}
    return {
        row["label"]
        for row in other.get("rows") or ()
        if known.get(row["label"]) == (row.get("spelling"), row.get("host"))
    }


def further_runs(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs of `other` that `mine` can list too: of one task and recipe, of a row that is the same in both, with a seed
    that the row does not have yet."""
    if any(mine.get(field) != other.get(field) for field in ("task", "recipe")):
        return []
    rows, known, further = same_rows(mine, other), {(run["row"], run["seed"]) for run in mine["runs"]}, []
    for run in other.get("runs") or ():
        if run["row"] in rows and (run["row"], run["seed"]) not in known:
            known.add((run["row"], run["seed"]))
            further.append(run)
    return further


def _check_key(path: Path, key: str) -> None:
    if len(key) != 12 or set(key) - set("0123456789abcdef"):
        raise StoreError(f"{path}: a run has the key {key!r}; expected 12 hex digits")


def _check(path: Path, what: str, value: Any, kinds: Mapping[str, tuple[type, ...]], needed: Sequence[str]) -> None:
    """The value is a mapping with the needed fields, and those that it has are of their kinds."""
    if not isinstance(value, dict):
        raise StoreError(f"{path} has {type(value).__name__} in the place of {what}; it is damaged or not of regard")
    missing = [name for name in needed if name not in value]
    if missing:
        raise StoreError(f"{path}: {what} lacks {', '.join(missing)}; the file is damaged or not of regard")
    for name, allowed in kinds.items():
        if name in value and (not isinstance(value[name], allowed) or isinstance(value[name], bool)):
            expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
            found = type(value[name]).__name__
            raise StoreError(f"{path}: {name} of {what} is of type {found}, expected {expected}; the file is damaged")
