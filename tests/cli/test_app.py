"""The command line: tables, JSON, exit codes and messages; run in this process."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import answer, refused
from regard import MIXERS, Grid, Site, parse
from regard.cli import app as module
from regard.cli.app import run
from regard.cli.sizes import read_size
from regard.cli.swap_check import _change
from regard.cli.tables import show
from regard.core import ConfigError, RegardError, StoreError
from regard.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]


def test_the_list_has_every_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["name"] for row in answer(capsys, "list")] == [cls.__name__ for cls in MIXERS]
    assert [row["mechanism"] for row in answer(capsys, "taxonomy")] == [cls.__name__ for cls in MIXERS]


@pytest.mark.parametrize(
    ("what", "known"),
    [("mixers", "MiTA"), ("projections", "LinearQKV"), ("hosts", "deit_tiny_patch16_224"), ("data", "digits"),
     ("tasks", "cells"), ("studies", "quickstart")],
)  # fmt: skip
def test_a_list_in_a_pipe_is_a_line_a_name_with_tabs(what: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", what]) == 0
    heading, *lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    listed = answer(capsys, "list", what)
    assert heading == list(listed[0])
    assert [line[0] for line in lines] == [row["name"] for row in listed]
    assert known in [line[0] for line in lines]
    assert {len(line) for line in lines} == {len(heading)}
    assert all(text for line in lines for text in line)  # an empty cell would shift columns
    assert [line[1] for line in lines if what == "mixers"] == [row["title"] for row in listed if what == "mixers"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_list_fits_the_terminal_and_breaks_no_name() -> None:
    import pty

    reader, terminal = pty.openpty()
    listing = subprocess.Popen(
        [sys.executable, "-m", "regard", "list", "studies"], stdout=terminal, stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
    )  # fmt: skip
    os.close(terminal)
    text = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal
        while part := os.read(reader, 4096):
            text += part
    os.close(reader)
    _, errors = listing.communicate()
    assert listing.returncode == 0, errors
    shown = text.decode().splitlines()
    assert max(map(len, shown)) <= 80
    assert all(f" {name} " in text.decode() for name in STUDIES)


def test_rows_of_a_table_in_a_pipe_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    table = [{"name": "a", "text": "many words " * 60}, {"name": "b", "text": None}]
    show(table, title="A title " * 5, notes=["n " * 300])
    title, _, heading, _, first, second, _, note = capsys.readouterr().out.splitlines()
    assert (title, heading.split(), second.split()) == ("A title " * 5, ["name", "text"], ["b"])
    assert first.split() == ["a"] + ["many", "words"] * 60
    assert note == "n " * 300


def test_numbers_of_a_column_are_written_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of our own and rounded ones of a paper."""
    show([{"params": 8_249_328, "paper": 8.1e6}, {"params": 12, "paper": 0.00005}])
    assert [line.split() for line in capsys.readouterr().out.splitlines()[3:5]] == [
        ["8,249,328", "8,100,000"], ["12", "5e-05"],
    ]  # fmt: skip


def test_a_card_has_formula_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["card", "Softmax(dwc=3)"]) == 0
    out = capsys.readouterr().out
    assert "softmax(q k^T / sqrt(d)) v" in out
    assert "factor of the logits" in out


@pytest.mark.parametrize("name", [cls.__name__ for cls in MIXERS])
def test_every_mechanism_has_a_card(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (known,) = answer(capsys, "card", name)
    assert known["formula"]
    assert known["options"]


def test_cost_of_a_layer_is_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = answer(capsys, "cost", "Softmax(dwc=3)", "--grid", "6x4", "--prefix", "2", "--dim", "12", "--heads", "2")
    expected = parse("Softmax(dwc=3)").cost(Site(12, 2, Grid(6, 4, 2)))
    assert (row["params"], row["MACs"]) == (expected.params, expected.macs)


@pytest.mark.slow
def test_cost_of_deit_tiny_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ("--host", "deit_tiny_patch16_224")
    own, same, static, none = answer(capsys, "cost", "host", "Softmax", "SKA", "None", *hosts)
    assert own["mechanism"] == "host"
    assert own["params"] == same["params"] == 5_717_416
    assert own["MACs"] == same["MACs"] == 1_253_683_200  # DeiT: 1.3 G
    assert static["params"] == 5_726_632
    assert none["params"] == own["params"] - 12 * 4 * (192 * 192 + 192)  # no q, k, v and no output projection
    assert none["MACs"] == own["MACs"] - 12 * (4 * 197 * 192 * 192 + 2 * 197 * 197 * 192)


def test_bench_compares_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "Softmax", "SKA", "--grid", "3x4,2x2", "--dim", "8", "--seconds", "0.01", "--backward"]
    found = answer(capsys, *command)
    assert [(row["mixer"], row["tokens"]) for row in found] == [
        ("Softmax()", 12),
        ("SKA()", 12),
        ("Softmax()", 4),
        ("SKA()", 4),
    ]
    assert found[0]["ratio"] == found[2]["ratio"] == 1
    assert all(row["rounds"] >= 5 and row["low"] <= row["seconds"] <= row["high"] for row in found)
    assert found[1]["ratio"] == pytest.approx(found[1]["seconds"] / found[0]["seconds"])


def test_bench_names_what_does_not_fit_and_times_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--grid", "3x3", "--dim", "8", "--seconds", "0.01"]
    assert run(["bench", "MiTA(m=16, k=2)", "SKA", *small]) == 0
    shown = capsys.readouterr()
    assert "SKA()" in shown.out
    assert "left out: MiTA(m=16, k=2) on 3x3" in shown.out + shown.err
    host = "vit_desk(size=16, patch=4, dim=16, depth=2, heads=2)"
    found = answer(capsys, "bench", "host", "None", "SKA", "--model", host, "--seconds", "0.01")
    assert [row["mixer"] for row in found] == ["host", "None", "SKA()"]
    refused(capsys, ["bench", "None", *small], "give --model too")


def test_swap_check_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    host = "vit_desk(size=16, patch=4, dim=16, depth=2, heads=2)"
    first, second = answer(capsys, "swap-check", host, "SKA()")
    assert first["grid"].startswith("4x4 ")
    assert "keys" in second["new"]
    assert first["change"] > 1e-6
    (only,) = answer(capsys, "swap-check", host, "Softmax()", "--where", "*0*")
    assert only["change"] < 1e-6
    assert only["parameters"] == only["parameters before"]


def test_swap_check_of_a_model_with_several_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    host = "vit_tiny_patch16_224(features_only=True, img_size=32)"
    for mixer, changed in (("Softmax()", False), ("SKA()", True)):
        found = answer(capsys, "swap-check", host, mixer)
        assert all((row["change"] > 1e-4) == changed for row in found)


def test_boxes_before_and_after_a_swap_are_not_subtracted() -> None:
    boxes = [{"boxes": torch.zeros(2, 4)}]
    assert _change(boxes, [{"boxes": torch.zeros(3, 4)}]) == (None, True)
    assert _change(boxes, [{"boxes": torch.full((2, 4), torch.nan)}])[1] is False


def test_swap_check_names_a_port_that_does_not_compute_what_the_layer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/your-own-model.md").read_text(encoding="utf-8")
    source = page.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "my_vit.py").write_text(source, encoding="utf-8")
    wrong = source.replace("self.mixer(x, self.grid())", "self.mixer(x.flip(1), self.grid())")
    assert wrong != source
    (tmp_path / "wrong_vit.py").write_text(wrong, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, said in (("my_vit", 0), ("wrong_vit", 1)):
        assert run(["swap-check", "MyViT", "Softmax()", "--import", name]) == 0
        assert capsys.readouterr().out.count("should change nothing but rounding") == said


def test_swap_check_fits_100_columns_and_says_a_note_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["swap-check", "deit_tiny_patch16_224(depth=3)", "SKA()"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert [out.count(text) for text in ("blocks.1.attn", "note:", "kept:", "new:", "dropped:")] == [1] * 5
    assert run(["swap-check", "pvt_v2_b0", "Softmax()"]) == 0  # layers that differ are named
    assert "dropped in stages.0.blocks.0.attn, " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["swap-check", "deit_tiny_patch16_224", "SKA", "--pretrained"],
        ["maps", "deit_tiny_patch16_224", "--pretrained"],
        ["finetune", "deit_tiny_patch16_224", "--data", "digits", "--size", "224"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_weights_that_cannot_be_loaded_are_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/conftest.py puts the hub out of reach."""
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, arguments, "regard: cannot load the weights of deit_tiny_patch16_224: ", code=1)
    assert message.count("\n") == 1
    assert not list(tmp_path.glob("results/*/outcome.json"))


def test_python_m_regard_runs_no_file_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("typer", "numpy", "rich", "typing", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')")
    command = [sys.executable, "-m", "regard", "list", "studies"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "quickstart" in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoreError("the disk is full"), 1), (ConfigError("not so"), 2), (RegardError("it failed"), 1),
     (KeyboardInterrupt(), 130)],
    ids=["store", "config", "other", "interrupt"],
)  # fmt: skip
def test_errors_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(module.app, "registered_commands", list(module.app.registered_commands))
    module.app.command("fail")(fail)
    assert refused(capsys, ["fail"], str(error), code=code).count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("list", "card", "cost", "taxonomy", "bench", "swap-check"))
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("regard 0.")


@pytest.mark.parametrize("verb", [command.name for command in module.app.registered_commands])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments are in capitals; newer versions of the parser would write {key}."""
    known = {"eval": "MODEL", "predict": "MODEL FILES...", "swap-check": "MODEL MECHANISM"}
    assert run([verb, "--help"]) == 0
    usage = capsys.readouterr().out.partition("\n")[0]
    assert usage.startswith(f"Usage: regard {verb} [OPTIONS] {known.get(verb, '')}".strip())


def test_sizes_are_height_first() -> None:
    assert read_size("224x160") == (224, 160)
    assert read_size("32") == (32, 32)
    for wrong in ("0x3", "3x", "axb", "-3x4", ""):
        with pytest.raises(ConfigError, match="is not a size"):
            read_size(wrong)
    with pytest.raises(ConfigError, match="at most"):
        read_size("100000x100000")
