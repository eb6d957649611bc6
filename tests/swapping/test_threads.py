"""Threads never read one another's grid: inputs of 4x9 and 6x6 cells have equal numbers of tokens."""

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core import GridError
from regard.swapping.capture import capture
from regard.swapping.swap import swap
from small_hosts import draw_large_weights, vit
from threads import in_threads

IMAGES = {"4x9": torch.ones(1, 3, 32, 72).cumsum(-1).sin(), "6x6": torch.ones(1, 3, 48, 48).cumsum(-2).cos()}


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def model_with(mixer: str = "Factors()", example: str = "4x9") -> nn.Module:
    torch.manual_seed(0)
    model, _ = vit(dynamic_img_size=True)
    swap(model.eval(), mixer, example=IMAGES[example])
    draw_large_weights(model)
    return model


def same_as_alone(model: Callable[[Tensor], Tensor], times: int = 40) -> bool:
    """Whether passes of both sizes, at once in two threads, give what they give alone."""
    with torch.no_grad():
        alone = {size: model(image) for size, image in IMAGES.items()}

    def passes(size: str) -> bool:
        with torch.no_grad():
            return all(torch.allclose(model(IMAGES[size]), alone[size], rtol=1e-4, atol=1e-4) for _ in range(times))

    return in_threads(*(lambda size=size: passes(size) for size in IMAGES)) == [True, True]  # type: ignore[misc]


@pytest.mark.parametrize("mixer", ["SKA()", "MiTA(m=4, k=6)", "Factors()", "Conv()", "Agent(m=4)", "DynamicConv()"])
def test_two_threads_with_two_sizes_compute_as_each_alone(mixer: str) -> None:
    assert same_as_alone(model_with(mixer))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_begin_with_the_grid_of_the_copying_thread(how: Callable[[nn.Module], nn.Module]) -> None:
    model = model_with()
    model(IMAGES["6x6"])
    twin: Any = how(model)
    assert str(twin.blocks[0].attn.grid()).startswith("6x6")
    assert in_threads(lambda: str(twin.blocks[0].attn.grid()))[0].startswith("6x6")
    assert same_as_alone(twin, 5)


def test_dead_threads_leave_nothing_behind() -> None:
    model: Any = model_with()
    for _ in range(5):
        in_threads(lambda: model(IMAGES["6x6"]))
    gc.collect()
    assert len(model.blocks[0].attn.source._sizes) == 1


def test_a_layer_alone_in_a_thread_does_not_guess() -> None:
    model: Any = model_with(example="6x6")
    tokens = torch.randn(1, 37, 32)
    model(IMAGES["6x6"])
    expected = model.blocks[0].attn(tokens)
    assert torch.equal(in_threads(lambda: model.blocks[0].attn(tokens))[0], expected)
    passed, end = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (model(IMAGES["4x9"]), passed.set(), end.wait(20)))
    other.start()
    passed.wait(20)
    with pytest.raises(GridError, match="which may be 4x9, 6x6"):
        in_threads(lambda: model.blocks[0].attn(tokens))
    end.set()
    other.join()
    fresh: Any = model_with().blocks[0].attn
    fresh.source.__setstate__({"height": 0, "width": 0})
    with pytest.raises(GridError, match="call the whole model"):
        fresh(tokens)


def test_maps_are_those_of_the_own_thread() -> None:
    model = model_with("SKA()")
    with capture(model) as alone:
        model(IMAGES["4x9"])
    with capture(model) as maps:
        model(IMAGES["4x9"])
        in_threads(lambda: model(IMAGES["6x6"]))
    assert all(torch.equal(maps[name], alone[name]) for name in alone)


# activation checkpointing: layers run again during the backward pass


def checkpointed(model: Any, reentrant: bool, part: str) -> Any:
    owner, name = (model, "forward_features") if part == "whole" else (model.blocks, "forward")
    inner = getattr(owner, name)
    setattr(owner, name, lambda x, **options: checkpoint(inner, x.clone().requires_grad_(), use_reentrant=reentrant))
    if part == "blocks":
        model.blocks.__dict__.pop("forward")
        for block in model.blocks:
            inside = block.forward
            block.forward = lambda x, inside=inside, **options: checkpoint(inside, x, use_reentrant=reentrant)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [value.grad.clone() for value in model.parameters() if value.grad is not None]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-3, atol=1e-3 * float(y.abs().max())) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("part", ["blocks", "whole"])
@pytest.mark.parametrize("order", ["one backward", "crossed threads", "after another size"])
def test_recomputation_takes_the_grid_of_its_own_pass(reentrant: bool, part: str, order: str) -> None:
    plain, model = model_with("SKA()"), checkpointed(model_with("SKA()"), reentrant, part)
    sum(plain(image).square().sum() for image in IMAGES.values()).backward()  # type: ignore[union-attr]
    if order == "crossed threads":
        losses = in_threads(*(lambda x=x: model(x).square().sum() for x in IMAGES.values()))  # type: ignore[misc]
        for loss in losses[::-1]:
            in_threads(loss.backward)
    else:
        losses = [model(image).square().sum() for image in IMAGES.values()]
        if order == "after another size":
            in_threads(lambda: model(torch.randn(1, 3, 16, 144)))
        sum(losses).backward()
    assert alike(gradients(model), gradients(plain))


def test_with_a_frozen_stem_the_sizes_follow_one_another() -> None:
    plain: Any = model_with("SKA()")
    plain.patch_embed.requires_grad_(False)
    model = checkpointed(copy.deepcopy(plain), False, "blocks")
    for image in IMAGES.values():
        plain(image).square().sum().backward()
        model(image).square().sum().backward()
    assert alike(gradients(model), gradients(plain))
    losses = [model(image).square().sum() for image in IMAGES.values()]
    with pytest.raises(GridError, match="backward before a pass of another size"):
        sum(losses).backward()


@pytest.mark.untyped
@pytest.mark.parametrize(
    "part", ["blocks", *(pytest.param(part, marks=pytest.mark.slow) for part in ("whole", "stem"))]
)
def test_compiled_models_in_two_threads(part: str) -> None:
    torch._dynamo.reset()
    model: Any = model_with("SKA()")
    for module in {"whole": [model], "blocks": model.blocks, "stem": [model.patch_embed]}[part]:
        module.compile(fullgraph=True, backend="aot_eager")
    assert same_as_alone(model, 10)


@pytest.mark.slow
@pytest.mark.untyped
def test_compiled_blocks_are_recomputed_in_another_thread() -> None:
    """As on a GPU, whose backward pass has threads of its own."""
    torch._dynamo.reset()
    plain, model = model_with("SKA()"), checkpointed(model_with("SKA()"), False, "blocks")
    plain(IMAGES["4x9"]).square().sum().backward()
    for block in model.blocks:
        inner = vars(block).pop("forward").__defaults__[0]
        run = torch.compile(inner, backend="aot_eager")
        block.forward = lambda x, run=run, **_: checkpoint(run, x, use_reentrant=False)
    loss = model(IMAGES["4x9"]).square().sum()
    with torch.no_grad():
        model(IMAGES["6x6"])
    in_threads(loss.backward)
    assert alike(gradients(model), gradients(plain))


@pytest.mark.untyped
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_model_has_a_grid_of_its_own(strict: bool) -> None:
    model = model_with("SKA()")
    with torch.no_grad():
        exported = torch.export.export(model, (IMAGES["4x9"],), strict=strict).module()
        expected = model(IMAGES["4x9"])
        model(IMAGES["6x6"])
        assert torch.allclose(exported(IMAGES["4x9"]), expected, rtol=1e-4, atol=1e-4)
    assert same_as_alone(copy.deepcopy(model), 3)
