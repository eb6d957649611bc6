"""Tables from stores with known outcomes, their exports, and what they refuse to mix."""

import csv
import io
import json
import re
import statistics
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilot_store import PILOT, key_of, make_store
from regard.core import ConfigError, RegardError, StoreError
from regard.files.records import read_record, write_record
from regard.lab.engine.claims import claim_text, sample_values
from regard.lab.engine.export import csv_text, evidence, import_runs, json_text, latex, markdown
from regard.lab.engine.study import Claim
from regard.lab.engine.table import Table, snapshot_path
from regard.lab.results.results import Results


def load(root: Path, scale: str = "desk") -> Table:
    return Table.load(root, "pilot", scale)


def change(store: Results, row: int, seed: int, **fields: Any) -> None:
    """Write an outcome anew with other fields."""
    store.finish(key_of(row, seed), {**(store.outcome(key_of(row, seed)) or {}), **fields})


def fail(store: Results, row: int, seed: int, error: str, **fields: Any) -> None:
    store.finish(key_of(row, seed), {"status": "failed", "error": error, "metrics": {}, **fields})


def test_rows_differences_gate_and_claim(tmp_path: Path) -> None:
    make_store(tmp_path)
    table = load(tmp_path)
    ska = table.line("SKA")
    assert (ska.n, ska.mean) == (3, pytest.approx(92.4))
    assert ska.difference.low == pytest.approx(2.40, abs=0.01)
    assert table.line("softmax").difference is None
    assert table.gate.passed is True
    assert table.claims[0].verdict.word == "supported"
    assert table.claims[0].verdict.sampling is not None


def test_an_interval_around_zero_leaves_the_gate_undecided_and_names_its_price(tmp_path: Path) -> None:
    make_store(tmp_path, {**PILOT, "w/o": [87.0, 85.9, 88.7]})
    gate = load(tmp_path).gate
    assert (gate.passed, gate.word) == (None, "undecided")
    assert gate.sentence.startswith("Gate undecided: softmax minus each control")
    assert re.search(r"w/o: \+\d.\d \[-\d.\d, \+\d.\d\] \(about \d+ seeds would decide", gate.sentence)
    assert load(tmp_path).claims[0].verdict.word == "not judged"


def test_a_gate_without_its_runs_is_undecided(tmp_path: Path) -> None:
    make_store(tmp_path, {**PILOT, "w/o": [76.0, 77.0]})
    assert load(tmp_path).gate.passed is None
    assert load(tmp_path).claims[0].verdict.word == "not judged"


def test_an_interim_analysis_takes_no_later_seed_in_place_of_one_that_is_missing(tmp_path: Path) -> None:
    """The late seed, 10 below the baseline, belongs to the first analysis: without it the claim would be supported."""
    rows = {"softmax": [60.0, 60.2, 59.9, 60.1], "SKA": [61.0, 50.0, 61.1, 61.0], "w/o": [50.0, 51.0, 50.5, 50.2]}
    store = make_store(tmp_path, rows, decide={"pairs": [3, 5], "shares": [0.5, 0.5], "level": 0.05})
    late = store.outcome(key_of(1, 1)) or {}
    store.forget(key_of(1, 1))
    said = load(tmp_path).claims[0].verdict.sentence
    assert said == "not judged: 3 paired seeds (2 behind a seed that is missing), the first interim analysis is at 3"
    store.finish(key_of(1, 1), late)
    assert load(tmp_path).claims[0].verdict.word == "undecided"
    fail(store, 1, 1, "x")  # it has ended: the next seeds take its place
    assert load(tmp_path).claims[0].verdict.word == "supported"
    store.forget(key_of(2, 0))
    assert load(tmp_path).gate.passed is None


@pytest.mark.parametrize(
    ("error", "fields", "number"),
    [
        ("the loss is inf at step 7", {"diverged": True}, 1),
        ("DataError: /data/finance/nan.jpg cannot be read", {}, 0),
    ],
)
def test_a_failed_run_is_left_out_and_its_outcome_says_whether_it_diverged(
    tmp_path: Path, error: str, fields: dict, number: int
) -> None:
    """Which is not read from words."""
    fail(make_store(tmp_path), 1, 2, error, **fields)
    table = load(tmp_path)
    line = table.line("SKA")
    assert (line.n, line.failed, line.diverged) == (2, 1, number)
    assert f"SKA: 1 of 3 seeds {'diverged' if number else 'failed'} (seed 2: {error})" in table.warnings
    assert table.claims[0].verdict.word == "not judged"


def test_what_stays_at_chance_is_not_called_diverged(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    change(store, 1, 1, diverged=True)
    fail(store, 1, 2, "DataError: no images")
    table = load(tmp_path)
    line = table.line("SKA")
    assert (line.n, line.failed, line.diverged, line.at_chance) == (2, 1, 0, 1)
    assert table.warnings[:2] == (
        "SKA: 1 of 3 seeds failed (seed 2: DataError: no images)",
        "SKA: 1 of 3 seeds at chance (no better than guessing)",
    )


def test_seeds_at_chance_and_failed_ones_are_counted_among_those_that_were_run(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    change(store, 1, 0, diverged=True)
    fail(store, 2, 1, "no images")
    for row, seed in ((1, 1), (1, 2), (2, 2)):
        store.reopen(key_of(row, seed))
    assert load(tmp_path).warnings == (
        "SKA: 1 of 1 seeds at chance (no better than guessing)",
        "MiTA: 1 of 2 seeds failed (seed 1: no images)",
        "3 of 15 runs are missing",
    )


def test_a_claim_compares_two_differences_seed_by_seed(tmp_path: Path) -> None:
    make_store(tmp_path, claims=[{"a": "SKA", "b": "w/o", "metric": "top1", "than": ["softmax", "SKA"]}])
    (judged,) = load(tmp_path).claims
    assert judged.text == "SKA is further above w/o than softmax is above SKA, in top1"
    expected = [2 * s - w - b for s, w, b in zip(PILOT["SKA"], PILOT["w/o"], PILOT["softmax"], strict=True)]
    assert judged.verdict.interval.mean == pytest.approx(sum(expected) / 3)
    assert judged.verdict.interval.sd == pytest.approx(statistics.stdev(expected))
    assert judged.verdict.sampling is None


def test_a_claim_with_two_differences_has_no_margin() -> None:
    with pytest.raises(ConfigError, match="than= takes neither within= nor by="):
        Claim("a", "b", "top1", within=1.0, than=("c", "d"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"runs": [{"row": "SKA", "seed": 0}]}, "pilot-desk.json: a run of a snapshot lacks key"),
        ({"rows": [{}]}, "pilot-desk.json: a row of a snapshot lacks label"),
        ({"claims": [{"a": "SKA"}]}, "pilot-desk.json: a claim of a snapshot lacks b, metric"),
        ({"decide": {"pairs": [3]}}, "pilot-desk.json: the entry decide lacks shares, level"),
        ({"decide": {"pairs": 3, "shares": [1.0], "level": 0.05}}, "pairs of the entry decide is of type int"),
        ({"decide": {"pairs": ["3"], "shares": [1.0], "level": 0.05}}, r"pairs=\('3',\)"),
        ({"decide": {"pairs": [3], "shares": [0.5], "level": 0.05}}, "shares are positive and sum up to 1"),
    ],
)
def test_a_damaged_snapshot_is_named(tmp_path: Path, damage: dict, message: str) -> None:
    make_store(tmp_path)
    path = snapshot_path(tmp_path, "pilot", "desk")
    write_record(path, read_record(path) | damage)
    with pytest.raises(RegardError, match=message):
        load(tmp_path)


def test_failed_runs_stand_in_the_table_with_their_errors(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    errors = ("ConfigError: 5 heads do not divide 64", "ConfigError: 5 heads do not divide 64", "DataError: no images")
    for seed, error in enumerate(errors):
        fail(store, 1, seed, error)
    fail(store, 2, 1, "the loss is nan", diverged=True)
    warnings = load(tmp_path).warnings
    errors = "seeds 0, 1: ConfigError: 5 heads do not divide 64; seed 2: DataError: no images"
    assert f"SKA: 3 of 3 seeds failed ({errors})" in warnings
    assert "MiTA: 1 of 3 seeds diverged (seed 1: the loss is nan)" in warnings
    assert any("5 heads do not divide 64" in line for line in markdown(load(tmp_path)).splitlines())


def test_mixed_code_versions_are_said(tmp_path: Path) -> None:
    change(make_store(tmp_path), 1, 0, code="def")
    assert "the table mixes code versions: abc (14 runs), def (1 run)" in load(tmp_path).warnings


@pytest.mark.parametrize(
    ("field", "values", "said"),
    [
        ("processor", ("Xeon", "EPYC"), "machines: here with Xeon (14 runs), here with EPYC (1 run)"),
        ("threads", (2, 1), "numbers of threads: 2 (14 runs), 1 (1 run)"),
        ("compiled kernels", (False, True), "compiled kernels: without (14 runs), with (1 run)"),
        ("devices", (1, 2), "numbers of devices: 1 (14 runs), 2 (1 run)"),
        ("devices", (1, None), ""),
    ],
)
def test_mixed_environments_are_reported(tmp_path: Path, field: str, values: tuple, said: str) -> None:
    store = make_store(tmp_path)
    for run in store.outcomes():
        environment = {**run["environment"], field: values[run["key"] == key_of(1, 0)]}
        store.finish(run["key"], {**run, "environment": environment})
    found = [warning for warning in load(tmp_path).warnings if "mixes" in warning]
    assert len(found) == bool(said)
    assert not said or found[0].endswith(said)


def test_data_are_compared_with_data_of_the_same_name(tmp_path: Path) -> None:
    """Rows on other data differ by design; the same set with other contents is a mixture."""
    store = make_store(tmp_path)
    for run in store.outcomes():
        name, checksum = ("cifar100", "c" * 8) if run["row"] == "SKA" else ("cifar10", "a" * 8)
        store.finish(run["key"], {**run, "data": {"name": name, "checksum": checksum}})
    assert not [warning for warning in load(tmp_path).warnings if "mixes" in warning]
    change(store, 0, 0, data={"name": "cifar10", "checksum": "b" * 8})
    said = "the table mixes data checksums of cifar10: bbbbbbbb (1 run), aaaaaaaa (11 runs)"
    assert said in load(tmp_path).warnings


def test_devices_are_never_mixed_in_an_interval(tmp_path: Path) -> None:
    change(make_store(tmp_path), 1, 0, environment={"device": "cuda"}, metrics={"top1": 10.0}, bits=None)
    table = load(tmp_path)
    assert table.line("SKA").n == 2
    assert "left out: 1 on a GPU" in table.warnings[0]
    assert not any("missing" in warning for warning in table.warnings)  # it was run


def test_csv_has_a_line_a_run(tmp_path: Path) -> None:
    make_store(tmp_path)
    lines = list(csv.DictReader(io.StringIO(csv_text(load(tmp_path)))))
    assert list(lines[0]) == ["row", "seed", "top1", "loss"]
    assert [(line["row"], line["seed"], float(line["top1"])) for line in lines[:2]] == [
        ("softmax", "0", 88.9),
        ("softmax", "1", 89.2),
    ]
    assert len(lines) == 15


def test_json_has_differences_but_for_the_baseline(tmp_path: Path) -> None:
    make_store(tmp_path)
    rows = {row["label"]: row for row in json.loads(json_text(load(tmp_path)))["rows"]}
    assert {"label", "n", "mean", "low", "high"} <= rows["softmax"].keys()
    assert "difference" not in rows["softmax"]
    assert {"mean", "low", "high"} <= rows["SKA"]["difference"].keys()


def test_signs_are_escaped(tmp_path: Path) -> None:
    make_store(tmp_path, {"a_b|c": [1.0, 2.0, 3.0], "50%": [1.0, 2.0, 3.0]}, claims=())
    assert r"a\_b|c" in latex(load(tmp_path))
    assert r"50\%" in latex(load(tmp_path))
    assert r"| a_b\|c |" in markdown(load(tmp_path))


def test_text_of_a_snapshot_stays_text(tmp_path: Path) -> None:
    hostile = "x\n\\input{/etc/passwd}\n<img src=y>\x1b[2J"
    make_store(tmp_path, title=hostile, notes=[hostile], variant=hostile)
    table = load(tmp_path)
    assert not [line for line in latex(table).splitlines() if line.startswith(r"\input")]
    assert "<img" not in markdown(table)
    assert "\x1b" not in markdown(table)
    assert not [line for line in markdown(table).splitlines() if line.startswith(r"\input")]


@pytest.mark.parametrize("form", ["store", "evidence", "outcome"])
def test_import_takes_runs_in(tmp_path: Path, form: str) -> None:
    make_store(tmp_path / "there")
    here = Results(tmp_path / "here")
    if form == "store":
        counts = import_runs(tmp_path / "there", here)
    elif form == "evidence":
        write_record(tmp_path / "evidence.json", evidence(tmp_path / "there", "pilot", "desk"))
        counts = import_runs(tmp_path / "evidence.json", here)
    else:
        make_store(tmp_path / "here")
        here.reopen(key_of(0, 0))
        counts = import_runs(tmp_path / "there" / key_of(0, 0) / "outcome.json", here)
    assert counts["new"] == (1 if form == "outcome" else 15)
    assert json_text(load(tmp_path / "here")) == json_text(load(tmp_path / "there"))
    again = import_runs(tmp_path / "there", here)
    assert (again["known"], again["differ"]) == (15, 0)


def test_known_runs_with_other_metrics_are_counted(tmp_path: Path) -> None:
    make_store(tmp_path / "here")
    here, key = Results(tmp_path / "here"), key_of(0, 0)
    make_store(tmp_path / "there")
    there = Results(tmp_path / "there")
    outcome = dict(there.outcome(key) or {})
    there.reopen(key)
    there.finish(key, {**outcome, "metrics": {**outcome["metrics"], "loss": 9.0}})
    assert import_runs(tmp_path / "there", here)["differ"] == 1
    assert here.outcome(key) == outcome


def test_an_imported_outcome_does_not_finish_weights_that_were_begun_here(tmp_path: Path) -> None:
    make_store(tmp_path / "there")
    here, key = Results(tmp_path / "here"), key_of(0, 0)
    for name in ("last.ckpt", "previous.ckpt", "metrics.csv"):
        (here.folder(key) / name).parent.mkdir(parents=True, exist_ok=True)
        (here.folder(key) / name).write_bytes(b"half")
    import_runs(tmp_path / "there", here)
    assert here.status(key) == "done"
    assert {path.name for path in here.folder(key).iterdir()} == {"outcome.json"}


def test_a_replaced_outcome_does_not_keep_the_weights_of_the_one_before(tmp_path: Path) -> None:
    here, key = make_store(tmp_path / "here"), key_of(0, 0)
    (here.folder(key) / "probes").mkdir()
    for name in ("last.ckpt", "best.ckpt", "metrics.csv", "probes/maps.json"):
        (here.folder(key) / name).write_text("{}")
    there = make_store(tmp_path / "there")
    import_runs(there.root, here, replace=True)
    assert (here.folder(key) / "last.ckpt").exists()  # of the same result
    change(there, 0, 0, metrics={"top1": 50.0}, bits=None)
    import_runs(there.root, here, replace=True)
    assert {path.name for path in here.folder(key).rglob("*")} == {"outcome.json", "probes"}


def test_import_adds_seeds_to_a_snapshot(tmp_path: Path) -> None:
    make_store(tmp_path / "here", {"softmax": [1.0, 2.0], "SKA": [1.0, 2.0]})
    make_store(tmp_path / "there", {"softmax": [1.0, 2.0, 3.0], "SKA": [1.0, 2.0, 4.0]})
    import_runs(tmp_path / "there", Results(tmp_path / "here"))
    assert load(tmp_path / "here").line("SKA").n == 3


@pytest.mark.parametrize("field", ["spelling", "host"])
def test_import_leaves_another_mechanism_out(tmp_path: Path, field: str) -> None:
    """A row of the same name that means something else does not change what is here."""
    make_store(tmp_path / "here")
    before = load(tmp_path / "here").line("SKA")
    path = snapshot_path(tmp_path / "there", "pilot", "desk")
    there = make_store(tmp_path / "there", {**PILOT, "SKA": [1.0, 1.0, 1.0, 1.0]})
    value = read_record(path)
    value["rows"][1][field] = "SKA(scale=1.0)"
    for run in value["runs"]:
        if run["row"] == "SKA":
            outcome = there.outcome(run["key"]) or {}
            run["key"] = f"f{run['key'][1:]}"
            there.finish(run["key"], outcome)
    write_record(path, value)
    assert import_runs(tmp_path / "there", Results(tmp_path / "here"))["left out"] == 4
    after = load(tmp_path / "here").line("SKA")
    assert (after.mean, after.runs, after.n) == (before.mean, 3, 3)


def test_import_leaves_a_seed_out_that_is_here(tmp_path: Path) -> None:
    make_store(tmp_path / "here", {"softmax": [1.0, 2.0], "SKA": [1.0, 2.0]})
    there = make_store(tmp_path / "there", {"softmax": [1.0, 2.0], "SKA": [1.0, 9.0]})
    path = snapshot_path(tmp_path / "there", "pilot", "desk")
    value = read_record(path)
    value["runs"][3]["key"] = "f" * 12
    write_record(path, value)
    there.finish("f" * 12, there.outcome(key_of(1, 1)) or {})
    assert import_runs(tmp_path / "there", Results(tmp_path / "here"))["left out"] == 1
    assert load(tmp_path / "here").line("SKA").mean == 1.5


def test_import_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no outcome.json"):
        import_runs(tmp_path, Results(tmp_path / "here"))


def test_import_refuses_keys_that_are_paths(tmp_path: Path) -> None:
    write_record(tmp_path / "outcome.json", {"status": "done", "key": "../../etc/x"})
    with pytest.raises(StoreError, match="12 hexadecimal digits"):
        import_runs(tmp_path / "outcome.json", Results(tmp_path / "here"))


def test_an_unknown_study_says_what_there_is(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(ConfigError, match="it has pilot at desk scale"):
        Table.load(tmp_path, "pilto", "desk")


def test_bits_are_read_as_they_were_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    bits = sample_values(store.outcome(key_of(0, 0)) or {}, "top1")
    assert (len(bits), bits.sum()) == (1000, 88900)


def test_samples_are_read_as_they_were_written() -> None:
    values = np.array([12.5, -3.0, 40.25], np.float32)
    outcome = {"samples": b64encode(values.tobytes()).decode(), "sampled": "miou", "data": {"test": 3}}
    assert sample_values(outcome, "miou").tolist() == values.tolist()
    assert sample_values(outcome, "pixels") is None
    with pytest.raises(StoreError, match="damaged"):
        sample_values({**outcome, "samples": "?"}, "miou")


def test_how_far_is_a_claim_of_the_paper_scale_alone() -> None:
    claim = {"a": "SKA", "b": "softmax", "metric": "top1", "by": 1.9}
    assert claim_text(claim, "paper") == "SKA is above softmax in top1 by at least 1.9"
    assert claim_text(claim, "desk") == "SKA is above softmax in top1 (direction only; at paper scale by at least 1.9)"


def claims_of(*pairs: tuple[str, str]) -> list[dict]:
    return [{"a": a, "b": b, "metric": "top1"} for a, b in pairs]


UNCORRECTED = claims_of(("SKA", "softmax"), *[("MiTA", "softmax")] * 7)
"""The first has a p of 0.0071, which is below 0.05 and above 0.05 / 8."""


def test_the_headline_counts_what_survives_the_correction(tmp_path: Path) -> None:
    make_store(tmp_path, claims=UNCORRECTED[:7])
    assert load(tmp_path).headline == "Of 7 claims, 1 is supported and 6 are undecided."
    make_store(tmp_path, claims=UNCORRECTED)
    table = load(tmp_path)
    assert table.headline == "Of 8 claims, 1 is only suggested and 7 are undecided."
    for text in (markdown(table), json_text(table)):
        assert table.headline in text
        assert "supported" not in text.replace(table.headline, "")


@pytest.mark.parametrize(("scale", "passed"), [("desk", False), ("smoke", True)])
def test_nothing_is_judged_at_smoke_scale_and_without_a_passed_gate(tmp_path: Path, scale: str, passed: bool) -> None:
    make_store(tmp_path, PILOT if scale == "smoke" else {**PILOT, "w/o": [95.0, 95.1, 95.2]}, scale)
    table = load(tmp_path, scale)
    assert table.gate.passed is passed
    assert table.claims[0].verdict.word == "not judged"
    assert table.line("SKA").low is not None
    assert "the 1 claim cannot be judged" in table.headline


def test_a_claim_with_the_wrong_sign_is_contradicted(tmp_path: Path) -> None:
    make_store(tmp_path, claims=claims_of(("softmax", "SKA"), ("SKA", "softmax"), ("w/o", "softmax")))
    wrong, right, worse = load(tmp_path).claims
    assert [claim.verdict.word for claim in (wrong, right, worse)] == ["contradicted", "supported", "contradicted"]
    assert [claim.verdict.side for claim in (wrong, right, worse)] == [-1, 1, -1]
    assert wrong.verdict.interval.mean == pytest.approx(-(right.verdict.interval.mean or 0))


def test_effects_are_a_share_of_what_attention_brings(tmp_path: Path) -> None:
    """Softmax (88.63) brings 9.1 over the better control (79.53), so 3.77 more are 41 % of that."""
    make_store(tmp_path)
    table = load(tmp_path)
    gain = statistics.fmean(PILOT["softmax"]) - statistics.fmean(PILOT["uniform"])
    assert table.gate.gain == pytest.approx(gain)
    share = (statistics.fmean(PILOT["SKA"]) - statistics.fmean(PILOT["softmax"])) / gain
    assert table.line("SKA").share == pytest.approx(share)
    assert table.claims[0].share == pytest.approx(share)
    assert table.line("uniform").share == pytest.approx(-1)
    assert table.claims[0].sentence.endswith("; 41 % of what attention brings over the better control")
    make_store(tmp_path, {**PILOT, "w/o": [95.0, 95.1, 95.2]})
    assert load(tmp_path).line("SKA").share is None
