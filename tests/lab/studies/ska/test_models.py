"""Rows of the static-key paper at paper scale: the models that they build are those of its tables."""

import pytest

from regard.lab.engine.study import Row
from regard.lab.studies import load_study
from regard.lab.studies.ska.models import START_NOTE, printed_row


def row_of(study: str, label: str) -> Row:
    return next(row for row in load_study(study).rows("paper") if row.label == label)


def test_rows_of_table_1_and_table_8() -> None:
    first, eighth = (load_study(name).rows("paper") for name in ("ska_table1", "ska_table8"))
    assert len(first) == 2 * 16 + 2
    assert len(eighth) == 2 * 12
    assert sum(row.task.get("data") == "CIFAR100" for row in first) == 16
    assert sum(row.task.get("data") == "SVHN" for row in eighth) == 12
    assert all(row.exact for row in (*first, *eighth) if not row.control)
    runs = {row.label: run for row, run in load_study("ska_table8").runs("paper", seeds=1)}
    assert runs["SVHN CSKA"].recipe.augment == "randaugment+pad"  # digits are not mirrored
    assert runs["CSKA"].recipe.augment == "randaugment+crop"


def test_table_8_has_the_larger_models() -> None:
    """Model b of Table 1, as large as the base."""
    for host, params in (("CvT", 19_694_000), ("ViT", 9_478_896), ("CaiT", 12_788_810), ("Swin", 26_778_870)):
        label = "SKA" if host == "ViT" else f"{host} SKA"
        assert row_of("ska_table8", label).exact == row_of("ska_table8", f"SVHN {label}").exact == {"params": params}


def test_a_printed_row_is_found_by_host_and_kind() -> None:
    assert [printed_row("CvT", kind).label for kind in ("", "SKA a", "SKA b", "CSKA")] == [
        "CvT-13", "SKA-CvT-13 a", "SKA-CvT-13 b", "CSKA-CvT-13",
    ]  # fmt: skip


def test_printed_flops_are_compared_as_macs() -> None:
    """1.29 GFLOPs are 0.645 GMAC."""
    assert row_of("ska_table1", "Softmax").paper["macs"] == pytest.approx(0.645e9)
    assert row_of("ska_table2", "CAFormer-S18").paper["macs"] == pytest.approx(4.1e9)


def test_runs_of_160_epochs_have_the_schedule_of_310() -> None:
    for name in ("ska_table5", "ska_fig3"):
        recipe = load_study(name).runs("paper", seeds=1)[0][1].recipe
        assert (recipe.epochs, recipe.trained_epochs, recipe.erasing) == (310, 160, 0.25)
        assert recipe.lr_at(0, 310) == pytest.approx(8e-3 / 20)
        assert recipe.lr_at(300, 310) == recipe.lr_at(309, 310) == pytest.approx(1e-5)
    hosts = [
        load_study("ska_table2").setting("paper").task_of(row).host for row in load_study("ska_table2").rows("paper")
    ]
    assert all("drop_path_rate=0.6, drop_rate=0.5" in host for host in hosts if "b36" in host)
    assert all("drop_path_rate=0.15" in host for host in hosts if "s18" in host)


def test_static_keys_start_as_in_the_paper_in_all_its_tables() -> None:
    """Algorithm 1 draws keys with torch.randn; the small scales start near zero, and every study says so."""
    for name in ("ska_table1", "ska_table2", "ska_table4", "ska_table5", "ska_table8", "ska_fig3"):
        study = load_study(name)
        assert START_NOTE in study.notes
        for row in study.rows("paper"):
            if getattr(row.mixer, "init", "paper") != "paper" or "ska'" in row.host.lower():
                pytest.fail(f"{name}, {row.label}: {row.mixer}, {row.host}")
    assert "SKA(init='paper')" in row_of("ska_table2", "SKAFormer-B36").host
