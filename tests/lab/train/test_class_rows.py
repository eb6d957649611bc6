"""Fine-tuning on data whose classes have another order: each output starts from that of its name, in every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli.finetune import finetuning_run
from regard.cli.run_options import RunOptions
from regard.lab.results.results import Results
from regard.lab.tasks.detection import Detection, Instances
from regard.lab.tasks.segmentation import Segmentation
from regard.lab.tasks.sequences import Sequences
from regard.lab.train.class_rows import class_rows
from regard.lab.train.execute import execute
from regard.lab.train.initial_weights import copy_weights
from regard.lab.train.load import load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers.softmax import Softmax

OLD, NEW, ORDER = ["sky", "road", "car"], ["car", "sky", "road"], [2, 0, 1]
HOST = "vit_desk(patch=14, dim=16, depth=1, heads=2)"
SIZE = (28, 28)


def task_of(name: str) -> Any:
    if name in ("boxes", "masks"):
        kind = Detection if name == "boxes" else Instances
        return kind(data="cued-digits", **{**kind.defaults("cued-digits")["task"], "host": HOST})
    if name == "texts":
        return Sequences(data="listops", **Sequences.defaults("listops")["task"])
    return Segmentation(host=HOST, data="cued-digits", size=SIZE, head=name)


@pytest.mark.parametrize("head", ["linear", "pixels", "cbt(heads=1)", "mask", "depict(heads=1)", "texts"])
def test_outputs_are_those_of_the_names(head: str) -> None:
    task = task_of(head)
    first, second = (task.trial(Softmax(), outputs=3) for _ in range(2))
    rows = class_rows(lambda number: task.trial(Softmax(), outputs=number).model)
    source, target = first.model.eval(), second.model.eval()
    with torch.no_grad():
        for value in source.parameters():
            value.add_(0.1 * torch.randn_like(value))
        copy_weights(source, target, (OLD, NEW), rows=rows)
        expected, out = (model(*first.inputs) for model in (source, target))
    torch.testing.assert_close(out, expected[:, ORDER], rtol=0, atol=1e-5)
    assert (expected - expected[:, ORDER]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_detectors_keep_the_background_first(kind: str) -> None:
    task = task_of(kind)
    source, target = (task.trial(Softmax(), outputs=3).model for _ in range(2))
    rows = class_rows(lambda number: task.trial(Softmax(), outputs=number).model)
    assert {(each.first, each.rows) for each in rows.values()} == {(1, 1), (4, 4)}
    copy_weights(source, target, (OLD, NEW), rows=rows)
    before, after = (dict(model.named_parameters()) for model in (source, target))
    place = [0, 3, 1, 2]
    for name, each in rows.items():
        old, new = (x[name].unflatten(each.axis, (4, each.rows)) for x in (before, after))
        assert torch.equal(new, old[place]), name


def test_a_run_that_starts_from_another_one_follows_its_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 3, (6, 7, 7)).repeat(4, 1).repeat(4, 2).astype(np.uint8)
    for names in (OLD, NEW):
        root = tmp_path / names[0]
        for number, mask in enumerate(masks):
            part = "train" if number < 4 else "test"
            for folder, pixels in (("images", mask * 80), ("masks", mask if names == OLD else (mask + 1) % 3)):
                file = root / folder / part / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
        (root / "classes.txt").write_text("\n".join(names))
    store = Results(tmp_path / "results")
    task = Segmentation(host=HOST, data=str(tmp_path / "sky"), size=SIZE, head="linear")
    first = Run(task=task, mixer=Softmax(), recipe=Recipe(epochs=1, batch=4, augment="none", smoothing=0.0))
    assert execute(first, store, device="cpu")["status"] == "done"
    changes = ["recipe.epochs=1", "recipe.lr=1e-9", "recipe.batch=4"]
    run = finetuning_run(first.key, "", str(tmp_path / "car"), RunOptions(change=changes, results=store.root))
    assert execute(run, store, device="cpu")["status"] == "done"
    before, after = (load_trained(each, store).state_dict()["head.scores.weight"] for each in (first, run))
    torch.testing.assert_close(after, before[ORDER], rtol=0, atol=1e-6)
