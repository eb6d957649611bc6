"""The table of executions: what "auto" takes, and what a calibration of this device changes."""

import json

import pytest
import torch

from regard.files.records import record_text
from regard.mixers.shared import calibration
from regard.mixers.shared.calibration import Measured, calibration_file, fastest, write_calibration
from regard.mixers.shared.executions import MEASURED, RULES, Situation, choose

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("own_calibrations")


def situation(tokens: int = 1024, *facts: str, **more: object) -> Situation:
    options: dict = {"device": CPU, "dtype": torch.float32, "keys": tokens, "m": 64, "top": 64} | more
    return Situation(tokens=tokens, facts=frozenset(facts), **options)


@pytest.mark.parametrize(
    ("mechanism", "case", "execution"),
    [
        ("MiTA", situation(1024, "native"), "native"),
        ("MiTA", situation(1024), "grouped"),
        ("MiTA", situation(128), "dense"),
        ("MiTA", situation(129), "grouped"),
        ("MiTA", situation(1024, "union"), "dense"),
        ("MiTA", situation(1024, "few", "triton", device=torch.device("cuda")), "dense"),
        ("MoBA, NSA", situation(1024), "grouped"),
        ("MoBA, NSA", situation(1024, "few", device=torch.device("cuda")), "dense"),
        ("MoBA, NSA", situation(100), "dense"),
        ("NSA's window", situation(1024, top=9), "gather"),
        ("NSA's window", situation(196, top=9), "dense"),
        ("BRA", situation(), "regions"),
        ("TopK", situation(4096, "native"), "native"),
        ("TopK", situation(4096, top=25), "gather"),
        ("TopK", situation(1024, top=8), "dense"),
        ("Factors", situation(4096, "content"), "compressed"),
        ("Factors", situation(4096, "per query", "fits"), "factorised"),
        ("Factors", situation(4096, "per query"), "compressed"),
        ("Factors", situation(4096), "factorised"),
        ("DeformableConv", situation(196, device=torch.device("cuda")), "torchvision"),
        ("DeformableConv", situation(196, "native"), "native"),
        ("DeformableConv", situation(196), "eager"),
    ],
)
def test_the_table(mechanism: str, case: Situation, execution: str) -> None:
    assert choose(mechanism, "auto", case, lambda: MEASURED.get(mechanism, ())) == execution
    assert choose(mechanism, "named", case) == "named"


def test_every_rule_of_the_table_can_be_reached() -> None:
    """The last rule of a mechanism always holds, and no other one does."""
    for rules in RULES.values():
        assert rules[-1].holds(situation(10**6))
        assert all(rule.when not in ("always", "elsewhere") for rule in rules[:-1])


def row(tokens: int = 1024, trains: bool = False, dtype: str = "float32", **seconds: float) -> Measured:
    return Measured(mechanism="MiTA", dtype=dtype, trains=trains, sizes=(tokens, 64, 64), seconds=seconds)


def test_the_fastest_that_was_measured_near_is_taken() -> None:
    rows = [row(dense=1.0, grouped=2.0, triton=0.1), row(4096, dense=9.0, grouped=3.0), row(trains=True, gather=1.0)]
    write_calibration(CPU, rows)

    def taken(tokens: int, **options: object) -> str:
        return choose("MiTA", "auto", situation(tokens, **options), lambda: ("dense", "grouped", "gather"))

    assert taken(1024) == taken(1600) == "dense"  # triton cannot run here
    assert taken(4096) == taken(3000) == "grouped"
    assert taken(1024, trains=True) == "gather"
    assert taken(4096, trains=True) == "grouped"  # nothing near was measured: the table
    assert taken(1024, dtype=torch.bfloat16) == "grouped"
    assert taken(1024, m=200) == "grouped"
    assert choose("MiTA", "auto", situation(1024)) == "grouped"  # without a list of what can run
    with torch.inference_mode():
        assert torch.vmap(lambda x: x if taken(1024) == "grouped" else -x)(torch.ones(2)).sum() == 2  # a transform


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: text.replace('"version": 2', '"version": 3'),
        lambda text: text.replace('"version": 2', '"version": 1'),
        lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != "checksum"}),
        lambda text: json.dumps(
            {key: value for key, value in json.loads(text).items() if key not in ("checksum", "version")}
        ),
        lambda text: record_text(json.loads(text) | {"device": "another"}),
        lambda text: record_text(json.loads(text) | {"versions": {}}),
        lambda text: record_text(json.loads(text) | {"rows": [{"mechanism": "MiTA"}]}),
        lambda text: record_text(json.loads(text) | {"more": 1}),
        lambda text: json.dumps(json.loads(text) | {"device": "another"}),
        lambda text: json.dumps(json.loads(text) | {"versions": {}}),
        lambda text: json.dumps(json.loads(text) | {"rows": [{"mechanism": "MiTA"}]}),
        lambda text: text.replace("1.5", '"1.5"'),
        lambda text: text.replace("1.5", "NaN"),
        lambda text: text.replace("1024", "true"),
        lambda text: text.replace("false", "null"),
    ],
)
def test_a_damaged_or_foreign_file_is_left_out_with_one_warning(change) -> None:
    path = write_calibration(CPU, [row(dense=1.5)])
    assert choose("MiTA", "auto", situation(), lambda: ("dense",)) == "dense"
    path.write_text(change(path.read_text()))
    calibration.calibration.cache_clear()
    fastest.cache_clear()
    with pytest.warns(UserWarning, match="does not count.*--calibrate") as found:
        taken = [choose("MiTA", "auto", situation(tokens), lambda: ("dense",)) for tokens in (1024, 2000)]
    assert taken == ["grouped", "grouped"]
    assert len(found) == 1


def test_without_a_file_nothing_is_said(recwarn: pytest.WarningsRecorder) -> None:
    assert choose("MiTA", "auto", situation(), lambda: ("dense",)) == "grouped"
    assert not recwarn
    assert not calibration_file(CPU).exists()
