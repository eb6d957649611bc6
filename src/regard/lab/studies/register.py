"""The register of claims of the four papers, in the order of each paper: `<paper>/claims.json`. Needs no torch."""

from collections.abc import Mapping

from .paper_claim import PaperClaim
from .papers import read_rows


def _read(paper: str) -> tuple[PaperClaim, ...]:
    rows = read_rows(paper, "claims.json")
    for row in rows:
        row["judges"], row["counts"] = tuple(map(tuple, row.get("judges", ()))), tuple(row.get("counts", ()))
    return tuple(PaperClaim(**row) for row in rows)


REGISTER: Mapping[str, tuple[PaperClaim, ...]] = {paper: _read(paper) for paper in ("mita", "ska", "sne", "esa")}
