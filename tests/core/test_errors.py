"""The end of messages about unknown names."""

import pytest

from regard.core import nearest


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("quikstart", ["quickstart", "mita_growth", "mita_table2"], "did you mean quickstart?"),
        ("mita_table", ["mita_table2", "mita_table3", "quickstart"], "did you mean mita_table3 or mita_table2?"),
        ("MITA", ["mita", "ska"], "did you mean mita?"),
        ("x", ["mita", "ska"], "known: mita, ska"),
        (None, ["mita", "ska"], "known: mita, ska"),
    ],
)
def test_only_names_that_are_nearly_as_like_as_the_first_are_suggested(name, options, expected) -> None:
    assert nearest(name, options) == expected
