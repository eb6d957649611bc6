"""Checkpoints that survive a kill at any moment."""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from regard.core import StoreError
from regard.store.files import explained, sync_folder, write_atomically

log = logging.getLogger("regard.lab")

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
VERSION = 1


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write last.ckpt; the one before becomes previous.ckpt. Raises: StoreError; then the old ones are still there."""
    buffer = io.BytesIO()
    torch.save({"version": VERSION, **state}, buffer)
    fresh = folder / "next.ckpt"
    write_atomically(fresh, buffer.getvalue())
    with explained(folder / LAST):
        if (folder / LAST).exists():
            os.replace(folder / LAST, folder / PREVIOUS)
        os.replace(fresh, folder / LAST)
    sync_folder(folder)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read (tensors and plain values only); None if there is none.

    One that cannot be read is skipped with a warning.
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
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        log.warning("checkpoint %s cannot be read (%s); going back to the one before", path, reason)
    return None


def save_best(folder: Path, weights: dict[str, Any], step: int, value: float) -> None:
    """Write best.ckpt: weights of the evaluated network, the step and the value of the main metric.

    Raises: StoreError.
    """
    buffer = io.BytesIO()
    torch.save({"version": VERSION, "step": step, "value": value, "model": weights}, buffer)
    write_atomically(folder / BEST, buffer.getvalue())


def load_best(folder: Path) -> dict[str, Any] | None:
    """best.ckpt (step, value, model); None if there is none that can be read."""
    if not (folder / BEST).exists():
        return None
    try:
        state = torch.load(folder / BEST, map_location="cpu", weights_only=True)
        return state if state["version"] == VERSION else None
    except Exception as error:  # torch raises many kinds for a damaged file
        log.warning("%s cannot be read (%s); the next evaluation writes it anew", folder / BEST, error)
        return None


def trained_weights(folder: Path, best: bool = False) -> dict:
    """What a run evaluates: its last weights (their average where the recipe has one), or those of best.ckpt.

    Raises: StoreError if there is no such checkpoint.
    """
    if best:
        state = load_best(folder)
        if state is None:
            raise StoreError(f"{folder} has no readable {BEST}; runs write one at each better evaluation")
        return state["model"]
    state = load(folder)
    if state is None:
        imported = "its outcome came without weights: delete the folder, and it is trained where it is needed"
        todo = imported if (folder / "outcome.json").exists() else "carry it out first"
        raise StoreError(f"run {folder.name} has no checkpoint in {folder}; {todo}")
    return state["ema"] if state["ema"] is not None else state["model"]


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Turn what loading a foreign state raises into a StoreError that names the folder and what to do."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(
            f"the checkpoint in {folder} does not fit this run ({reason[:200]}); it is of another program or version: "
            "delete the folder to begin anew, or use another one with --results"
        ) from error
