"""Titles of the four papers, as the sources of studies, errata and reports name them, and the files of their rows."""

import json
from pathlib import Path
from typing import Any

SKA_PAPER = "Static Key Attention in Vision"
SNE_PAPER = "Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints"
MITA_PAPER = "Mixture-of-Top-k Attention"
MITA_SOURCE = "MiTA, arXiv 2602.01219"
"""The source of that paper's studies, whose titles use the short name."""
ESA_PAPER = "An Empirical Study of Spatial Attention Mechanisms in Deep Networks"
PAPERS = {"ska": SKA_PAPER, "sne": SNE_PAPER, "mita": MITA_PAPER, "esa": ESA_PAPER}
"""The folder of a paper's studies -> its title."""


def read_rows(paper: str, file: str) -> list[dict[str, Any]]:
    """The entries of a JSON file in the folder of a paper."""
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name(paper).joinpath(file).read_text(encoding="utf-8"))
    return rows
