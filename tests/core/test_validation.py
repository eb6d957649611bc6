"""Fields of configurations take what their annotations name. Annotation checks would answer before the package does."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from operators import check_error
from regard import Card, ConfigError, Grid, LinearQKV, MiTA, RegardError, Site, Softmax, create_model, parse, retune
from regard.cli.app import run
from regard.core.validation import check_fields

pytestmark = pytest.mark.untyped

SIDES = "(a whole number, a whole number) or (a whole number, a whole number, a whole number) is expected"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SKA(heads=1.5)", "SKA has heads=1.5; a whole number is expected"),
        ("SKA(scale='a')", "SKA has scale='a'; a finite number or None is expected"),
        ("MiTA(k=True)", "MiTA has k=True; a whole number is expected"),
        ("MiTA(k=None)", "MiTA has k=None; a whole number is expected"),
        ("MiTA(m=(5,), k=5)", f"MiTA has m=(5,); a whole number, {SIDES}"),
        ("MoBA(block=(2, 2, 2, 2))", f"MoBA has block=(2, 2, 2, 2); a whole number, {SIDES}"),
        ("Factors(window='3')", "Factors has window='3'; a whole number is expected"),
        ("Factors(1111)", "Factors has terms=1111; a string such as '1111' is expected"),
        ("Conv(axes=3)", "Conv has no axes=3: axes is 1 or 2"),
        ("ViT3(lr='fast')", "ViT3 has lr='fast'; a finite number is expected"),
        ("ViT3(lr=1e999)", "ViT3 has lr=inf; a finite number is expected"),
        ("Softmax(gate=1)", "Softmax has gate=1; True or False is expected"),
        ("Softmax(projection='FSNE')", "projection='FSNE'; a ProjectionConfig such as LinearQKV() is expected"),
        ("Softmax(projection=SNE(width=2.5))", "SNE has width=2.5; a whole number, 'matched' or None is expected"),
        ("MHLA(normalize='corect')", "no normalize='corect': normalize is correct or none; did you mean correct?"),
        ("Linear(norm='x')", "Linear has no norm='x': norm is '' or rms"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert said in str(error.value)


def test_the_command_line_says_so_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cost", "MiTA(k=2.5)", "--host", "vit_desk"]) == 2
    assert "a whole number" in capsys.readouterr().err


def test_a_trained_model_is_not_retuned_to_half_a_key() -> None:
    model = create_model("vit_desk(size=8, patch=2, dim=8, depth=1, heads=2)", MiTA(m=4, k=5))
    for wrong in ({"k": 2.5}, {"m": (5,)}):
        check_error(ConfigError, "a whole number", retune, model, **wrong)
    assert model.blocks[0].attn.mixer.config == MiTA(m=4, k=5)


def test_a_number_of_numpy_becomes_one_of_python() -> None:
    """Spellings and keys of runs hold Python's numbers."""
    config = MiTA(m=(np.int64(2), 3), k=np.int32(4))  # type: ignore[arg-type]
    assert repr((config.m, config.k)) == "((2, 3), 4)"
    assert type(Softmax(gate=np.bool_(True)).gate) is bool
    assert type(Softmax(scale=np.float32(0.5)).scale) is float


@pytest.mark.parametrize("scale", [1e308, -1e19, 10**400, float("nan"), "0.5", True])
def test_a_factor_that_overflows_is_refused(scale: object) -> None:
    check_error(ConfigError, "Softmax has scale=", Softmax, scale=scale)


@pytest.mark.parametrize("wrong", [2.5, float("nan"), True, "3", None, 1j])
def test_grids_and_sites_have_whole_numbers(wrong: object) -> None:
    for make in (lambda: Grid(wrong, 4), lambda: Grid(3, 4, wrong), lambda: Site(16, wrong, Grid(3, 4))):
        check_error(RegardError, "whole number", make)


def test_right_values_pass() -> None:
    MiTA(m=(2, 3), k=4)
    assert Softmax(scale=1, projection=LinearQKV(), gate=True, dwc=3).dwc == 3
    assert parse("Nystrom(iterations=None)").iterations is None


@dataclass(frozen=True, kw_only=True)
class Own(Softmax):
    """A user's mechanism, with annotations of more kinds than the package has."""

    card: ClassVar[Card] = Softmax.card
    sizes: tuple[int, ...] = ()
    mode: Literal["a", "b", 3] | None = None
    anything: Any = None
    names: list[str] = None  # type: ignore[assignment]


def test_fields_of_a_users_own_mechanism_are_checked() -> None:
    Own(sizes=(1, 2, 3), mode=3, anything=object(), names=["x"])
    wrong = (
        ({"sizes": (1, 2.5), "names": []}, r"sizes=\(1, 2.5\); \(a whole number, ...\) is expected"),
        ({"mode": "c", "names": []}, "mode='c'; 'a', 'b', 3 or None is expected"),
        ({"names": "x"}, "names='x'; a list is expected"),
    )
    for values, said in wrong:
        check_error(ConfigError, said, Own, **values)


def test_an_annotation_that_cannot_be_read_is_no_error() -> None:
    @dataclass
    class Later:
        value: "Missing" = 3  # type: ignore[name-defined]  # noqa: F821

    check_fields(Later())
