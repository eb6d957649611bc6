"""Commands that run in this process: what they print, and how they are refused."""

import json
from typing import Any

import pytest

from regard.cli.app import run


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints with --json."""
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *messages: str, code: int = 2) -> str:
    """What a command says that fails as it should: nothing but a message with these texts."""
    capsys.readouterr()
    assert run(words) == code
    shown = capsys.readouterr().err
    assert shown.startswith("regard: "), shown
    assert "Traceback" not in shown
    for message in messages:
        assert message in shown
    return shown
