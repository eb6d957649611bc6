"""The committed evidence, docs/results: tables of studies, sheets of analyses, and what they say of one mechanism."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.lab.tasks.cells import Cells

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
WORDS = ("supported", "contradicted", "suggested", "undecided")
"""Of claims that were judged."""


@dataclass(frozen=True)
class Evidence:
    """A folder of docs/results. table: its table.json. snapshot: of a study; {} of an analysis."""

    folder: Path
    table: Mapping[str, Any]
    snapshot: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The study or analysis."""
        return str(self.table["study" if self.snapshot else "analysis"])

    @property
    def is_probe(self) -> bool:
        """Whether it asks for an ability on generated boards: no evidence on accuracy."""
        return self.table.get("metric") == Cells.metric

    @property
    def report(self) -> str:
        """The path of its page on the site."""
        return f"docs/results/{self.folder.name}/report.html"

    @property
    def written_table(self) -> str:
        """The path of its table in Markdown, below docs."""
        return f"results/{self.folder.name}/table.md"

    @property
    def setting(self) -> str:
        """The scale and the data, such as "desk scale; cifar10, 45000 training and 10000 test images"."""
        return "; ".join(str(self.table.get("caption", f"{self.table.get('scale')} scale")).split("; ")[:2])

    @property
    def claims(self) -> Sequence[Mapping[str, Any]]:
        """The claims of a study with their verdicts."""
        return self.table.get("claims") or ()

    def labels(self, mechanism: str) -> dict[str, str]:
        """label -> spelling of the rows with a mechanism, controls left out."""
        spellings = {row["label"]: str(row.get("spelling") or "") for row in self.snapshot.get("rows", ())}
        controls = {row["label"] for row in self.table.get("rows", ()) if row["control"]}
        return {
            label: spelling
            for label, spelling in spellings.items()
            if spelling.partition("(")[0] == mechanism and label not in controls
        }


def all_evidence(results: Path = RESULTS) -> list[Evidence]:
    """Every folder with a table, in the order of names."""
    found = []
    for file in sorted(results.glob("*/table.json")):
        evidence = file.with_name("evidence.json")
        snapshot = json.loads(evidence.read_text(encoding="utf-8"))["snapshot"] if evidence.exists() else {}
        found.append(Evidence(file.parent, json.loads(file.read_text(encoding="utf-8")), snapshot))
    return found


def judged(evidence: Sequence[Evidence]) -> Iterator[tuple[Evidence, Mapping[str, Any]]]:
    """Every claim whose gate was passed, with its study."""
    for study in evidence:
        for claim in study.claims:
            if claim["verdict"]["word"] in WORDS:
                yield study, claim


def on_mechanism(
    evidence: Sequence[Evidence], mechanism: str
) -> Iterator[tuple[Evidence, dict[str, str], list[Mapping[str, Any]]]]:
    """The studies that have a mechanism as a row: (study, label -> spelling, claims on these rows)."""
    for study in evidence:
        labels = study.labels(mechanism)
        if labels:
            yield study, labels, [claim for claim in study.claims if {claim["a"], claim["b"]} & labels.keys()]
