import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from regard.core import ConfigError
from regard.images.normalise import Renormalised, Statistics, normalise
from regard.lab.results.results import Results
from regard.lab.train import execute as executing
from regard.lab.train.execute import execute
from regard.lab.train.load import load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers.spelling import parse, spell
from tiny_task import Tiny

SHORT = Recipe(epochs=2, batch=32, augment="none")


class Always(nn.Module):
    """Says one class, whatever it sees."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.one_hot(torch.full((len(x),), self.answer), 10).float()


def test_the_loss_is_the_mean_of_labels_and_teacher() -> None:
    task = Tiny()
    model = task.model(None, 0).eval()
    batch = next(iter(task.batches(SHORT, 0, 0, 1)))
    plain = task.loss(model, batch, SHORT, torch.device("cpu"))
    taught = task.loss(model, batch, SHORT, torch.device("cpu"), Always(3))
    scores = model(task.prepare(batch[0], torch.device("cpu")))
    chosen = torch.full((len(scores),), 3)
    assert torch.allclose(taught, (plain + F.cross_entropy(scores, chosen)) / 2)


def test_a_teacher_is_trained_first_and_changes_the_student(tmp_path: Path) -> None:
    teacher = Run(task=Tiny(), recipe=SHORT, seed=5)
    alone = Run(task=Tiny(), recipe=SHORT)
    taught = dataclasses.replace(alone, teacher=teacher)
    assert taught.key != alone.key
    store = Results(tmp_path)
    first, second = execute(alone, store, device="cpu"), execute(taught, store, device="cpu")
    assert store.status(teacher.key) == "done"
    assert first["metrics"] != second["metrics"]
    assert parse(spell(taught), extra=(Tiny, Recipe, Run)) == taught


def test_a_student_trains_with_dropout_as_it_would_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(Tiny, "loss", lambda *given, plain=Tiny.loss: modes.append(_modes(given[1])) or plain(*given))
    execute(
        Run(task=Tiny(), recipe=SHORT, teacher=Run(task=Tiny(), recipe=SHORT, seed=5)), Results(tmp_path), device="cpu"
    )
    assert len(modes) == 16  # two runs of two epochs
    assert set.union(*modes) == {True}


def _modes(model: nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


class seven(nn.Module):
    """A host of the user with seven classes, whatever is asked for."""

    def __init__(self, num_classes: int = 10, in_chans: int = 1, img_size: tuple[int, int] = (8, 8)) -> None:
        super().__init__()
        self.head = nn.Linear(64, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1))


@pytest.mark.parametrize(
    ("teacher", "extra", "message"),
    [
        ("seven", (seven,), "7 classes, the task has 10"),
        ("vit_tiny_patch16_224(img_size=8, patch_size=4, in_chans=1)", (), "random weights: write pretrained=True"),
    ],
)
def test_a_host_that_cannot_teach_is_refused(
    tmp_path: Path, teacher: str, extra: tuple[type, ...], message: str
) -> None:
    taught = Run(task=Tiny(extra=extra), recipe=SHORT, teacher=teacher)
    with pytest.raises(ConfigError, match=message):
        execute(taught, Results(tmp_path), device="cpu")


def test_a_teacher_of_the_same_number_of_other_classes_is_refused(tmp_path: Path) -> None:
    """Its answers would name the wrong classes."""
    runs = []
    for number, names in enumerate((("cat", "dog"), ("ant", "cat"))):
        for label, name in enumerate(names):
            (tmp_path / str(number) / name).mkdir(parents=True)
            for image in range(10):
                pixels = np.full((8, 8, 3), 100 * label + 5 * image + number, np.uint8)
                Image.fromarray(pixels).save(tmp_path / str(number) / name / f"{image}.png")
        task = Tiny(data=str(tmp_path / str(number)), colours=3)
        runs.append(Run(task=task, recipe=SHORT, teacher=runs[0] if runs else None))
    with pytest.raises(ConfigError, match=r"teacher's classes are \['cat', 'dog'\], the task's \['ant', 'cat'\]"):
        execute(runs[1], Results(tmp_path / "results"), device="cpu")


def test_a_run_waits_for_what_another_process_is_carrying_out(tmp_path: Path) -> None:
    store = Results(tmp_path)
    teacher = Run(task=Tiny(), recipe=SHORT, seed=5)
    taught = Run(task=Tiny(), recipe=SHORT, teacher=teacher)
    held, free = threading.Event(), threading.Event()

    def other() -> None:
        with Results(tmp_path).lock(teacher.key):
            held.set()
            free.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(30)
    threading.Timer(1.5, free.set).start()
    outcome = execute(taught, store, device="cpu")
    thread.join()
    assert outcome["status"] == "done"


def test_a_teacher_gets_images_with_its_own_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher was trained on images that are normalised in another way than the student's."""
    teacher = Run(task=Tiny(), recipe=SHORT, seed=5)
    store = Results(tmp_path)
    execute(teacher, store, device="cpu")
    own: Statistics = ([0.2], [0.5])
    run = Run(task=Tiny(), recipe=SHORT, teacher=teacher)
    monkeypatch.setattr(executing, "_statistics", lambda *given: own)
    student = run.task.model(None, 0)
    found = executing._teacher(run, store, student)
    pixels = torch.randint(0, 255, (4, 1, 8, 8), dtype=torch.uint8)
    images = run.task.prepare(pixels, torch.device("cpu"))
    plain = load_trained(teacher, store)
    assert torch.allclose(found(images), plain(normalise(pixels, own, torch.device("cpu"))), atol=1e-5)
    monkeypatch.undo()
    assert not isinstance(executing._teacher(run, store, student), Renormalised)
