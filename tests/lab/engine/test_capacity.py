"""Hours, memory and storage of a setting, against numbers by hand."""

from dataclasses import replace

import pytest

from lab.engine.clusters import EPOCHS, STUDY
from regard.core import ConfigError
from regard.lab.engine.capacity import CHECKPOINTS, GPU, capacities, find_gpu, summary
from regard.lab.engine.dry_run import DryRow, dry_run

ROW = DryRow("softmax", 1000, None, None, "", 5_000_000, None, None, "", 2.3, saved_bytes=4000)
SMALL = GPU(half=8e9, single=1e9, gigabytes=1)


def test_a_row_by_hand() -> None:
    """898 training images in 28 batches of 32, 1798 test images, three seeds; one step is three passes forward."""
    (found,) = capacities(STUDY, "smoke", [ROW], SMALL, utilisation=0.5)
    operations = 2 * 5_000_000 * (3 * EPOCHS * 28 * 32 + 11 * 1798)
    assert found.hours == pytest.approx(3 * operations / 0.5e9 / 3600, rel=1e-12)
    assert found.memory == 16 * 1000 + 4000 * 32
    assert found.training == CHECKPOINTS * 12 * 1000
    assert found.finished == 3 * 4 * 1000
    text = summary([found], "small", SMALL, 0.5)
    assert text.startswith("on small (0.001 TFLOP/s in 32 bits, 1 GB), assumed utilisation 50 %: ")
    assert f"{found.hours:,.1f} GPU-hours for 3 runs" in text


def test_half_precision_and_several_devices_divide_what_is_kept_and_half_precision_the_hours() -> None:
    setting = STUDY.setting("smoke")
    assert setting.recipe is not None
    half = replace(STUDY, settings={"smoke": replace(setting, recipe=replace(setting.recipe, precision="bf16-mixed"))})
    (found,) = capacities(half, "smoke", [ROW], SMALL, devices=2)
    assert found.memory == 16 * 1000 + 4000 * 32 // 4
    (single,) = capacities(STUDY, "smoke", [ROW], SMALL)
    assert single.hours == pytest.approx(8 * (found.hours or 0))
    text = summary([found, single], "small", SMALL, 0.3)
    assert text.startswith("on small (0.008 TFLOP/s in 16 bits, 0.001 TFLOP/s in 32 bits, 1 GB)")


@pytest.mark.parametrize("average", [{"ema": 0.99}, {"average": 2}], ids=["ema", "mean of epochs"])
def test_an_average_of_the_weights_is_stored_too(average: dict) -> None:
    setting = STUDY.setting("smoke")
    assert setting.recipe is not None
    study = replace(STUDY, settings={"smoke": replace(setting, recipe=replace(setting.recipe, **average))})
    (found,) = capacities(study, "smoke", [ROW], SMALL)
    assert found.training == CHECKPOINTS * (4 + 4 + 8) * 1000
    assert found.finished == 3 * (4 + 4) * 1000
    assert found.memory == (16 + 4) * 1000 + 4000 * 32


def test_a_dry_run_counts_what_the_forward_pass_keeps() -> None:
    """At least the inputs of the linear layers: 9 tokens of width 16, in the MLP 64; the weights do not count."""
    row, removed = dry_run(STUDY, "smoke")
    assert row.saved_bytes is not None
    assert removed.saved_bytes is not None
    assert row.saved_bytes > removed.saved_bytes > 4 * 9 * (16 + 64)
    assert row.saved_bytes < 4 * 9 * 16 * 100


@pytest.mark.untyped
def test_unknown_gpus_and_shares_are_refused() -> None:
    assert find_gpu("h100") == find_gpu("H100")
    with pytest.raises(ConfigError, match="no GPU 'A10O' .* did you mean A100"):
        find_gpu("A10O")
    for share in (0.0, 30.0):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            capacities(STUDY, "smoke", [ROW], SMALL, utilisation=share)
