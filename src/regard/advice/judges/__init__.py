"""Judges: what of a model's output is compared before and after a change, one file for each kind of output."""

from .choose import KINDS as KINDS
from .choose import choose as choose
from .judge import Judge as Judge
