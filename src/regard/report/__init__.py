"""One offline HTML page a study: `write_report`. Needs no torch."""

from .page import render, write_report

__all__ = ["render", "write_report"]
