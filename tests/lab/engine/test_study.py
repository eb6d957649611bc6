"""Studies as data, and a whole small study carried out for real."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.core import ConfigError, StoreError
from regard.files.atomic import write_atomically
from regard.lab.engine.dry_run import compare, dry_run
from regard.lab.engine.progress import Event
from regard.lab.engine.run_study import run_study
from regard.lab.engine.snapshot import write_snapshot
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.engine.table import Table, load_snapshot, snapshot_path
from regard.lab.results.results import Results
from regard.lab.studies import load_study
from regard.lab.tasks import Classification
from regard.lab.train.recipe import Recipe
from regard.mixers.softmax import Softmax
from tiny_task import Tiny

TASK = Classification(
    host="vit_desk(size=12, patch=4, dim=16, depth=1, heads=2)", data="digits-canvas", size=(12, 12), limit=64
)
ROWS = (Row("softmax", Softmax()), Row("w/o", None, control=True, removed=True))
STUDY = Study(
    name="tiny", title="Tiny", source="tests", question="?", baseline="softmax",
    settings={"smoke": Setting(task=TASK, recipe=Recipe(epochs=1, batch=32, augment="none"), rows=ROWS, seeds=2)},
)  # fmt: skip


def test_runs_go_seed_by_seed_over_all_rows() -> None:
    assert [(row.label, run.seed) for row, run in STUDY.runs("smoke")] == [
        ("softmax", 0), ("w/o", 0), ("softmax", 1), ("w/o", 1)]  # fmt: skip
    assert [run.seed for _, run in STUDY.runs("smoke", "softmax", 3)] == [0, 1, 2]
    assert len({run.key for _, run in STUDY.runs("smoke")}) == 4


@pytest.mark.untyped
def test_wrong_use_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean softmax"):
        STUDY.rows("smoke", "sofmax")
    with pytest.raises(ConfigError, match="did you mean smoke"):
        STUDY.setting("smok")
    with pytest.raises(ConfigError, match="1 to 10000, not 0"):
        STUDY.runs("smoke", seeds=0)
    with pytest.raises(ConfigError, match="no row 'SKA'"):
        replace(STUDY, claims=(Claim("SKA", "softmax", "top1"),))
    with pytest.raises(ConfigError, match="used twice: softmax"):
        Setting(task=TASK, recipe=None, rows=(ROWS[0], ROWS[0]))
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        load_study("quikstart")
    with pytest.raises(ConfigError, match="within"):
        Claim("a", "b", "top1", within=-1.0)


def test_a_size_that_host_or_teacher_cannot_have_is_refused_before_any_run(tmp_path: Path) -> None:
    store = Results(tmp_path / "results")
    for name, side, message in (
        ("quickstart", 9, "an image of 9x9 cannot be cut into patches"),
        ("sne_table3", 16, "dim=48, .*takes images of 8x8, the task has 16x16"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_study(load_study(name).elsewhere("smoke", size=(side, side)), "smoke", store, workers=0)
        assert not store.root.exists()


@pytest.mark.parametrize("name", ["ska_table5", "ska_table2"])
def test_one_host_for_rows_that_compare_hosts_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rows of {name} compare hosts"):
        load_study(name).elsewhere("smoke", host="vit_desk")


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("esa_table2", "1111 + deformable"), ("esa_insertion", "1111 parallel"), ("mita_table3", "DeiT")],
)
def test_rows_with_a_host_of_their_own_are_left_out_in_one_host(
    name: str, left_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their labels would be false: a deformable convolution is an option of the host."""
    study = load_study(name).elsewhere("smoke", host="vit_desk")
    labels = {row.label for row in study.setting("smoke").rows}
    assert left_out not in labels
    assert study.baseline in labels
    assert left_out in caplog.text
    sizes = load_study("mita_table2").elsewhere("paper", host="vit_tiny_patch16_224")
    assert not [row.label for row in sizes.setting("paper").rows if row.label.endswith(", S")]
    assert not [claim for claim in sizes.claims if claim.a.endswith(", S")]


def test_a_changed_field_must_not_make_rows_equal() -> None:
    rows = (ROWS[0], replace(ROWS[0], label="fewer", task={"limit": 32}))
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), rows=rows)})
    with pytest.raises(ConfigError, match="softmax = fewer"):
        study.elsewhere("smoke", fields={"limit": 32})
    assert len(study.elsewhere("smoke", fields={"limit": 16}).setting("smoke").rows) == 2


def test_labels_with_commas_and_globs() -> None:
    study = load_study("quickstart")
    with pytest.raises(ConfigError, match="known: Factors 0110; MiTA; SKA; softmax; softmax, P-SNE; "):
        study.rows("smoke", "%")
    assert [row.label for row in study.rows("smoke", "softmax, P-SNE")] == ["softmax, P-SNE"]
    assert [row.label for row in study.rows("smoke", "mita,SKA")] == ["SKA", "MiTA"]
    assert len(study.rows("smoke", "softmax*")) == 2


def test_another_host_brings_its_size() -> None:
    moved = STUDY.elsewhere("smoke", "cifar10", "vit_desk(size=24, patch=4)")
    task = moved.setting("smoke").task
    assert (task.data, task.size) == ("cifar10", (24, 24))
    for host, side in (("vit_tiny_patch16_224", 224), ("cait_s_32", 32), ("regard_vit5_small", 224)):
        assert STUDY.elsewhere("smoke", host=host).setting("smoke").task.size == (side, side)
    sized = STUDY.elsewhere("smoke", host="vit_desk", size=(16, 24)).setting("smoke").task
    assert (sized.host, sized.size) == ("vit_desk(img_size=(16, 24))", (16, 24))


def test_counts_are_compared() -> None:
    assert compare(5717416, 5717416, 5.7e6) == "equal"
    assert compare(5717417, 5717416, 5.7e6) == "differs by +1"
    assert compare(5717416, None, 5.7e6) == "near"
    assert compare(6000000, None, 5.7e6) == "differs by +5.3%"
    assert compare(None, 1, 1.0) == ""


def test_a_dry_run_builds_every_row() -> None:
    rows = (replace(ROWS[0], exact={"params": 1}), ROWS[1])
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), rows=rows)})
    found = dry_run(study, "smoke", classes=10)
    assert [line.error for line in found] == ["", ""]
    assert found[0].params_verdict.startswith("differs by +")
    assert (found[0].params or 0) - (found[1].params or 0) == 3 * 16 * 16 + 16 * 16 + 16  # q, k, v; output and its bias
    assert (found[0].macs or 0) > (found[1].macs or 0)


@pytest.mark.slow
def test_a_study_is_carried_out_once_and_again_only_when_asked(tmp_path: Path) -> None:
    store = Results(tmp_path)
    assert run_study(STUDY, "smoke", store, workers=0)["done"] == 4
    table = Table.load(tmp_path, "tiny", "smoke")
    assert [row.n for row in table.rows] == [2, 2]
    assert 0 <= (table.rows[0].mean or -1) <= 100
    assert table.gate.passed is None
    key = STUDY.runs("smoke")[0][1].key
    assert (store.folder(key) / "probes" / "maps.json").exists()
    before = store.outcome(key)
    run_study(STUDY, "smoke", store, workers=0)
    assert store.outcome(key) == before
    run_study(STUDY, "smoke", store, workers=0, fresh=True, rows="softmax", seeds=1)
    after = store.outcome(key)
    assert after["metrics"] == before["metrics"]
    assert after["seconds"] != before["seconds"]
    assert len(load_snapshot(tmp_path, "tiny", "smoke")["runs"]) == 4


def test_imported_items_are_added_to_those_of_the_study() -> None:
    """A port in the module of a study is found, and another size does not lose the study's own host."""
    own = replace(STUDY, settings={"smoke": replace(STUDY.settings["smoke"], task=replace(TASK, extra=(Tiny,)))})
    same, other = own.elsewhere("smoke", extra=(Setting,)), own.elsewhere("smoke", size=(8, 8), extra=(Setting, Tiny))
    assert same.setting("smoke").task.extra == other.setting("smoke").task.extra == (Tiny, Setting)
    assert [run.key for _, run in same.runs("smoke")] == [run.key for _, run in own.runs("smoke")]
    assert same.setting_name("smoke") == "smoke"


def test_a_claim_that_is_added_to_complete_results_is_marked(tmp_path: Path) -> None:
    store, settings = Results(tmp_path), {"desk": STUDY.settings["smoke"]}
    first = Claim("softmax", "w/o", "top1")
    later = (first, Claim("softmax", "w/o", "loss"))
    write_snapshot(replace(STUDY, settings=settings, claims=(first,)), "desk", store)
    late = replace(STUDY, settings=settings, claims=later)
    assert not any("late" in claim for claim in write_snapshot(late, "desk", store)["claims"])  # nothing was seen yet
    write_snapshot(replace(late, claims=(first,)), "desk", store)
    for _, run in late.runs("desk"):
        store.finish(run.key, {"status": "done", "metrics": {"top1": 50.0, "loss": 1.0}})
    for _ in range(2):
        assert ["late" in claim for claim in write_snapshot(late, "desk", store)["claims"]] == [False, True]
    texts = [claim.text for claim in Table.load(tmp_path, "tiny", "desk").claims]
    assert ["added after results were seen" in text for text in texts] == [False, True]


def test_failures_that_are_taken_from_the_store_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Results(tmp_path)
    for _, run in STUDY.runs("smoke"):
        store.finish(run.key, {"status": "failed", "error": "SwapError: no port", "metrics": {}})
    assert run_study(STUDY, "smoke", store, workers=0)["failed"] == 4
    assert "4 runs failed earlier and are not executed now" in caplog.text
    assert "--retry" in caplog.text


def test_options_that_no_run_can_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="32 cannot be divided into 5 equal parts; use 4 devices"):
        run_study(STUDY, "smoke", Results(tmp_path), workers=0, devices=5)
    assert not list(tmp_path.iterdir())


def tiny_study(*rows: Row, seeds: int = 1) -> Study:
    """A study of runs that take a moment; the first row is the baseline."""
    recipe = Recipe(epochs=1, batch=32, augment="none")
    setting = Setting(task=Tiny(limit=64), recipe=recipe, rows=rows, seeds=seeds)
    return replace(STUDY, baseline=rows[0].label, settings={"smoke": setting})


def test_a_run_that_is_no_row_is_repeated_by_the_same_options(tmp_path: Path) -> None:
    """The start of a row failed: so does the row, until --retry repeats both; --fresh begins both anew."""
    hidden = Row("hidden", None, removed=True, recipe={"lr": 1e-3})
    study, store = tiny_study(Row("tuned", None, removed=True, start=hidden)), Results(tmp_path)
    start = study.run("smoke", hidden, 0).key
    store.finish(start, {"status": "failed", "error": "out of memory", "metrics": {}})
    events: list[Event] = []
    assert run_study(study, "smoke", store, workers=0, watch=events.append)["failed"] == 1
    assert events[-1].text == f"NeededRunFailed: run {start}, which this run needs, failed: out of memory"
    events.clear()
    assert run_study(study, "smoke", store, workers=0, watch=events.append)["failed"] == 1
    assert not [event for event in events if event.kind == "start"]  # the row is not tried again
    assert run_study(study, "smoke", store, workers=0, retry=True)["done"] == 1
    assert store.status(start) == "done"
    (store.folder(start) / "mark").write_text("of the first time")
    assert run_study(study, "smoke", store, workers=0, retry=True)["done"] == 1
    assert (store.folder(start) / "mark").exists()
    assert run_study(study, "smoke", store, workers=0, fresh=True)["done"] == 1
    assert not (store.folder(start) / "mark").exists()


@pytest.mark.parametrize(("size", "state"), [((9, 9), "failed"), ((8, 8), "stopped")], ids=["run", "machine"])
def test_an_error_in_a_needed_run_names_that_run_unless_the_machine_is_the_cause(
    tmp_path: Path, size: tuple[int, int], state: str
) -> None:
    """A teacher whose configuration is refused, and one whose folder cannot be written."""
    vit = "vit_tiny_patch16_224(img_size=8, patch_size=4, depth=1, in_chans=1, num_classes=10)"
    teacher = Row("teacher", None, task={"host": vit, "size": size})
    study, store = tiny_study(Row("taught", None, removed=True, teacher=teacher)), Results(tmp_path)
    needed = study.run("smoke", teacher, 0).key
    if state == "stopped":
        (tmp_path / needed / "lock").mkdir(parents=True)  # a folder where a file should be
        os.utime(tmp_path / needed / "lock", (1.0, 1.0))
    events: list[Event] = []
    assert run_study(study, "smoke", store, workers=0, watch=events.append)[state] == 1
    text = f"NeededRunFailed: run {needed}, which this run needs, failed: " if state == "failed" else "StoreError: "
    assert events[-1].text.startswith(text)


def test_runs_that_others_need_begin_first(tmp_path: Path) -> None:
    """Workers would else wait for one another: all rows of a seed need the same start."""
    first = Row("a", None, removed=True, start=Row("start", None, removed=True), recipe={"lr": 1e-3})
    study, store = tiny_study(first, replace(first, label="b", recipe={"lr": 2e-3}), seeds=2), Results(tmp_path)
    events: list[Event] = []

    def done() -> list[tuple[str, int]]:
        events.clear()
        run_study(study, "smoke", store, workers=0, watch=events.append)
        return [(event.row, event.seed) for event in events if event.kind == "done"]

    assert done() == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    for _, run in study.runs("smoke", seeds=1):
        store.forget(run.key)
    assert done() == [("a", 0), ("b", 0)]


def listed_seeds(study: Study, root: Path, **options: Any) -> dict[str, list[int]]:
    """The seeds of each row in the snapshot that is written."""
    listed = write_snapshot(study, "smoke", Results(root), **options)["runs"]
    return {row.label: [run["seed"] for run in listed if run["row"] == row.label] for row in ROWS}


def test_seeds_beyond_the_studys_own_are_missing_only_in_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    assert listed_seeds(STUDY, tmp_path, seeds=4, rows="softmax") == {"softmax": [0, 1, 2, 3], "w/o": [0, 1]}
    assert listed_seeds(STUDY, tmp_path / "fewer", seeds=1, rows="softmax") == {"softmax": [0], "w/o": [0]}


def test_further_seeds_of_a_row_that_is_trained_otherwise_now_are_listed_no_more(tmp_path: Path) -> None:
    """A row of runs with two learning rates would have an interval of neither."""
    before = (replace(ROWS[0], recipe={"lr": 1e-3}), ROWS[1])
    study = replace(STUDY, settings={"smoke": replace(STUDY.setting("smoke"), rows=before)})
    assert listed_seeds(study, tmp_path, seeds=3) == {"softmax": [0, 1, 2], "w/o": [0, 1, 2]}
    assert listed_seeds(STUDY, tmp_path) == {"softmax": [0, 1], "w/o": [0, 1, 2]}


def test_a_foreign_snapshot_is_named(tmp_path: Path) -> None:
    write_atomically(snapshot_path(tmp_path, "tiny", "smoke"), "[1]")
    with pytest.raises(StoreError, match="tiny-smoke.json is no record"):
        write_snapshot(STUDY, "smoke", Results(tmp_path))


def test_a_dry_run_gives_a_host_the_images_of_its_row_and_names_a_row_that_fails() -> None:
    rows = (Row("large", Softmax(), task={"size": (16, 16)}), Row("bad", Softmax(), task={"size": (2, 2)}))
    task = Classification(host="vit_tiny_patch16_224(patch_size=4, depth=1)", data="digits", size=(12, 12))
    study = replace(STUDY, claims=(), baseline="large", settings={"smoke": Setting(task=task, recipe=None, rows=rows)})
    large, bad = dry_run(study, "smoke", classes=10)
    assert large.loss is not None
    assert not large.error
    assert bad.error
    assert bad.params is None
