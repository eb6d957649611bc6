"""A finished study on disk, with the files that its runs write (numbers of the pilot study on digits)."""

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pilot_store import PILOT, make_store
from regard.files.records import read_record, write_record
from regard.lab.engine.table import snapshot_path
from regard.lab.results.metrics import Metrics

SCORES = {"MiTA <9/9>" if label == "MiTA" else label: scores for label, scores in PILOT.items()}
CARD = {
    "title": "Static key attention", "source": "SKA, Eq. 3", "formula": "softmax(q K) v", "complexity": "O(N^2 d)",
    "query_content": True, "key_content": False, "relative_position": False, "dynamic": "one-step", "scaling": [],
    "prefix": "like any other token", "row_maps": True,
}  # fmt: skip
ROWS = {
    "softmax": {"paper": {"top1": 72.2}, "exact": {"params": 5717416}},
    "SKA": {"card": CARD, "notes": ["Table 1 counts one head <only>."]},
}
TEXTS = {"title": "A demonstration </script><b>", "notes": ["A note of the study."], "recipe": "Recipe(epochs=12)"}
CLAIMS = [{"a": label, "b": "softmax", "metric": "top1", "within": None, "by": None} for label in ("SKA", "MiTA <9/9>")]


def picture() -> str:
    out = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) * 5).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def write_study(root: Path, scores: dict[str, list[float]]) -> Path:
    store = make_store(root, scores, claims=CLAIMS, **TEXTS)
    path = snapshot_path(root, "pilot", "desk")
    snapshot = read_record(path)
    rows = [row | ROWS.get(row["label"], {}) for row in snapshot["rows"]]
    write_record(path, {**snapshot, "rows": rows})
    weights = np.linspace(0, 1, 12).tolist()
    layers = [{"layer": f"blocks.{i}.attn", "heads": [weights, weights[::-1]], "mean": [1 / 12] * 12} for i in range(3)]
    for run in snapshot["runs"]:
        folder, outcome = store.folder(run["key"]), store.outcome(run["key"]) or {}
        score, index = outcome["metrics"]["top1"], list(scores).index(run["row"])
        store.finish(run["key"], outcome | {
            "metrics": {"top1": score, "loss": 2.3 - score / 60}, "seconds": 20.0 + index, "others": 0.01,
            "images_per_second": 4000.0 - 300 * index, "parameters": 19000 - 500 * index, "macs": 620000 - 9000 * index,
            "environment": {"machine": "Test & Co", "torch": "2.15.0", "device": "cpu"}, "bits": None,
        })  # fmt: skip
        metrics = Metrics(folder / "metrics.csv", ("top1", "loss"))
        metrics.cut(0)
        for epoch in range(1, 13):
            top1 = score * epoch / (epoch + 1)
            metrics.append({"epoch": epoch, "step": 28 * epoch, "train_loss": 2.3 / epoch, "lr": 0.001, "top1": top1,
                            "loss": 2.3 - top1 / 60, "seconds": epoch})  # fmt: skip
        maps = {"image": picture(), "grid": [3, 4], "query": [1, 2], "layers": [] if run["row"] == "w/o" else layers}
        write_record(folder / "probes" / "maps.json", maps)
    return root


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Path]:
    """Writes a finished study into a folder and returns the folder."""
    return lambda scores=SCORES: write_study(tmp_path / "results", scores)
