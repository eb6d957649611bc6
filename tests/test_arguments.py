"""Wrong arguments of public functions, and wrong fields of studies: one sentence that names the argument.

Annotation checks would answer before the package does.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import (
    SKA,
    Grid,
    MiTA,
    RegardError,
    Softmax,
    attend,
    calibrate,
    capture,
    create_model,
    freeze_keys,
    list_models,
    load,
    plan_swap,
    retune,
    save,
    swap,
)
from regard.advice.advise import advise
from regard.core.validation import check_arguments
from regard.lab import Claim, Classification, Recipe, Results, Row, Run, Setting, Study, param_groups
from regard.measure.bench import bench
from regard.measure.bench_model import bench_model
from regard.measure.cost import count_macs
from regard.mixers.topk.topk import TopKPlan
from regard.ops import topk, topk_reference
from small_hosts import vit
from timm_hosts import maxvit

pytestmark = pytest.mark.untyped

HOST = "vit_desk(depth=1, dim=16, heads=2)"
TASK = Classification(host=HOST, data="digits", size=(8, 8))
NO_MODEL: tuple[Any, ...] = (None, 3, "vit", nn.Linear, {}, nn.Linear(2, 2).state_dict())


def study(**changes: Any) -> Study:
    rows = (Row("a", None), Row("b", SKA()))
    fields: dict[str, Any] = {"name": "s", "title": "t", "source": "u", "question": "q", "baseline": "a"}
    settings = {"smoke": Setting(task=TASK, recipe=Recipe(), rows=rows)}
    return Study(**{**fields, "settings": settings, **changes})


def swapped() -> nn.Module:
    return swap(vit()[0], MiTA(m=4, k=4))


def timed(**changes: Any) -> object:
    values: dict[str, Any] = {"dim": 16, "heads": 2, "batch": 1, "seconds": 0.01, **changes}
    return bench(values.pop("configs", [Softmax()]), values.pop("grids", [Grid(2, 2)]), **values)


CALLS: dict[str, Callable[[], object]] = {
    "bench: dim is '16'; a whole number": lambda: timed(dim="16"),
    "bench: heads is True; a whole number": lambda: timed(heads=True),
    "bench: seconds is nan; a finite number": lambda: timed(seconds=math.nan),
    "bench: backward is 'no'; True or False": lambda: timed(backward="no"),
    r"bench: configs is \['Softmax\(\)'\]; a list \(each entry a MixerConfig\)": lambda: timed(configs=["Softmax()"]),
    r"bench: grids is \[\(4, 4\)\]; a list \(each entry a Grid\)": lambda: timed(grids=[(4, 4)]),
    "nothing can be timed on 'gpu'": lambda: timed(device="gpu"),
    "nothing can be timed on 'meta'": lambda: timed(device="meta"),
    "this machine has no device 'cuda:99'": lambda: timed(device="cuda:99"),
    "bench_model: extra is 'x'": lambda: bench_model(HOST, [SKA()], extra="x"),
    "bench_model: sizes is": lambda: bench_model(HOST, [SKA()], [8]),  # type: ignore[list-item]
    "sequence_encoder takes token ids": lambda: bench_model("sequence_encoder", [SKA()], batch=1),
    r"advise: configs is \[None\]": lambda: advise(HOST, [None]),  # type: ignore[list-item]
    "create_model: extra is 3": lambda: create_model(HOST, None, extra=3),  # type: ignore[arg-type]
    "list_models: pattern is None": lambda: list_models(None),  # type: ignore[arg-type]
    "load: folder is None": lambda: load(None),  # type: ignore[arg-type]
    "the path is empty": lambda: load(""),
    "no such user": lambda: save(create_model(HOST, None), "~no such user/x"),
    "save: folder is b'x'": lambda: save(create_model(HOST, None), b"x"),  # type: ignore[arg-type]
    "cannot be used: File name too long": lambda: load("x" * 5000),
    "Results: root is 3": lambda: Results(3),  # type: ignore[arg-type]
    "path is empty": lambda: Results(""),
    "weight_decay is nan": lambda: param_groups(vit()[0], math.nan),
    "lr is 0 or more, not -1": lambda: param_groups(vit()[0], 0.1, -1),
    "where is a glob on layer names, .* not None": lambda: retune(swapped(), None, k=3),  # type: ignore[arg-type]
    "capture: layers is b": lambda: capture(swapped(), b"*").__enter__(),  # type: ignore[arg-type]
    "ports is a list of subclasses of Port": lambda: swap(vit()[0], SKA(), ports=[nn.Linear]),  # type: ignore[list-item]
    "ports is a list of subclasses of Port.* not 3": lambda: plan_swap(vit()[0], SKA(), ports=3),  # type: ignore[arg-type]
    "batches has a list; expected images": lambda: calibrate(
        swap(vit()[0], SKA(init="calibrate")),
        swap(vit()[0], Softmax()),
        [[torch.ones(1, 3, 32, 32), 1]],  # type: ignore[list-item]
    ),
    "count_macs: images is 3": lambda: count_macs(vit()[0], 3),  # type: ignore[arg-type]
    "example is one input of a model": lambda: swap(vit()[0], SKA(), example=[1]),  # type: ignore[arg-type]
    "does not take inputs of 3x5x5.* as example=": lambda: swap(
        maxvit("maxvit_tiny_tf_224")[0], SKA(), example=torch.ones(1, 3, 5, 5)
    ),
}


@pytest.mark.parametrize("said", CALLS)
def test_a_wrong_argument_is_named(said: str) -> None:
    with pytest.raises(RegardError, match=said):
        CALLS[said]()


@pytest.mark.parametrize("call", [
    lambda model: capture(model).__enter__(), lambda model: save(model, "x"),
    lambda model: freeze_keys(model), lambda model: calibrate(model, model), lambda model: param_groups(model, 0.1),
    lambda model: attend(model, SKA()),
], ids=["capture", "save", "freeze_keys", "calibrate", "param_groups", "attend"])  # fmt: skip
def test_what_is_no_model_is_refused(call: Callable[[Any], object]) -> None:
    for value in NO_MODEL:
        with pytest.raises(RegardError) as error:
            call(value)
        assert len(str(error.value)) < 400


def test_arguments_that_fit_are_passed_on() -> None:
    @check_arguments
    def size(side: int, sides: tuple[int, int] = (1, 1), names: "Missing" = None) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return side, sides, names

    assert size(np.int64(3), names=object)[:2] == (3, (1, 1))
    assert type(size(np.int64(3))[0]) is int
    assert size(3, [2, 4]) == (3, (2, 4), None)
    with pytest.raises(TypeError, match="missing"):
        size()


FIELDS: dict[str, Callable[[], object]] = {
    "Row has label=3": lambda: Row(3, None),  # type: ignore[arg-type]
    "mixer is a configuration such as": lambda: Row("a", "SKA()"),  # type: ignore[arg-type]
    "Row has paper=.*'many'": lambda: Row("a", None, paper={"params": "many"}),  # type: ignore[dict-item]
    "Row has exact=.*2.5": lambda: Row("a", None, exact={"params": 2.5}),  # type: ignore[dict-item]
    "Row has start='b'": lambda: Row("a", None, start="b"),  # type: ignore[arg-type]
    "Claim has within=nan": lambda: Claim("a", "b", "top1", within=math.nan),
    "Claim has by=True": lambda: Claim("a", "b", "top1", by=True),
    r"Claim has than=\('c', 3\)": lambda: Claim("a", "b", "top1", than=("c", 3)),  # type: ignore[arg-type]
    "task of a setting is a Task": lambda: Setting(task="x", recipe=None, rows=(Row("a", None),)),  # type: ignore[arg-type]
    "recipe of a setting is a Recipe": lambda: Setting(task=TASK, recipe={}, rows=(Row("a", None),)),  # type: ignore[arg-type]
    "seeds=100000000": lambda: Setting(task=TASK, recipe=None, rows=(Row("a", None),), seeds=10**8),
    "different numbers from 0": lambda: Setting(task=TASK, recipe=None, rows=(Row("a", None),), seeds=(1, 1)),
    "at least one row": lambda: Setting(task=TASK, recipe=None, rows=()),
    "variant of a setting": lambda: Setting(task=TASK, recipe=None, rows=(Row("a", None),), variant="../x"),
    "name of a study": lambda: study(name="../x"),
    "name of a study has": lambda: study(name=""),
    "Study has settings=": lambda: study(settings={"smoke": 3}),
    "the metric is a name": lambda: study(metric=""),
    "number of seeds is 1 to": lambda: study().runs("smoke", seeds=10**12),
    "Study.runs: seeds is 2.5": lambda: study().runs("smoke", seeds=2.5),  # type: ignore[arg-type]
    "data and host are names": lambda: study().elsewhere("smoke", host=""),
    "teacher is a run": lambda: Run(task=TASK, teacher=""),
}


@pytest.mark.parametrize("said", FIELDS)
def test_a_wrong_field_of_a_study_is_named(said: str) -> None:
    with pytest.raises(RegardError, match=said):
        FIELDS[said]()


PLANS: dict[str, tuple[Any, str]] = {
    "a list": ([1], "plan is a list; expected a TopKPlan"),
    "no tensor": (TopKPlan(None), r"plan.keys is None; expected a tensor"),  # type: ignore[arg-type]
    "truth values": (TopKPlan(torch.ones(1, 2, 9, 3).bool()), "torch.bool; expected whole numbers"),
    "numbers": (TopKPlan(torch.ones(1, 2, 9, 3)), "plan.keys is torch.float32"),
    "axes": (TopKPlan(torch.ones(2, 9, 3).long()), r"plan: keys has shape \(2, 9, 3\)"),
    "another device": (TopKPlan(torch.ones(1, 2, 9, 3, device="meta").long()), "plan.keys is on meta"),
    "indices": (TopKPlan(torch.full((1, 2, 9, 3), 9)), "indices from 9 to 9"),
}


@pytest.mark.parametrize("wrong", PLANS)
@pytest.mark.parametrize("function", [topk, topk_reference])
def test_a_wrong_plan_is_named(function: Callable[..., Tensor], wrong: str) -> None:
    plan, said = PLANS[wrong]
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(RegardError, match=said):
        function(q, q, q, 3, plan=plan)


@pytest.mark.parametrize("tokens", ["x", None, torch.ones(7)])
def test_tokens_that_are_no_tensor_of_the_grid_are_refused(tokens: Any) -> None:
    grid = Grid(2, 3, 1)
    for call in (lambda: grid.to_map(tokens), lambda: grid.check(tokens), lambda: grid.from_map(tokens, tokens)):
        with pytest.raises(RegardError, match="tokens are a tensor|a map of"):
            call()
    with pytest.raises(RegardError, match="differ in batch or channels"):
        grid.from_map(torch.ones(2, 1, 4), torch.ones(3, 4, 2, 3))


def test_a_path_of_another_kind_is_taken(tmp_path: Path) -> None:
    class Folder:
        def __fspath__(self) -> str:
            return str(tmp_path / "model")

    model = create_model(HOST, None)
    assert torch.equal(load(save(model, Folder())).head.weight, model.head.weight)  # type: ignore[union-attr, arg-type]
