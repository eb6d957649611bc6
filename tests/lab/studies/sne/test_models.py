"""Networks and recipes of the SNE paper: batches, learning rates, starts, and the sign under distillation."""

import pytest

from regard.lab.studies import load_study
from regard.lab.train.run import Run


@pytest.mark.parametrize("name", ["sne_table2", "sne_table4", "sne_fig6"])
def test_fact_section5_batches_and_rates(name: str) -> None:
    """4,096 images for N12, 2,816 for T12; 5e-4 (transfer: 5e-5) at batch 512."""
    base = 5e-5 if name == "sne_table4" else 5e-4
    sizes = set()
    for row, run in load_study(name).runs("paper", seeds=1):
        batch = 2816 if "tiny" in run.task.host else 4096  # type: ignore[attr-defined]
        recipes = [(run.recipe, base)]
        if isinstance(run.start, Run):
            recipes.append((run.start.recipe, 5e-4))
        for recipe, rate in recipes:
            assert recipe.batch * recipe.accumulate == batch, row.label
            assert recipe.lr == pytest.approx(rate * batch / 512), row.label
            assert recipe.warmup * recipe.epochs == pytest.approx(5)
            assert recipe.lr * recipe.floor == pytest.approx(1e-5)
        sizes.add(batch)
    assert sizes == {2816, 4096}


def test_fact_section5_transfer_has_1000_epochs() -> None:
    recipe = load_study("sne_table4").setting("paper").recipe
    assert recipe.epochs == 1000
    assert recipe.lr_at(4, 1000) == pytest.approx(4e-4)
    assert recipe.lr_at(3, 1000) < 4e-4
    assert recipe.lr_at(999, 1000) == pytest.approx(1e-5, rel=0.01)


def test_transfer_starts_from_the_runs_of_table_2() -> None:
    """The same network on ImageNet is the same run: nothing is trained twice."""
    table2 = {run.key for _, run in load_study("sne_table2").runs("paper", seeds=1)}
    runs = [run for _, run in load_study("sne_table4").runs("paper", seeds=1) if run.mixer is not None]
    starts = {run.start.key for run in runs if isinstance(run.start, Run)}
    assert len(starts) == 18
    assert starts <= table2


def test_fact_figure6_has_the_numbers_of_table_2() -> None:
    printed = {row.label: row.paper["top1"] for row in load_study("sne_fig6").rows("paper") if not row.control}
    assert list(printed.values()) == [69.9, 70.6, 70.2, 70.3, 70.2, 76.8, 77.2, 77.1, 77.1]
