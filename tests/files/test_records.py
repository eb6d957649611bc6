"""Checksums: a changed bit of any file is noticed."""

from pathlib import Path
from typing import Any

import pytest

from regard.core import StoreError
from regard.files.records import read_record, seal, unseal, write_record
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results

KEY = "0123456789ab"
DONE: dict[str, Any] = {"status": "done", "metrics": {"top1": 50.0}, "seed": 3, "bits": "8A==", "data": {"test": 8}}
SPELLED = "Run(task=Classification(data='digits'), mixer=SKA(), seed=3)"


def every_bit(path: Path, read: Any) -> int:
    """Flip each bit of a file in turn; returns how many `read` refuses."""
    content, refused = path.read_bytes(), 0
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                read()
            except StoreError:
                refused += 1
    path.write_bytes(content)
    return refused


def test_every_bit_of_an_outcome_is_checked(tmp_path: Path) -> None:
    store = Results(tmp_path)
    store.finish(KEY, {"status": "done", "metrics": {"top1": 1e-05, "loss": 0.30000000000000004}})
    path = store.folder(KEY) / "outcome.json"
    assert every_bit(path, lambda: store.outcome(KEY)) == 8 * path.stat().st_size
    assert (store.outcome(KEY) or {})["metrics"]["top1"] == 1e-05


def test_every_bit_of_the_metrics_is_checked(tmp_path: Path) -> None:
    table = Metrics(tmp_path / "metrics.csv", ("top1",))
    table.cut(0)
    for epoch in (1, 2):
        table.append({"epoch": epoch, "step": 4 * epoch, "train_loss": 0.5, "lr": 1e-3, "top1": 9.5, "seconds": 1})
    assert every_bit(table.path, table.read) == 8 * table.path.stat().st_size
    assert [row["step"] for row in table.read()] == ["4", "8"]


def test_every_bit_of_sealed_data_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(seal(b"some data"))
    assert every_bit(path, lambda: unseal(path, path.read_bytes())) == 8 * path.stat().st_size
    assert unseal(path, path.read_bytes()) == b"some data"


def test_a_line_that_a_kill_cut_at_any_byte_is_left_out(tmp_path: Path) -> None:
    table = Metrics(tmp_path / "metrics.csv", ("top1",))
    table.cut(0)
    table.append({"epoch": 1, "step": 4})
    whole = table.path.read_bytes()
    table.append({"epoch": 2, "step": 8})
    longer = table.path.read_bytes()
    for size in range(len(whole), len(longer)):
        table.path.write_bytes(longer[:size])
        assert [row["step"] for row in table.read()] == ["4"]
    table.cut(4, epochs=1)
    assert table.path.read_bytes() == whole
    with pytest.raises(StoreError, match="ends with epoch 1, but 2 were trained"):
        table.cut(8, epochs=2)
    assert table.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n "version": 2\n}\n', "does not end with its checksum"),
        ('{"version": 2, "checksum": "x"}', "does not end with its checksum"),
        ('{"version": 2, "a": 1, "a": 1}', "'a' occurs twice"),
        ('{"version": 9}', "has version 9, this Regard reads 2"),
        ('{"a": 1}', "is no record of Regard"),
        ("[]", "is no record of Regard"),
        ('{"version": true}', "has version True"),
        ("[" * 100_000, "is not JSON"),
        ("{", "is not JSON"),
        ('{"version": 2, "a": 1' + "0" * 400 + "}", "a number of 401 digits"),
    ],
    ids=["none", "not its end", "twice", "later", "other", "list", "no number", "deep", "cut", "large"],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(StoreError, match=said) as error:
        read_record(tmp_path / "x.json")
    assert "x.json" in str(error.value)


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    write_record(tmp_path / "x.json", {"a": 1, "b": 2})
    assert read_record(tmp_path / "x.json", ("a", "b")) == {"version": 2, "a": 1, "b": 2}
    with pytest.raises(StoreError, match="has 'b', which this Regard does not know"):
        read_record(tmp_path / "x.json", ("a",))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metrics": {"top1": 101.0}}, "expected 0 to 100 %"),
        ({"metrics": {"top1": -1.0}}, "expected 0 to 100 %"),
        ({"metrics": {"top1": 62.5}}, "its bits have 50 % correct"),
        ({"metrics": {}}, "has no metrics"),
        ({"metrics": None}, "has no metrics"),
        ({"bits": "?"}, "are damaged"),
        ({"bits": "8AAA"}, "another number of samples"),
        ({"data": {"test": 5}, "metrics": {}}, "has no metrics"),
        ({"data": {"test": 3}, "bits": "8A=="}, "are damaged"),
        ({"bits": None, "samples": "AAAAAA=="}, "another number of samples"),
        ({"seed": 4, "spelling": SPELLED}, "has seed 4, but spells seed=3"),
        ({"seed": "3"}, "seed of an outcome is of type str"),
        ({"best": {"step": 1, "top1": 300.0}}, "expected 0 to 100 %"),
        ({"key": "0" * 12}, "is the outcome of run 000000000000"),
        ({"surprise": 1}, "has 'surprise', which this Regard does not know"),
    ],
)
def test_fields_that_do_not_agree_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    store = Results(tmp_path)
    store.finish(KEY, DONE)
    write_record(store.folder(KEY) / "outcome.json", {"key": KEY, **DONE, **changes})
    for read in (lambda: store.outcome(KEY), lambda: store.status(KEY), store.outcomes):
        with pytest.raises(StoreError, match=said) as error:
            read()
        assert "\n" not in str(error.value)


def test_an_outcome_is_of_the_run_beside_it(tmp_path: Path) -> None:
    store = Results(tmp_path)
    store.finish(KEY, {**DONE, "spelling": SPELLED})
    write_record(store.folder(KEY) / "run.json", {"spelling": SPELLED.replace("digits", "/elsewhere")})
    assert store.status(KEY) == "done"
    for other in (SPELLED.replace("seed=3", "seed=4"), SPELLED.replace("SKA()", "MiTA(m=4)")):
        write_record(store.folder(KEY) / "run.json", {"spelling": other})
        with pytest.raises(StoreError, match="one of them is of another run"):
            store.outcome(KEY)


def test_the_metrics_of_another_run_are_refused(tmp_path: Path) -> None:
    """Their checksums cover the key of the run, which is the folder's name."""
    row = {"epoch": 1, "step": 2, "train_loss": 0.5, "lr": 0.1, "top1": 50.0, "seconds": 1.0}
    for name in ("a" * 12, "b" * 12):
        (tmp_path / name).mkdir()
        metrics = Metrics(tmp_path / name / "metrics.csv", ("top1",))
        metrics.cut(0)
        metrics.append(row)
        assert len(metrics.read()) == 1
    first, second = (tmp_path / name / "metrics.csv" for name in ("a" * 12, "b" * 12))
    second.write_bytes(first.read_bytes())
    with pytest.raises(StoreError, match="line 2 does not fit its checksum"):
        Metrics(second).read()
