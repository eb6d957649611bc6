import pytest

from regard.pages import phrasing


@pytest.mark.parametrize(
    ("value", "text"),
    [(-0.04, "0.0"), (-1.25, "−1.2"), (12.0, "12.0"), (None, "–"), (float("nan"), "not a number")],
)
def test_numbers_have_a_true_minus_and_no_negative_zero(value, text):
    assert phrasing.number(value) == text


def test_signed_marks_gains_only():
    assert [phrasing.signed_number(v) for v in (3.84, -1.4, 0.0, -0.01, 0.01, None)] == [
        "+3.8",
        "−1.4",
        "0.0",
        "0.0",
        "0.0",
        "–",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(141_000, "141 k"), (5_717_416, "5.72 M"), (1.2e9, "1.20 G"), (999_950, "1.00 M"), (12, "12"), (0.5, "0.5")],
)
def test_three_figures_and_a_unit_of_thousands(value, text):
    assert phrasing.compact(value) == text


def test_durations_read_in_the_fitting_unit():
    assert [phrasing.duration(s) for s in (24, 137, 7200)] == ["24 s", "2.3 min", "2.0 h"]


def test_minus_signs_are_typeset_and_hyphens_kept():
    assert phrasing.typeset("-1.4 [-1.8, -1.1] of ViT-5") == "−1.4 [−1.8, −1.1] of ViT-5"
    assert phrasing.typeset("inside +-2, MiTA+-free") == "inside ±2, MiTA+-free"
