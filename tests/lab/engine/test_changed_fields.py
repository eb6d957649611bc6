"""Studies with other fields of recipe and task: `Study.elsewhere`, and --set of the command."""

from dataclasses import replace
from pathlib import Path

import pytest

from command_line import answer
from regard.cli.app import run
from regard.core import ConfigError
from regard.lab.engine.study import Study
from regard.lab.results.results import Results
from regard.lab.studies import load_study

QUICK = load_study("quickstart")


def changed(study: Study = QUICK, scale: str = "smoke", **values: dict[str, object]) -> Study:
    return study.elsewhere(scale, **values)  # type: ignore[arg-type]


def test_all_rows_take_the_fields_and_results_have_their_own_name() -> None:
    study = changed(recipe={"epochs": 7, "lr": 1e-3}, fields={"limit": 40})
    assert study.setting_name("smoke") == "smoke+epochs_7+lr_0.001+limit_40"
    runs = [each for _, each in study.runs("smoke")]
    assert {(each.recipe.epochs, each.recipe.lr, each.task.limit) for each in runs} == {(7, 1e-3, 40)}  # type: ignore[attr-defined]
    assert study.setting("desk") == QUICK.setting("desk")


def test_one_change_has_one_name_and_two_have_two() -> None:
    first = changed(recipe={"lr": 0.1, "epochs": 7})
    second = changed(recipe={"epochs": 7, "lr": 0.1})
    assert first.setting_name("smoke") == second.setting_name("smoke") == "smoke+epochs_7+lr_0.1"
    names = {changed(recipe={"weight_decay": value}).setting_name("smoke") for value in (1, 1.0)}
    assert names == {"smoke+weight_decay_1.0"}
    assert changed(recipe={"lr": 0.1}).setting_name("smoke") != first.setting_name("smoke")


@pytest.mark.parametrize(
    "values", [{"recipe": {"betas": [0.9, 0.99]}}, {"recipe": {"epochs": 60}}, {"fields": {"download": True}}]
)
def test_what_changes_no_result_keeps_name_and_rates(values: dict[str, dict[str, object]]) -> None:
    recipe = QUICK.setting("desk").recipe
    assert (recipe.betas, recipe.epochs) == ((0.9, 0.99), 60)  # type: ignore[union-attr]
    same = changed(scale="desk", **values)
    assert same.setting_name("desk") == "desk"
    assert same.rows("desk") == QUICK.rows("desk")
    assert [each.key for _, each in same.runs("desk", seeds=1)] == [each.key for _, each in QUICK.runs("desk", seeds=1)]


def test_changes_are_not_chained() -> None:
    """The second call would not know what the first one changed, and use its name for other results."""
    with pytest.raises(ConfigError, match="quickstart is changed at smoke scale already: give all changes in one call"):
        changed(changed(recipe={"lr": 0.1}), recipe={"epochs": 7})


def test_long_changes_are_names_of_files(tmp_path: Path) -> None:
    values = {"lr": 0.123456789, "weight_decay": 0.123456789, "betas": (0.912345678, 0.99912345), "warmup": 0.123456789,
              "smoothing": 0.123456789, "clip": 1.23456789, "epochs": 7}  # fmt: skip
    names = [changed(recipe={**values, "batch": batch}).setting_name("smoke") for batch in (8, 16)]
    assert names[0] != names[1]
    assert all(len(name) < 140 for name in names)


def test_no_more_epochs_are_trained_or_averaged_than_there_are() -> None:
    for name, epochs, field in (("ska_table5", 1, "trained_epochs"), ("esa_fig3_translation", 3, "average")):
        recipe = changed(load_study(name), "paper", recipe={"epochs": epochs}).setting("paper").recipe
        assert (getattr(recipe, "epochs", 0), getattr(recipe, field)) == (epochs, epochs)


def test_tuned_rates_are_left_out() -> None:
    assert any(row.rate for row in QUICK.rows("desk"))
    assert not any(row.rate for row in changed(scale="desk", recipe={"epochs": 1}).rows("desk"))


def test_rows_keep_their_own_fields() -> None:
    study = load_study("ska_table1")
    own = {row.label: row.recipe["epochs"] for row in study.rows("desk") if "epochs" in row.recipe}
    assert own
    runs = {row.label: each.recipe.epochs for row, each in changed(study, "desk", recipe={"epochs": 5}).runs("desk")}
    assert {label: runs[label] for label in own} == own
    assert {epochs for label, epochs in runs.items() if label not in own} == {5}


@pytest.mark.parametrize(
    "values",
    [{"recipe": {"epoch": 1}}, {"recipe": {"revision": 1}}, {"fields": {"data": "digits"}}, {"fields": {"beams": 1}}],
)
def test_unknown_fields_are_named(values: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match="has no field '.*' to set"):
        changed(**values)


def test_a_setting_without_training_has_no_recipe() -> None:
    untrained = replace(QUICK, settings={"paper": replace(QUICK.setting("desk"), recipe=None)})
    with pytest.raises(ConfigError, match="quickstart trains nothing at paper scale"):
        changed(untrained, "paper", recipe={"epochs": 1})


def test_the_command_takes_and_repeats_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "results")
    fields = ["--set", "recipe.epochs=1", "--set", "task.limit=32"]
    arguments = ["study", "run", "quickstart", "--rows", "SKA", "--seeds", "1", "--results", root, *fields]
    (line,) = answer(capsys, *arguments, "--on", "print")
    assert " --set recipe.epochs=1 --set task.limit=32 " in line["command"]
    assert run([*arguments, "--workers", "0", "--json"]) == 0
    assert Results(root).status(line["key"]) == "done"
    assert run(["study", "power", "quickstart", "--scale", "smoke", "--results", root]) == 2
    assert "quickstart has no pilot at smoke+epochs_1+limit_32 scale" in capsys.readouterr().err


def test_rows_that_keep_their_own_value_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "show", "ska_table1", "--scale", "desk", "--no-estimate", "--set", "recipe.epochs=5"]) == 0
    kept = [row.label for row in load_study("ska_table1").rows("desk") if "epochs" in row.recipe]
    assert capsys.readouterr().err.splitlines() == [f"{label} keeps its own epochs" for label in kept]
    assert run(["study", "run", "ska_table1", "--scale", "desk+epochs_5"]) == 2
    assert "changes are options: --scale desk with --data, --host, --size or --set" in capsys.readouterr().err
