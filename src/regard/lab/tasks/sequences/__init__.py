"""Classification of long sequences: the tasks of the Long Range Arena, and the user's own texts."""

from .task import Sequences as Sequences
