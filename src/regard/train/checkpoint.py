"""Checkpoints of a run; a readable one remains even if the process is killed while it writes."""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from regard.core import StoreError
from regard.store.files import store_errors, sync_folder, write_atomically

log = logging.getLogger("regard.lab")

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
VERSION = 1


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write last.ckpt; the former one becomes previous.ckpt. Raises: StoreError; the old checkpoints then remain."""
    buffer = io.BytesIO()
    torch.save({"version": VERSION, **state}, buffer)
    new = folder / "next.ckpt"
    write_atomically(new, buffer.getvalue())
    with store_errors(folder / LAST):
        if (folder / LAST).exists():
            os.replace(folder / LAST, folder / PREVIOUS)
        os.replace(new, folder / LAST)
    sync_folder(folder)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest readable checkpoint (tensors and plain values only); None if there is none.

    A damaged checkpoint is skipped with a warning.
    """
    for name in ("next.ckpt", LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["version"] == VERSION:
                return state
            reason = f"it has version {state['version']}, not {VERSION}"
        except Exception as error:  # torch raises various errors for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        log.warning("checkpoint %s cannot be read (%s); using the one before it", path, reason)
    return None


def save_best(folder: Path, weights: dict[str, Any], step: int, value: float) -> None:
    """Write best.ckpt: weights of the evaluated model, the step and the value of the main metric.

    Raises: StoreError.
    """
    buffer = io.BytesIO()
    torch.save({"version": VERSION, "step": step, "value": value, "model": weights}, buffer)
    write_atomically(folder / BEST, buffer.getvalue())


def load_best(folder: Path) -> dict[str, Any] | None:
    """The content of best.ckpt (step, value, model); None if it is missing or damaged."""
    if not (folder / BEST).exists():
        return None
    try:
        state = torch.load(folder / BEST, map_location="cpu", weights_only=True)
        return state if state["version"] == VERSION else None
    except Exception as error:  # torch raises various errors for a damaged file
        log.warning("%s cannot be read (%s); the next improvement of the score replaces it", folder / BEST, error)
        return None


def trained_weights(folder: Path, best: bool = False) -> dict:
    """The weights that a run evaluates: the last ones (their average if the recipe has one), or those of best.ckpt.

    Raises: StoreError if there is no such checkpoint.
    """
    if best:
        state = load_best(folder)
        if state is None:
            raise StoreError(f"{folder} has no readable {BEST}; a run writes it whenever its score improves")
        return state["model"]
    state = load(folder)
    if state is None:
        imported = "its outcome was imported without weights: delete the folder to train it here"
        advice = imported if (folder / "outcome.json").exists() else "train it first"
        raise StoreError(f"run {folder.name} has no checkpoint in {folder}; {advice}")
    return state["ema"] if state["ema"] is not None else state["model"]


@contextmanager
def load_errors(folder: Path) -> Iterator[None]:
    """Turn an error of loading a state that does not fit into a StoreError with the folder and a remedy."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(
            f"the checkpoint in {folder} does not fit this run ({reason[:200]}); another program or version wrote it: "
            "delete the folder to start again, or use another one with --results"
        ) from error
