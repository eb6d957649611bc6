"""The task of boards: its score, its data and what it refuses."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import SKA, Softmax
from regard.core import ConfigError, DataError
from regard.lab.data.boards import NOTHING, boards
from regard.lab.results.results import Results
from regard.lab.tasks.cells import Cells
from regard.lab.train.execute import execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run

HOST = "vit_desk(patch=14, dim=16, depth=1, heads=2)"
RECIPE = Recipe(epochs=1, batch=32, augment="none", smoothing=0.0)


def small(data: str = "digit_boards(ability=content)", **fields: int) -> Cells:
    return Cells(host=HOST, data=data, **{"limit": 64, **fields})  # type: ignore[arg-type]


class Oracle(nn.Module):
    """Scores that are right for the first `right` boards of the test, and wrong for the others."""

    def __init__(self, task: Cells, right: int) -> None:
        super().__init__()
        answers = boards(task.boards, "test", 0, 0, task.sample_counts()[1]).answers.astype(np.int64)
        answers[answers == NOTHING] = 0
        answers[right:] = (answers[right:] + 1) % task.boards.classes
        self.scores = torch.nn.functional.one_hot(torch.from_numpy(answers), task.boards.classes).movedim(-1, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.scores.float()


@pytest.mark.parametrize("ability", ["content", "compare", "hops"])
def test_the_score_is_the_share_of_asking_cells_that_are_right(ability: str) -> None:
    task = small(f"digit_boards(ability={ability})")
    score = task.score(Oracle(task, 16), torch.device("cpu"))
    assert score.metrics == {"cells": 25.0}
    assert score.samples.tolist() == [100.0] * 16 + [0.0] * 48
    assert task.score(Oracle(task, 64), torch.device("cpu")).metrics == {"cells": 100.0}


def test_cells_that_do_not_ask_change_nothing() -> None:
    """Neither the loss nor its gradient sees the scores of other cells."""
    task = small()
    batch = next(task.batches(RECIPE, 0, 0, 1))
    scores = torch.randn(32, 10, 6, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)

    class Given(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return scores

    loss = task.loss(Given(), batch, RECIPE, torch.device("cpu"))
    (gradient,) = torch.autograd.grad(loss, scores)
    asks = torch.from_numpy(batch.answers != NOTHING)
    assert (gradient.abs().sum(1) > 0).equal(asks)
    logits, wanted = scores.movedim(1, -1)[asks], torch.from_numpy(batch.answers)[asks].long()
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, wanted))


def test_batches_are_new_boards_in_every_epoch_and_parts_join_to_them() -> None:
    task = small()
    per_epoch = task.batches_per_epoch(RECIPE)
    assert per_epoch == 2
    first, later = (next(task.batches(RECIPE, 5, step, step + 1)) for step in (0, per_epoch))
    assert (first.images != later.images).any((1, 2, 3)).all()
    halves = [next(task.batches(RECIPE, 5, 0, 1, part=(index, 2))).images for index in range(2)]
    assert (np.concatenate(halves) == first.images).all()
    assert (first.images == boards(task.boards, "train", 5, 0, 32).images).all()


def test_a_model_gives_scores_of_cells_in_their_places() -> None:
    """Without attention a cell sees itself only: what changes in one cell changes its own scores."""
    task = small("digit_boards(ability=place, side=7)")
    model = task.model(None, 0, removed=True)
    image = task.example()[0]
    changed = image.clone()
    changed[..., 14:28, 42:56] += 1.0  # row 1, column 3
    with torch.no_grad():
        different = (model(image) != model(changed)).any(1)[0]
    assert different.shape == (7, 7)
    assert torch.equal(different.nonzero(), torch.tensor([[1, 3]]))


def test_a_run_trains_and_is_kept(tmp_path) -> None:
    run = Run(task=small(), mixer=SKA(), recipe=RECIPE)
    outcome = execute(run, Results(tmp_path), device="cpu")
    assert outcome["status"] == "done"
    assert 0 <= outcome["metrics"]["cells"] <= 100
    assert Run(task=small(download=True), mixer=SKA(), recipe=RECIPE).key == run.key
    assert Run(task=small("digit_boards(ability=place)"), mixer=SKA(), recipe=RECIPE).key != run.key


def test_a_model_is_scored_on_other_boards_of_its_size() -> None:
    task = small()
    model = task.model(Softmax(), 0)
    score = task.score_on("digit_boards(ability=content, pairs=5)", model, torch.device("cpu"), {})
    assert len(score.samples) == 64
    with pytest.raises(DataError, match="2 classes and 6 cells a side"):
        task.score_on("digit_boards(ability=compare)", model, torch.device("cpu"), {})


def test_boards_that_move_are_clips_whose_frames_lie_below_one_another() -> None:
    """Scores of a cell come from the tokens of its own place: without attention, another cell changes nothing there."""
    data = "digit_boards(ability=motion)"
    task = Cells(data=data, **Cells.defaults(data)["task"])
    model = task.model(None, 0, removed=True).eval()
    torch.nn.init.normal_(model.head.scores.weight)  # which begins at zero
    (clip,) = task.example()
    assert clip.shape == (1, 1, 3, 84, 84)
    changed = clip.clone()
    changed[:, :, 2, 14:28, 70:84] += 1
    different = (model(clip) - model(changed)).abs().amax(1)[0]
    assert different.shape == (18, 6)
    assert different.nonzero().tolist() == [[2 * 6 + 1, 5]]


def test_a_host_with_other_patches_is_refused() -> None:
    task = Cells(host="vit_desk(patch=7, dim=16, depth=1, heads=2)", data="digit_boards(ability=content)")
    with pytest.raises(ConfigError, match=r"12x12 tokens for a board of 6x6 cells; use a host with patches of 14"):
        task.model(Softmax(), 0)


def test_boards_without_their_images_name_those_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)  # in a process that may have read them before
    with pytest.raises(DataError, match=r"no data folder.*digit_boards\(\.\.\.\) needs no data folder"):
        small("boards(ability=content)").record()
