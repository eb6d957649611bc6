"""Checks of outcomes and snapshots: types, whether their fields agree, and which runs belong to a study.

Needs no torch.
"""

import array
import ast
import base64
import binascii
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from regard.core import Card, StoreError
from regard.files.data_record import DATA, data_problem
from regard.files.records import check_known_fields, read_record_if_present

from .layout import SCALES, setting_name

_OUTCOME = {
    "status": str, "key": str, "metrics": dict | None, "environment": dict | None, "data": dict | None,
    "probes": dict | None, "seconds": int | float | None, "parameters": int | None, "macs": int | None,
    "bits": str | None, "samples": str | None, "sampled": str | None, "details": dict | None,
    "chance": int | float | None, "error": str | None, "study": str | None, "row": str | None, "scale": str | None,
    "spelling": str | None, "seed": int | None, "step": int | None, "memory_bytes": int | None, "model": dict | None,
    "peak_memory_bytes": int | None,  # of the whole process, in older runs
    "best": dict | None, "images_per_second": int | float | None, "inference_per_second": int | float | None,
    "others": int | float | None, "finished": str | None, "sources": dict | None, "notes": list | None,
    "code": str | None, "diverged": bool | None,
}  # fmt: skip
PERCENT = frozenset(
    {"top1", "miou", "pixels", "bleu", "chrf", "map", "ap50", "ap75", "box_map", "box_ap50", "box_ap75"}
)
"""Metrics in percent."""
_SNAPSHOT = {
    "study": str, "scale": str, "metric": str, "baseline": str, "rows": list, "runs": list, "claims": list,
    "notes": list, "data": dict | None, "title": str, "variant": str, "task": str, "recipe": str,
    "decide": dict | None, "source": str, "question": str, "pooled": bool,
}  # fmt: skip
_ROW = {
    "label": str, "spelling": str, "host": str, "paper": dict | None, "exact": dict | None, "notes": list,
    "parameters": int | None, "macs": int | None, "card": dict | None, "against": str | None, "control": bool,
}  # fmt: skip
_CARD = {"title": str}
_FACTS = {field.name for field in fields(Card) if field.type in (bool, "bool")}
"""Entries of a card that are true or false."""
_DATA = {"name": str | None, "train": int | None, "test": int | None, "unit": str | None}
_DECIDE = {"pairs": list, "shares": list, "level": float}
_RUN = {"key": str, "row": str, "seed": int}
_CLAIM = {
    "a": str, "b": str, "metric": str, "within": int | float | None, "by": int | float | None, "than": list | None,
    "late": bool,
}  # fmt: skip
_NAME = re.compile(r"(?!\.)[\w.+-]+", re.ASCII)
"""Of a study."""


def check_outcome(path: Path, value: Any) -> None:
    """Check the content of an outcome file: its fields and their types, and that they agree with one another.

    A finished run has metrics; shares are between 0 and 100 %; the recorded samples have the number of test samples,
    and right ones make up the accuracy; the seed is that of the spelling.
    Raises: StoreError with the file's name.
    """
    _check(path, "an outcome", value, _OUTCOME, ("status", "key"))
    check_known_fields(path, value, _OUTCOME)
    _check_key(path, value["key"])
    if value["status"] not in ("done", "failed"):
        raise StoreError(f"{path}: the status is {value['status']!r}, expected done or failed; the file is damaged")
    for name in ("metrics", "best"):
        _check_numbers(path, "the metric", value.get(name))
        _check_shares(path, value.get(name) or {})
    if value["status"] == "done" and not any(number is not None for number in (value.get("metrics") or {}).values()):
        raise StoreError(f"{path}: run {value['key']} is done, but has no metrics; delete the file and run again")
    data = value.get("data") or {}
    if problem := data_problem({name: data[name] for name in (*DATA, "classes") if data.get(name) is not None}):
        raise StoreError(f"{path}: of its data, {problem}; the file is damaged")
    _check_samples(path, value)
    seed = spelled_fields(value.get("spelling")).get("seed")
    if seed is not None and value.get("seed") is not None and seed != repr(value["seed"]):
        raise StoreError(
            f"{path}: run {value['key']} has seed {value['seed']}, but spells seed={seed}; the file is damaged"
        )


def check_same_run(path: Path, outcome: Mapping[str, Any]) -> None:
    """Check that an outcome is of the run in run.json beside it, if there is one with a spelling.

    Its seed and its kind of mechanism are compared: paths of data may differ, and a later version may spell a mechanism
    with further fields. Raises: StoreError with the file's name.
    """
    if not outcome.get("spelling"):
        return
    described = read_record_if_present(path.parent / "run.json") or {}
    here, there = spelled_fields(outcome["spelling"]), spelled_fields(described.get("spelling"))
    for name in ("mixer", "seed", "removed"):
        mine, other = (fields.get(name, "None").partition("(")[0] for fields in (here, there))
        if there and mine != other:
            raise StoreError(
                f"{path} is of a run with {name}={mine}, but run.json beside it has {name}={other}; one of them is of "
                "another run: delete the folder and run again"
            )


def check_listed(
    outcome: Mapping[str, Any], run: Mapping[str, Any], remedy: str = "delete the run's folder and run the study again"
) -> None:
    """Check that an outcome has the seed with which a snapshot lists its run. Raises: StoreError with the remedy."""
    if outcome.get("seed") is not None and outcome["seed"] != run["seed"]:
        raise StoreError(
            f"run {run['key']} is listed with seed {run['seed']} in its study, but its outcome has seed "
            f"{outcome['seed']}; {remedy}"
        )


def spelled_fields(spelling: str | None) -> dict[str, str]:
    """The fields of a spelled run, each as its spelling without spaces that do not matter; {} if it is not one.

    The seed is 0 where it is not spelled.
    """
    name, fields = spelled_call(spelling)
    return {"seed": "0", **fields} if name == "Run" else {}


def spelled_call(spelling: str | None) -> tuple[str, dict[str, str]]:
    """(class, fields) of a spelled configuration, each field as its own spelling; ("", {}) if it is not one."""
    try:
        call = ast.parse(spelling or "", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return "", {}
        return call.func.id, {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return "", {}


def check_snapshot(path: Path, value: Any) -> None:
    """Check the content of a snapshot file. Raises: StoreError with the file's name."""
    _check(path, "a snapshot", value, _SNAPSHOT, ("study", "scale", "metric", "baseline", "rows", "runs"))
    claims = value.get("claims") or []
    for name, items, types, required in (
        ("row", value["rows"], _ROW, ("label",)),
        ("run", value["runs"], _RUN, tuple(_RUN)),
        ("claim", claims, _CLAIM, ("a", "b", "metric")),
    ):
        for item in items:
            _check(path, f"a {name} of a snapshot", item, types, required)
    for claim in claims:
        than = claim.get("than")
        if than is not None and [type(label) for label in than] != [str, str]:
            raise StoreError(f"{path}: a claim has than {than!r}, expected two labels; the file is damaged")
    _check(path, "the data", value.get("data") or {}, _DATA, ())
    _check_texts(path, "notes", value.get("notes"))
    if (analyses := value.get("decide")) is not None:
        _check(path, "the entry decide", analyses, _DECIDE, tuple(_DECIDE))
    for row in value["rows"]:
        for name in ("paper", "exact"):
            _check_numbers(path, f"the {name} number", row.get(name))
        _check_texts(path, "notes of a row", row.get("notes"))
        if row.get("card"):
            _check(path, "a card", row["card"], _CARD, ("title",))
            for name, entry in row["card"].items():
                fact = isinstance(entry, bool if name in _FACTS else str)
                _check_texts(path, f"{name} of a card", [] if fact else entry)
    _check_runs(path, value)


def _check_runs(path: Path, value: Mapping[str, Any]) -> None:
    """Each run belongs to a row of the snapshot; each key has one row and seed, and each row and seed has one key."""
    labels = [row["label"] for row in value["rows"]]
    seeds: dict[str, int] = {}
    keys: dict[tuple[str, int], str] = {}
    for run in value["runs"]:
        row, seed, key = run["row"], run["seed"], run["key"]
        _check_key(path, key)
        if labels.count(row) != 1:
            raise StoreError(
                f"{path}: run {key} belongs to {row!r}, which is not one row of the snapshot; it is damaged"
            )
        if seeds.setdefault(key, seed) != seed or keys.setdefault((row, seed), key) != key:
            raise StoreError(
                f"{path}: run {key} of {row!r}, seed {seed}, is also listed with another seed or key; it is damaged"
            )


def _check_texts(path: Path, item: str, values: Any) -> None:
    if not isinstance(values, list | None) or not all(isinstance(value, str) for value in values or ()):
        raise StoreError(f"{path}: {item} is {str(values)[:80]}, expected texts; the file is damaged")


def _check_numbers(path: Path, kind: str, values: Mapping[str, Any] | None) -> None:
    for name, number in (values or {}).items():
        if not isinstance(number, int | float | None):
            raise StoreError(f"{path}: {kind} {name!r} is {number!r}, expected a number; the file is damaged")


def _check_shares(path: Path, metrics: Mapping[str, Any]) -> None:
    for name, number in metrics.items():
        if name in PERCENT and number is not None and not 0 <= number <= 100 + 1e-6:
            raise StoreError(f"{path}: {name} is {number!r}, expected 0 to 100 %; the file is damaged")
        if isinstance(number, float) and not math.isfinite(number):
            raise StoreError(f"{path}: {name} is {number!r}, expected a number or null; the file is damaged")


def _check_samples(path: Path, outcome: Mapping[str, Any]) -> None:
    """The recorded samples are as many as the test samples, and the right ones make up the accuracy."""
    number, top1 = (outcome.get("data") or {}).get("test"), (outcome.get("metrics") or {}).get("top1")
    if not isinstance(number, int):
        return
    try:
        bits, samples = (base64.b64decode(outcome.get(name) or "", validate=True) for name in ("bits", "samples"))
        values = array.array("f", samples)
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"{path}: the samples of run {outcome['key']} are damaged ({error}); run it again") from error
    if (bits and len(bits) != -(-number // 8)) or (values and len(values) != number):
        raise StoreError(f"{path}: run {outcome['key']} has another number of samples than of test images, {number}")
    if bits and int.from_bytes(bits) % 2 ** (-number % 8):
        raise StoreError(f"{path}: the samples of run {outcome['key']} are damaged; run it again")
    right = 100 * int.from_bytes(bits).bit_count() / number if bits else None
    known = "top1" in (outcome.get("metrics") or {})
    if right is not None and known and (top1 is None or abs(right - top1) > 1e-3):
        raise StoreError(
            f"{path}: run {outcome['key']} has top1 {'null' if top1 is None else format(top1, 'g')}, but its bits have "
            f"{right:g} % correct images; the file is damaged or was changed"
        )
    if not all(map(math.isfinite, values)):
        raise StoreError(f"{path}: the samples of run {outcome['key']} are damaged; run it again")


def check_name(path: Path, value: Mapping[str, Any]) -> None:
    """Check that a snapshot's study and setting can be a file name. Raises: StoreError with the file's name."""
    study, scale, variant = value["study"], value["scale"], value.get("variant") or ""
    if not _NAME.fullmatch(study) or scale not in SCALES or "-" in variant or not _NAME.fullmatch(f"x{variant}"):
        name = f"{study}-{setting_name(scale, variant)}"
        raise StoreError(f"{path}: a snapshot is of {name!r}, which is not the name of a study and its scale")


def same_rows(snapshot: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Labels that have the same mechanism and host in two snapshots."""

    def models(rows: Sequence[Mapping[str, Any]]) -> set[tuple[Any, Any, Any]]:
        return {(row["label"], row.get("spelling"), row.get("host")) for row in rows}

    return {label for label, _, _ in models(snapshot.get("rows") or ()) & models(other.get("rows") or ())}


def further_runs(snapshot: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs of `other` that can be added to `snapshot`: with the same task and recipe, of a row that is the same in
    both, and with a seed that the row does not have yet. Fixed and added seeds (with tuned rates) are not mixed."""
    if any(snapshot.get(field) != other.get(field) for field in ("task", "recipe", "decide")):
        return []
    rows, listed, further = same_rows(snapshot, other), {(run["row"], run["seed"]) for run in snapshot["runs"]}, []
    for run in other.get("runs") or ():
        if run["row"] in rows and (run["row"], run["seed"]) not in listed:
            listed.add((run["row"], run["seed"]))
            further.append(run)
    return further


def is_key(text: str) -> bool:
    """Whether a text can be the key of a run: 12 hexadecimal digits."""
    return len(text) == 12 and set(text) <= set("0123456789abcdef")


def _check_key(path: Path, key: str) -> None:
    if not is_key(key):
        raise StoreError(f"{path}: a run has the key {key!r}; expected 12 hexadecimal digits")


def _check(path: Path, item: str, value: Any, types: Mapping[str, Any], required: Sequence[str]) -> None:
    """The value is a mapping with the required fields, and its fields have the right types."""
    if not isinstance(value, dict):
        raise StoreError(f"{path} has {type(value).__name__} instead of {item}; it is damaged or not a file of regard")
    missing = [name for name in required if name not in value]
    if missing:
        raise StoreError(f"{path}: {item} lacks {', '.join(missing)}; the file is damaged or was not written by regard")
    for name, kind in types.items():
        if name not in value:
            continue
        given, allowed = value[name], get_args(kind) or (kind,)
        if not isinstance(given, kind) or (isinstance(given, bool) and bool not in allowed):
            expected = " or ".join("null" if each is type(None) else each.__name__ for each in allowed)
            actual = type(given).__name__
            raise StoreError(f"{path}: {name} of {item} is of type {actual}, expected {expected}; the file is damaged")
