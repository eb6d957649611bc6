"""Checkpoints of a run; a readable one remains even if the process is killed while it writes.

A checkpoint has a checksum, which is verified when it is read, and the key of its run; nothing in it is pickled.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.core import StoreError
from regard.files.atomic import read_if_present, store_errors, sync_folder, write_atomically
from regard.files.records import seal, unseal
from regard.files.tensor_files import NO_STATE, decode, encode

log = logging.getLogger("regard.lab.engine")

NEXT, LAST, PREVIOUS, BEST = "next.ckpt", "last.ckpt", "previous.ckpt", "best.ckpt"
_FIELDS = {"run", "step", "seconds", "others", "losses", "data", "model", "ema", "averaged", "optimizer", "scaler"}
_BEST_FIELDS = {"run", "step", "value", "model"}


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write last.ckpt; the former one becomes previous.ckpt. Raises: StoreError; the old checkpoints then remain."""
    write_atomically(folder / NEXT, seal(encode({"run": folder.name, **state})))
    _rename(folder)


def keep_only_last(folder: Path) -> None:
    """Leave last.ckpt alone, after the end of a save that was killed before it renamed its file. Raises: StoreError."""
    try:
        interrupted = _read(folder / NEXT, _FIELDS) is not None
    except StoreError:
        interrupted = False
    if interrupted:
        _rename(folder)
    for name in (PREVIOUS, NEXT):
        (folder / name).unlink(missing_ok=True)


def _rename(folder: Path) -> None:
    """The new file becomes last.ckpt, the former one previous.ckpt."""
    with store_errors(folder / LAST):
        if (folder / LAST).exists():
            os.replace(folder / LAST, folder / PREVIOUS)
        os.replace(folder / NEXT, folder / LAST)
    sync_folder(folder)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest readable checkpoint; None if there is none.

    A damaged checkpoint is skipped with a warning. Raises: StoreError if there are checkpoints, but all are damaged.
    """
    reasons = list[str]()
    for name in (NEXT, LAST, PREVIOUS):
        try:
            state = _read(folder / name, _FIELDS)
        except StoreError as error:
            reasons.append(str(error))
            continue
        if state is not None:
            for reason in reasons:
                log.warning("%s; using the one before it, %s", reason, name)
            return state
    if reasons:
        raise StoreError(
            f"no checkpoint can be read: {'; '.join(reasons)}; restore one from a copy, or delete the folder to train "
            "again"
        )
    return None


def _read(path: Path, fields: set[str]) -> dict[str, Any] | None:
    """The content of a checkpoint, None if there is no file. Raises: StoreError, which names the file."""
    with store_errors(path, "read"):
        data = read_if_present(path)
    if data is None:
        return None
    try:
        state = decode(unseal(path, data))
    except (StoreError, *NO_STATE) as error:
        raise StoreError(f"checkpoint {path} cannot be read ({error})") from error
    if unknown := sorted(state.keys() - fields):
        raise StoreError(f"checkpoint {path} cannot be read (it has {', '.join(unknown)}, which is unknown)")
    if state.get("run", path.parent.resolve().name) != path.parent.resolve().name:
        raise StoreError(f"checkpoint {path} cannot be read (it is of run {state['run']})")
    return state


def save_best(folder: Path, weights: dict[str, Any], step: int, value: float) -> None:
    """Write best.ckpt: weights of the evaluated model, the step and the value of the main metric.

    Raises: StoreError.
    """
    state = {"run": folder.name, "step": step, "value": value, "model": weights}
    write_atomically(folder / BEST, seal(encode(state)))


def load_best(folder: Path) -> dict[str, Any] | None:
    """The content of best.ckpt (step, value, model); None if there is none.

    Raises: StoreError if it is damaged: the best weights until now are then lost.
    """
    try:
        return _read(folder / BEST, _BEST_FIELDS)
    except StoreError as error:
        raise StoreError(
            f"{error}; restore it from a copy, or delete it: then the best of the evaluations that follow is kept"
        ) from error


def no_best_weights(key: str) -> StoreError:
    """The error for a run whose best weights are requested and were never chosen."""
    return StoreError(
        f"run {key} has no best weights, since only a validation part chooses them: train with --val 0.1, or leave "
        "best out for the last weights"
    )


def trained_weights(folder: Path, best: bool = False, averaged: bool = False, end: int | None = None) -> dict:
    """The weights that a run evaluates: the last ones (their average if the recipe has one), or those of best.ckpt.

    averaged: whether the recipe has an average. end: the step at which the run ended, None = not known. Raises:
    StoreError if there is no such checkpoint, no average in it, or its last one is of another step.
    """
    if best:
        state = load_best(folder)
        if state is None:
            raise no_best_weights(folder.name)
        with load_errors(folder):
            return state["model"]
    state = load(folder)
    if state is None:
        imported = "its outcome is there without weights (imported, or removed): delete the folder to train it again"
        advice = imported if (folder / "outcome.json").exists() else "train it first"
        raise StoreError(f"run {folder.name} has no checkpoint in {folder}; {advice}")
    with load_errors(folder):
        if end is not None and state["step"] != end:
            raise ValueError(f"it is of step {state['step']}, and the run ended at step {end}")
        if averaged and state["ema"] is None:
            raise ValueError("it has no average of the weights, which the recipe of the run evaluates")
        return state["ema"] if state["ema"] is not None else state["model"]


@contextmanager
def load_errors(folder: Path) -> Iterator[None]:
    """Turn an error of loading a state that does not fit into a StoreError with the folder and a remedy."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(
            f"the checkpoint in {folder} does not fit this run ({reason[:200]}); another program or version wrote it: "
            "delete the folder to start again, or use another one with --results"
        ) from error
