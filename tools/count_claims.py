"""Count what the papers print and time what nobody ran: `python -m tools.count_claims` writes docs/counts.json.

For every row with printed parameters or MACs, the model of the paper scale is built without data and counted, as
`--dry-run` does. The hours of a study's desk scale on this machine follow from timed training steps of its baseline.
Names of studies as arguments: only these, the others stay. Minutes in all; then `make generated` writes docs/claims.md.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.core import RegardError
from regard.files.atomic import write_atomically
from regard.lab.engine.estimate import baseline_hours
from regard.lab.engine.study import Row, Setting, Study
from regard.lab.results.results import Results
from regard.lab.studies import STUDIES, load_study
from regard.lab.studies.paper_claim import COUNTED
from regard.measure.cost import count_macs

FILE = Path(__file__).parents[1] / "docs" / "counts.json"


def counted_rows(study: Study) -> list[dict[str, Any]]:
    """Every printed count of a study's paper scale beside ours; empty without such a scale."""
    if "paper" not in study.settings:
        return []
    setting = study.setting("paper")
    return [line for row in setting.rows if row.paper.keys() & set(COUNTED) for line in _counted(row, setting)]


def _counted(row: Row, setting: Setting) -> list[dict[str, Any]]:
    printed = {name: row.paper[name] for name in COUNTED if name in row.paper}
    try:
        counts = _counts(row, setting)
        values, why = dict(zip(COUNTED, counts, strict=True)), ""
    except Exception as error:  # hosts raise various errors; the other rows are still counted
        values, why = {}, f"{type(error).__name__}: {error}".splitlines()[0]
    return [
        {"row": row.label, "count": name, "printed": number, "here": values.get(name), "why": why}
        for name, number in printed.items()
    ]


def _counts(row: Row, setting: Setting) -> tuple[int, int]:
    """(parameters, MACs of one sample as papers count them); on the meta device where the host allows it."""
    task = setting.task_of(row)
    try:
        with torch.device("meta"):
            trial = task.trial(row.mixer, row.removed)
            macs = count_macs(trial.model, trial.inputs, "paper")
    except (RuntimeError, NotImplementedError, RegardError):
        trial = task.trial(row.mixer, row.removed)
        macs = count_macs(trial.model, trial.inputs, "paper")
    return sum(parameter.numel() for parameter in trial.model.parameters()), macs


def desk_hours(study: Study) -> float | None:
    """Hours of the whole desk scale, from the baseline's training steps; None if it cannot be timed here."""
    setting = study.settings.get("desk")
    if setting is None or setting.recipe is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        found = baseline_hours(study, "desk", Results(Path(folder)), 1)
        return round(found[0], 1) if found else None


def main(names: Sequence[str]) -> None:
    """Count and time the studies that are named, or all; what is done is written at once."""
    known: Mapping[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    value = {"counts": dict(known.get("counts", {})), "hours": dict(known.get("hours", {}))}
    for name in names or STUDIES:
        study = load_study(name)
        for part, found in (("counts", counted_rows(study)), ("hours", desk_hours(study))):
            if found:
                value[part][name] = found
        write_atomically(FILE, json.dumps(value, indent=1) + "\n")
        print(name, value["hours"].get(name), len(value["counts"].get(name, ())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
