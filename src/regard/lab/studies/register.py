"""The register of claims of the four papers, in the order of each paper: `<paper>/claims.json`. Needs no torch."""

import json
from collections.abc import Mapping
from pathlib import Path

from .paper_claim import PaperClaim


def _read(paper: str) -> tuple[PaperClaim, ...]:
    rows = json.loads(Path(__file__).with_name(paper).joinpath("claims.json").read_text(encoding="utf-8"))
    pairs = {"judges": lambda judges: tuple(map(tuple, judges)), "counts": tuple}
    return tuple(PaperClaim(**{name: pairs.get(name, str)(value) for name, value in row.items()}) for row in rows)


REGISTER: Mapping[str, tuple[PaperClaim, ...]] = {paper: _read(paper) for paper in ("mita", "ska", "sne", "esa")}
