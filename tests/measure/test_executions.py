"""Calibration: every execution that can run here is measured, and "auto" follows what is kept."""

import json

import pytest
import torch
from typer.testing import CliRunner

from regard.cli.app import app
from regard.measure.executions import time_executions
from regard.mixers.mita.mita import mita
from regard.mixers.shared.calibration import Measured, calibration_file, write_calibration
from regard.mixers.shared.native import LIBRARY

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("own_calibrations")


@pytest.mark.slow
def test_every_execution_that_can_run_is_measured() -> None:
    rows = time_executions(CPU, dtypes=["fp32"], seconds=1e-3, small=True)
    native = {"native"} if LIBRARY is not None else set()
    wanted = {
        "MiTA": {"dense", "gather", "grouped"} | native, "TopK": {"dense", "gather"} | native,
        "MoBA, NSA": {"dense", "gather", "grouped"}, "BRA": {"regions"},
    }  # fmt: skip
    for trains in (False, True):
        assert {row.mechanism: set(row.seconds) for row in rows if row.trains == trains} == wanted
    assert all(seconds > 0 for row in rows for seconds in row.seconds.values())


def test_auto_follows_what_is_kept() -> None:
    """Counted in PyTorch's operators: "gather" copies the keys of each query."""
    q = torch.randn(1, 2, 200, 8)

    def copies() -> bool:
        with torch.profiler.profile(record_shapes=True) as profile:
            mita(q, q, q, q[:, :, :4], 5)
        return any(event.input_shapes[:1] == [[1, 200 * 2 * 5, 8]] or event.input_shapes[:1] == [[400, 5, 8]]
                   for event in profile.events())  # fmt: skip

    assert not copies()
    row = Measured(mechanism="MiTA", dtype="float32", trains=False, sizes=(196, 4, 5), seconds={"gather": 1e-9})
    write_calibration(CPU, [row])
    assert copies()
    content = json.loads(calibration_file(CPU).read_text())
    assert content["rows"][0]["sizes"] == [196, 4, 5]


@pytest.mark.parametrize("options", [["SKA"], ["--grid", "14x14"], ["--model", "vit_desk"]])
def test_calibrate_takes_no_mechanisms(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--calibrate", *options])
    assert result.exit_code != 0
    assert not calibration_file(CPU).exists()
