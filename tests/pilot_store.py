"""A store with made-up outcomes, in real files that the store writes."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.files.records import write_record
from regard.lab.engine.table import snapshot_path
from regard.lab.results.results import Results

PILOT = {
    "softmax": [88.9, 89.2, 87.8],
    "SKA": [92.3, 92.7, 92.2],
    "MiTA": [89.1, 85.6, 87.0],
    "w/o": [76.5, 76.0, 77.0],
    "uniform": [79.6, 79.0, 80.0],
}


def key_of(row: int, seed: int) -> str:
    """12 hex digits."""
    return f"{row:06x}{seed:06x}"


def make_store(
    root: Path,
    rows: Mapping[str, Sequence[float]] = PILOT,
    scale: str = "desk",
    claims: Sequence[Mapping[str, Any]] = ({"a": "SKA", "b": "softmax", "metric": "top1"},),
    **fields: Any,
) -> Results:
    """A study "pilot" whose baseline is the first row; rows "w/o" and "uniform" are controls."""
    store = Results(root)
    labels = list(rows)
    runs = [
        {"key": key_of(i, s), "row": label, "seed": s}
        for i, label in enumerate(labels)
        for s in range(len(rows[label]))
    ]
    snapshot = {
        "study": "pilot", "title": "A pilot", "source": "here", "scale": scale, "question": "?",
        "metric": "top1", "baseline": labels[0], "notes": [], "data": {"name": "digits", "train": 8, "test": 9},
        "task": "t", "recipe": "Recipe(epochs=1)", "claims": list(claims), "runs": runs,
        "rows": [{"label": label, "spelling": label, "host": "h", "control": label in ("w/o", "uniform"), "card": None,
                  "paper": {}, "exact": {}, "notes": [], "parameters": 10, "macs": 20} for label in labels],
    }  # fmt: skip
    write_record(snapshot_path(root, "pilot", scale), {**snapshot, **fields})
    for run in runs:
        value = rows[run["row"]][run["seed"]]
        right = np.arange(1000) < value * 10
        store.finish(run["key"], {
            "status": "done", "error": None, "study": "pilot", "scale": scale, "row": run["row"], "seed": run["seed"],
            "metrics": {"loss": 1.0, "top1": value}, "seconds": 2.0, "parameters": 10, "macs": 20, "code": "abc",
            "environment": {"machine": "here", "device": "cpu"}, "data": {"name": "digits", "test": 1000},
            "bits": base64.b64encode(np.packbits(right).tobytes()).decode(),
        })  # fmt: skip
    return store
