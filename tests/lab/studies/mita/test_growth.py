"""How MiTA's numbers must grow: rows of each number of tokens, and runs that are shared with the probes."""

import re

from regard.lab.studies import load_study
from regard.mixers.mita.mita import MiTA

STUDY = load_study("mita_growth")


def test_every_row_has_the_numbers_and_tokens_of_its_label() -> None:
    for row, run in STUDY.runs("desk", seeds=1):
        tokens = int(row.label.split(" at ")[1]) if " at " in row.label else 144
        assert run.task.boards.side**2 == tokens
        assert run.task.boards.pairs * 18 == tokens * 5
        if numbers := re.match(r"MiTA (\d+)/(\d+)", row.label):
            assert run.mixer == MiTA(m=int(numbers[1]), k=int(numbers[2]))
