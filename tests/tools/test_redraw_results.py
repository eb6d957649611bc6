"""`tools/redraw_results.py` draws the folders that are named, and refuses others."""

import sys

import pytest

from tools import redraw_results


def test_a_named_folder_is_drawn_as_it_is_committed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "probes_hops-desk"
    folder.mkdir()
    committed = redraw_results.RESULTS / folder.name
    (folder / "evidence.json").write_bytes((committed / "evidence.json").read_bytes())
    monkeypatch.setattr(redraw_results, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["redraw_results.py", folder.name])
    redraw_results.main()
    assert capsys.readouterr().out == f"{folder.name}\n"
    assert (folder / "table.csv").read_text() == (committed / "table.csv").read_text()


def test_a_folder_without_evidence_is_refused_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["redraw_results.py", "quickstart-desk", "docs/results/quickstart-desk"])
    monkeypatch.setattr(redraw_results, "files", lambda file: pytest.fail("drawn"))
    with pytest.raises(SystemExit, match=r"no evidence\.json below docs/results in docs/results/quickstart-desk;"):
        redraw_results.main()
