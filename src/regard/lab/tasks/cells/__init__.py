"""Boards of cells, some of which ask for a class."""

from .task import Cells as Cells
