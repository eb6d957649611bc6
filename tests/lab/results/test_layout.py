"""Changed settings have results of their own, which every reader finds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regard.cli.app import run as command
from regard.core import ConfigError
from regard.files.records import write_record
from regard.lab.engine.export import evidence, import_runs
from regard.lab.engine.snapshot import write_snapshot
from regard.lab.engine.study import Study
from regard.lab.engine.table import Table, load_snapshot, snapshot_path, snapshots
from regard.lab.report import write_report
from regard.lab.results.layout import find_setting_name, setting_names
from regard.lab.results.results import Results

from lab.engine.test_study import STUDY  # isort: skip

HOST = "vit_desk(size=16, patch=4, dim=16, depth=1, heads=2)"


def changed() -> Study:
    return STUDY.elsewhere("smoke", "digits-canvas", HOST)


def test_a_change_has_its_own_snapshot(tmp_path: Path) -> None:
    store = Results(tmp_path)
    write_snapshot(STUDY, "smoke", store)
    before = (tmp_path / "studies" / "tiny-smoke.json").read_text()
    write_snapshot(changed(), "smoke", store)
    assert (tmp_path / "studies" / "tiny-smoke.json").read_text() == before
    assert len(setting_names(tmp_path, "tiny")) == 2
    place = changed().setting_name("smoke")
    assert place.startswith("smoke+vit_desk")
    assert place.endswith("+16x16")
    assert load_snapshot(tmp_path, "tiny", place)["scale"] == "smoke"
    assert snapshots(tmp_path) == [("tiny", place), ("tiny", "smoke")]
    assert "changed: vit_desk" in Table.load(tmp_path, "tiny", place).caption


def test_names_are_readable_stable_and_different() -> None:
    assert STUDY.elsewhere("smoke", "cifar10").setting_name("smoke") == "smoke+cifar10"
    assert STUDY.elsewhere("smoke", "cifar10", size=(24, 12)).setting_name("smoke") == "smoke+cifar10+24x12"
    hosts = [HOST, HOST.replace("dim=16", "dim=32"), HOST.replace("heads=2", "heads=1")]
    found = [STUDY.elsewhere("smoke", host=host).setting_name("smoke") for host in hosts]
    assert len(set(found)) == 3
    assert "-" not in "".join(found)


def test_without_a_scale_the_largest_one_is_found(tmp_path: Path) -> None:
    assert find_setting_name(tmp_path, "tiny", None) == "desk"  # the message about missing results then names it
    store = Results(tmp_path)
    write_snapshot(STUDY, "smoke", store)
    assert find_setting_name(tmp_path, "tiny", None) == "smoke"
    write_snapshot(replace(STUDY, settings={"paper": STUDY.setting("smoke")}), "paper", store)
    assert find_setting_name(tmp_path, "tiny", None) == "paper"


def test_what_changes_nothing_keeps_the_plain_name() -> None:
    assert STUDY.elsewhere("smoke", "digits-canvas", size=(12, 12)).setting_name("smoke") == "smoke"


def test_own_folders_of_one_name_do_not_meet(tmp_path: Path) -> None:
    from PIL import Image

    found = []
    for side in (16, 20):
        for name in ("one", "two"):
            (tmp_path / str(side) / "pets" / name).mkdir(parents=True)
            Image.new("RGB", (side, side)).save(tmp_path / str(side) / "pets" / name / "a.png")
        found.append(STUDY.elsewhere("smoke", str(tmp_path / str(side) / "pets")).setting_name("smoke"))
    assert found[0] != found[1]
    assert all(place.startswith("smoke+pets_") and str(tmp_path) not in place for place in found)


def test_a_scale_means_its_only_results_or_all_are_named(tmp_path: Path) -> None:
    store = Results(tmp_path)
    assert find_setting_name(tmp_path, "tiny", "smoke") == "smoke"
    write_snapshot(changed(), "smoke", store)
    first = changed().setting_name("smoke")
    assert find_setting_name(tmp_path, "tiny", "smoke") == first
    write_snapshot(STUDY.elsewhere("smoke", host=HOST.replace("dim=16", "dim=32")), "smoke", store)
    with pytest.raises(ConfigError, match="several results") as error:
        find_setting_name(tmp_path, "tiny", "smoke")
    assert all(place in str(error.value) for place in setting_names(tmp_path, "tiny"))
    write_snapshot(STUDY, "smoke", store)
    assert find_setting_name(tmp_path, "tiny", "smoke") == "smoke"
    assert find_setting_name(tmp_path, "tiny", first) == first


def test_verbs_find_changed_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = write_snapshot(changed(), "smoke", Results(tmp_path))
    place = changed().setting_name("smoke")
    for number, run in enumerate(value["runs"]):
        outcome = {"status": "done", "metrics": {"top1": 50.0 + number}, "row": run["row"], "seed": run["seed"]}
        Results(tmp_path).finish(run["key"], outcome)
    folder = ["--results", str(tmp_path)]
    assert command(["study", "status", "tiny", "--scale", "smoke", "--json", *folder]) == 0
    assert [line["scale"] for line in json.loads(capsys.readouterr().out)] == [place]
    assert command(["study", "export", "tiny", "--scale", "smoke", *folder]) == 0
    assert capsys.readouterr().out.count("softmax") == 2
    assert command(["study", "show", "tiny", "--scale", place, "--json", *folder]) == 0
    assert [line["done"] for line in json.loads(capsys.readouterr().out)] == [2, 2]
    (page,) = write_report(tmp_path, tmp_path / "pages")
    assert page.name == f"tiny-{place}.html"
    assert "Smoke scale, changed: vit_desk" in page.read_text()
    assert "(smoke scale)" in page.read_text()
    other = Results(tmp_path / "other")
    write_record(tmp_path / "evidence.json", evidence(tmp_path, "tiny", place))
    assert import_runs(tmp_path / "evidence.json", other)["snapshots"] == 1
    assert snapshot_path(other.root, "tiny", place).exists()


def test_seeds_of_a_change_stay_apart() -> None:
    keys = {run.key for _, run in STUDY.runs("smoke")}
    assert not keys & {run.key for _, run in changed().runs("smoke")}
