"""One spelling: what `spell` writes `parse` reads, and nothing is evaluated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators import check_error
from regard import ConfigError, LinearQKV, Softmax, parse, spell
from regard.mixers.spelling import parse_mixer


@given(st.floats(-1e18, 1e18) | st.none(), st.integers(0, 5).map(lambda n: 2 * n + 1), st.booleans())
def test_what_is_written_is_read(scale: float | None, dwc: int, gate: bool) -> None:
    if scale is not None and abs(scale) == float("inf"):
        scale = 1.0
    config = Softmax(scale=scale, dwc=dwc, gate=gate)
    assert parse(spell(config)) == config


def test_defaults_are_left_out() -> None:
    assert spell(Softmax()) == "Softmax()"
    assert spell(Softmax(dwc=3, projection=LinearQKV())) == "Softmax(dwc=3)"


def test_a_bare_name_and_spaces() -> None:
    assert parse(" Softmax ") == Softmax()
    assert parse("Softmax( projection = LinearQKV )") == Softmax()
    assert parse_mixer("None") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Sofmax()", "unknown name 'Sofmax'.*did you mean Softmax"),
        ("softmax", "did you mean Softmax"),
        ("Softmax(scal=1.0)", "Softmax has no 'scal'; it has projection, dwc, gate, host_bias, scale"),
        ("Softmax(", "cannot read"),
        ("", "cannot read"),
        ("Factors(terms=0110)", 'such as "0110" stand in quotes'),
        ("__import__('os').system('true')", "only names and literals|unknown name|cannot read"),
        ("Softmax(scale=open('x'))", "unknown name 'open'"),
        ("Softmax(scale=[x for x in y])", "only names and literals"),
        ("Softmax(3)", "cannot build"),
        ("Softmax(dwc=2)", "odd kernel"),
        ("()", "is no configuration"),
        ("(SKA(), MiTA())", "is no configuration"),
        ("None", "is no configuration"),
    ],
)
def test_wrong_text_says_what_is_wrong(text: str, message: str) -> None:
    check_error(ConfigError, message, parse, text)


def test_a_projection_is_no_mechanism() -> None:
    check_error(ConfigError, "is not a mechanism; known: Softmax", parse_mixer, "LinearQKV()")
