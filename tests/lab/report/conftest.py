"""A finished study on disk, with the files that its runs write (numbers of the pilot study on digits)."""

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.files.records import write_record
from regard.lab.results.metrics import Metrics

SCORES = {
    "softmax": (88.9, 89.2, 87.8),
    "SKA": (92.3, 92.7, 92.2),
    "MiTA <9/9>": (89.1, 85.6, 87.0),
    "average": (79.6, 79.1, 80.2),
    "w/o": (76.5, 76.0, 77.1),
}
CONTROLS = ("average", "w/o")
CARD = {
    "title": "Static key attention", "source": "SKA, Eq. 3", "formula": "softmax(q K) v", "complexity": "O(N^2 d)",
    "query_content": True, "key_content": False, "relative_position": False, "dynamic": "one-step", "scaling": [],
    "prefix": "like any other token", "row_maps": True,
}  # fmt: skip


def picture() -> str:
    out = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) * 5).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def write_run(folder: Path, row: str, seed: int, score: float, code: str) -> None:
    (folder / "probes").mkdir(parents=True)
    index = list(SCORES).index(row)
    outcome = {
        "key": folder.name, "status": "done", "error": None, "study": "demo", "scale": "desk", "row": row,
        "seed": seed, "metrics": {"top1": score, "loss": 2.3 - score / 60}, "seconds": 20.0 + index,
        "images_per_second": 4000.0 - 300 * index, "others": 0.01, "peak_memory_bytes": None,
        "parameters": 19000 - 500 * index,
        "macs": 620000 - 9000 * index, "environment": {"machine": "Test & Co", "torch": "2.15.0", "device": "cpu"},
        "code": code, "data": {"name": "digits-canvas", "checksum": "4a7d1ed4", "train": 898, "test": 1798},
        "spelling": f"Run(seed={seed})", "finished": "2026-01-01T00:00:00", "probes": {},
    }  # fmt: skip
    write_record(folder / "outcome.json", outcome)
    metrics = Metrics(folder / "metrics.csv", ("top1", "loss"))
    metrics.cut(0)
    for epoch in range(1, 13):
        top1 = score * epoch / (epoch + 1)
        metrics.append({"epoch": epoch, "step": 28 * epoch, "train_loss": 2.3 / epoch, "lr": 0.001, "top1": top1,
                        "loss": 2.3 - top1 / 60, "seconds": epoch})  # fmt: skip
    weights = np.linspace(0, 1, 12).tolist()
    layers = [{"layer": f"blocks.{i}.attn", "heads": [weights, weights[::-1]], "mean": [1 / 12] * 12} for i in range(3)]
    maps = {"image": picture(), "grid": [3, 4], "query": [1, 2], "layers": [] if row == "w/o" else layers}
    write_record(folder / "probes" / "maps.json", maps)


def write_study(
    root: Path, *, scale: str = "desk", scores: dict[str, tuple[float, ...]] | None = None, code: str = "8284c10"
) -> Path:
    rows, runs = [], []
    for label, values in (scores or SCORES).items():
        rows.append({
            "label": label, "spelling": f"{label}()", "host": "vit_desk(size=12)", "control": label in CONTROLS,
            "card": CARD if label == "SKA" else None, "paper": {"top1": 72.2} if label == "softmax" else {},
            "exact": {"params": 5717416} if label == "softmax" else {},
            "notes": ["Table 1 counts one head <only>."] if label == "SKA" else [], "parameters": 1000, "macs": 2000,
        })  # fmt: skip
        for seed, score in enumerate(values):
            key = f"{len(runs):012x}"
            write_run(root / key, label, seed, score, code if seed else "8284c10")
            runs.append({"key": key, "row": label, "seed": seed})
    claims = [{"a": "SKA", "b": "softmax", "metric": "top1", "within": None, "by": None},
              {"a": "MiTA <9/9>", "b": "softmax", "metric": "top1", "within": None, "by": None}]  # fmt: skip
    snapshot = {
        "study": "demo", "title": "A demonstration </script><b>", "source": "made by hand", "scale": scale,
        "question": "Does it matter?", "metric": "top1", "baseline": "softmax", "notes": ["A note of the study."],
        "data": {}, "recipe": "Recipe(epochs=12)", "rows": rows, "claims": claims, "runs": runs,
    }  # fmt: skip
    write_record(root / "studies" / f"demo-{scale}.json", snapshot)
    return root


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Path]:
    """Writes a finished study into a folder and returns the folder."""

    def make(**options) -> Path:  # type: ignore[no-untyped-def]
        return write_study(tmp_path / "results", **options)

    return make
