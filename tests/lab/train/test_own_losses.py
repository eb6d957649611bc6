"""The term of DSA's indexer in `regard train`; other mechanisms have none."""

import math
from pathlib import Path

import pytest
import torch

from regard import Grid, Mask, Site, Sparsifiner, TopK, parse
from regard.core import Inputs
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train.execute import execute
from regard.lab.train.load import load_trained
from regard.lab.train.own_losses import collect_own_losses
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run, canonical
from regard.mixers import MIXERS

INDEXED = 'TopK(k=3, indexer="lightning", index_heads=2, index_width=4)'
HOST = "vit_desk(patch=2, dim=32, depth=2, heads=2)"


def test_a_run_trains_the_indexer(tmp_path: Path) -> None:
    task = Classification(host=HOST, data="digits", size=(8, 8), limit=128)
    run = Run(task=task, mixer=parse(INDEXED), recipe=Recipe(epochs=2, batch=32, augment="none"))
    store = Results(tmp_path)
    outcome = execute(run, store, device="cpu")
    first, last = (dict(model.named_parameters()) for model in (run.model(), load_trained(run, store)))
    indexed = [name for name in first if ".operator.index." in name]
    assert len(indexed) == 2 * 3
    assert not any(torch.equal(first[name], last[name]) for name in indexed)
    assert all(parameter.isfinite().all() for parameter in last.values())
    assert math.isfinite(outcome["metrics"]["top1"])


def test_the_term_moves_the_indexer_only() -> None:
    """DeepSeek-V3.2: the indexer's input is detached, and its loss is its only one."""
    torch.manual_seed(0)
    grid = Grid(3, 4, 1)
    layer = parse(INDEXED).build(Site(16, 2, grid))
    terms = collect_own_losses(layer)
    x = torch.randn(2, 13, 16, requires_grad=True)
    out = layer(x, grid)
    gradients = torch.autograd.grad(terms[0], [x, *layer.parameters()], allow_unused=True)
    names = ["x", *dict(layer.named_parameters())]
    moved = {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    assert moved == {f"operator.index.{part}.weight" for part in ("query", "key", "weight")}
    task_moves = torch.autograd.grad(out.sum(), list(layer.operator.parameters()), allow_unused=True)
    assert task_moves == (None, None, None)
    layer.eval()(x, grid)
    assert len(terms) == 1


def test_padding_does_not_reach_the_term() -> None:
    torch.manual_seed(0)
    operator = parse(INDEXED).operator(Site(16, 2, Grid(3, 4)))
    q, k = torch.randn(2, 2, 2, 12, 8)
    keep = torch.arange(12).expand(2, -1) < 9
    term = operator.own_loss(Inputs(q, k, k, Grid(3, 4), mask=Mask(keep=keep)))
    k = k.masked_fill(~keep[:, None, :, None], torch.nan)
    hidden = operator.own_loss(Inputs(q, k, k, Grid(3, 4), mask=Mask(keep=keep)))
    assert torch.equal(term, hidden)
    assert all(x.isfinite().all() for x in torch.autograd.grad(hidden, list(operator.parameters())))


@pytest.mark.parametrize("kind", [kind for kind in MIXERS if kind is not Sparsifiner], ids=lambda kind: kind.__name__)
def test_others_have_no_term(kind: type) -> None:
    layer = parse(kind.samples[0] if kind.samples else f"{kind.__name__}()").build(Site(16, 2, Grid(4, 4)))
    terms = collect_own_losses(layer)
    layer(torch.randn(2, 16, 16))
    assert not terms


def test_the_key_rises_with_that_indexer_only() -> None:
    assert canonical(TopK(k=3)) == "TopK(k=3)"
    assert canonical(parse(INDEXED)).startswith("TopK@2(")
