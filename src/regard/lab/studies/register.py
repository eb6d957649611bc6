"""The register of claims of the four papers, in the order of each paper: `<paper>/claims.json`. Needs no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .paper_claim import PaperClaim


def _read(paper: str) -> tuple[PaperClaim, ...]:
    text = Path(__file__).with_name(paper).joinpath("claims.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    for row in rows:
        row["judges"], row["counts"] = tuple(map(tuple, row.get("judges", ()))), tuple(row.get("counts", ()))
    return tuple(PaperClaim(**row) for row in rows)


REGISTER: Mapping[str, tuple[PaperClaim, ...]] = {paper: _read(paper) for paper in ("mita", "ska", "sne", "esa")}
