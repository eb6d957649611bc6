"""A saved folder stands for a model wherever a command takes one."""

from pathlib import Path

import pytest

from regard import create_model, save
from regard.cli.app import run
from regard.files.records import read_record, write_record

VERBS = [
    ["advise", "FOLDER", "--mixers", "SKA()", "--seconds", "0.01"],
    ["bench", "SKA()", "--model", "FOLDER", "--seconds", "0.01"],
    ["cost", "SKA()", "--host", "FOLDER"],
    ["swap-check", "FOLDER", "SKA()"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_command_takes_a_saved_folder(verb: list[str], tmp_path: Path) -> None:
    folder = save(create_model("vit_desk(size=16, patch=4, dim=32, depth=1, heads=2)", None), tmp_path / "saved")
    command = [str(folder) if word == "FOLDER" else word for word in verb]
    assert run(command) == 0
    path = folder / "model.json"
    write_record(path, {**read_record(path), "host": "hf-hub:nobody/nothing"})
    assert run(command) == 1
