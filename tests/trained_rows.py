"""Rows of a study's smoke scale, trained for a moment."""

from collections.abc import Collection
from dataclasses import replace

from regard.lab.engine.run_study import run_study
from regard.lab.results.results import Results
from regard.lab.studies import load_study


def train_rows(store: Results, name: str, labels: Collection[str], limit: int = 64, seeds: int = 1) -> None:
    """Train rows, and the networks that they start from, for one epoch on `limit` images."""
    study = load_study(name)
    setting = study.setting("smoke")
    rows = tuple(
        row if row.start is None else replace(row, start=replace(row.start, recipe={"epochs": 1}))
        for row in setting.rows
        if row.label in labels
    )
    task, recipe = replace(setting.task, limit=limit), replace(setting.recipe, epochs=1)  # type: ignore[type-var]
    quick = replace(setting, task=task, recipe=recipe, rows=rows, seeds=seeds)
    study = replace(study, settings={**study.settings, "smoke": quick}, claims=())
    assert run_study(study, "smoke", store, workers=0)["done"] >= len(labels)
