"""A change that fails or is interrupted leaves the model as it was; what is kept stays the same objects."""

import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regard.core import SwapError
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.projections.sne import FSNE
from regard.swapping.layer import Port
from regard.swapping.swap import plan_swap, remove, restore, retune, swap
from small_hosts import HOSTS, draw_large_weights, vit

TINY = "vit_tiny_patch16_224(depth=1, embed_dim=8, num_heads=2, patch_size=8, num_classes=3, mlp_ratio=1)"

# an exception at any line

CHANGES: dict[str, tuple[Any, Callable[[nn.Module], object]]] = {
    "plan": (None, lambda model: plan_swap(model, SKA())),
    "swap": (None, lambda model: swap(model, SKA(dwc=3))),
    "shared codes": (None, lambda model: swap(model, Softmax(projection=FSNE(code=4)))),
    "swap again": (Softmax(projection=FSNE(code=4)), lambda model: swap(model, SKA())),
    "remove": (SKA(), remove),
    "restore": (Softmax(projection=FSNE(code=4)), restore),
    "retune": (MiTA(m=3, k=2), lambda model: retune(model, k=3)),
}


Stack = tuple[tuple[str, int], ...]
Place = tuple[Stack, int]
"""A line of the swap with the lines that called it, and at which visit of it."""


@functools.cache
def of_the_swap(file: str) -> bool:
    path = file.replace("\\", "/")
    return "regard/swapping/" in path or path.endswith("core/eval_mode.py")


def traced(model: nn.Module, change: Callable[[nn.Module], object], visit: Callable[[FrameType], None]) -> None:
    """Make a change; `visit` is called before each line of the swap, and what it raises is raised there."""

    def at_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            visit(frame)
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: at_line if of_the_swap(frame.f_code.co_filename) else None)
    try:
        change(model)
    finally:
        sys.settrace(before)


def line_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


def stack_of(frame: FrameType) -> Stack:
    lines, here = [], cast("FrameType | None", frame)
    while here is not None and here.f_code is not traced.__code__:
        lines.append(line_of(here))
        here = here.f_back
    return tuple(lines)


def tiny(mixer: Any) -> nn.Module:
    torch.manual_seed(0)
    model: Any = create_model(TINY, None, img_size=(16, 24))
    if mixer is not None:
        swap(model, mixer)
    model.blocks[0].attn.register_forward_hook(lambda module, args, output: None)
    model.blocks[0].attn.proj.requires_grad_(False)
    model.norm.eval()
    return model


def picture(model: nn.Module) -> list[Any]:
    """All that a model is: its modules, tensors, hooks, modes and attributes, by identity, and what tensors hold."""
    modules = [
        (name, id(module), sorted((key, id(value)) for key, value in vars(module).items()))
        + tuple([*value.items()] if isinstance(value, dict) else {*value} for value in _containers(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    tensors = [
        (key, value.requires_grad, value.sum().item(), value._version) for key, value in model.named_parameters()
    ]
    return [modules, tensors]


def _containers(module: nn.Module) -> list[Any]:
    return [{key: id(each) for key, each in value.items()} if isinstance(value, dict) else value
            for value in vars(module).values() if isinstance(value, dict | set)]  # fmt: skip


def places(name: str, with_state: bool) -> list[Place]:
    """The visits of lines after which an exception can have another effect, of the thousands that a change makes.

    The undoing depends on where the exception is raised, which decides what catches it, and on what the model is then.
    So of the visits of one line from the same callers, one for each state of the model is enough (without `with_state`,
    the first).
    """
    mixer, change = CHANGES[name]
    model = tiny(mixer)
    visits: Counter[Stack] = Counter()
    found: dict[tuple[Stack, str], Place] = {}

    def visit(frame: FrameType) -> None:
        stack = stack_of(frame)
        visits[stack] += 1
        state = repr(picture(model)) if with_state else ""
        found.setdefault((stack, state), (stack, visits[stack]))

    traced(model, change, visit)
    return [*found.values()]


def interrupted(model: nn.Module, change: Callable[[nn.Module], object], place: Place, error: BaseException) -> None:
    """Make a change, with an error raised at a place."""
    (stack, left) = place

    def visit(frame: FrameType) -> None:
        nonlocal left
        if line_of(frame) == stack[0] and stack_of(frame) == stack:
            left -= 1
            if not left:
                raise error

    try:
        traced(model, change, visit)
    except BaseException as raised:
        if error not in (raised, raised.__cause__):
            raise
    assert left == 0, f"{stack[0]} was not visited"


def damaging(name: str, chosen: list[Place]) -> list[tuple[tuple[str, int], str]]:
    """The lines of places at which an error, or Ctrl-C, damages the model."""
    mixer, change = CHANGES[name]
    model = tiny(mixer)
    before, damaged = picture(model), []
    for place in chosen:
        for error in (RuntimeError("planted"), KeyboardInterrupt()):
            interrupted(model, change, place, error)
            if picture(model) != before:
                damaged.append((place[0][0], type(error).__name__))
                model = tiny(mixer)
                before = picture(model)
    return damaged


@pytest.mark.untyped  # the checks of annotations make each of some thousand swaps three times as long
@pytest.mark.parametrize("any_line", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a line", "any line"])
@pytest.mark.parametrize("name", CHANGES)
def test_an_exception_at_a_line_changes_nothing(name: str, any_line: bool) -> None:
    assert damaging(name, places(name, any_line)[:: 1 if any_line else 120]) == []


# kept parameters


@pytest.mark.parametrize("host", HOSTS)
def test_kept_parameters_stay_the_same_objects(host: str) -> None:
    model, _ = HOSTS[host]()
    before = {id(value) for value in model.parameters()}
    names = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)}
    plan = plan_swap(model, SKA())
    plan.apply()
    fresh = {key for key, value in model.named_parameters() if id(value) not in before}
    assert fresh == {name for site in plan.sites for name in site.new_objects}
    now = model.state_dict(keep_vars=True)
    for site in plan.sites:
        full = [f"{site.name}.{key}" for key in site.kept if "[" not in key]
        assert all(now[key] is names[key] for key in full if key in names)
    restore(model)
    back = model.state_dict(keep_vars=True)
    assert all(back[key] is value for key, value in now.items() if key in names and value is names[key])


def test_a_pass_that_waits_for_its_backward_is_not_disturbed() -> None:
    model, x = vit()
    loss = model(x).square().sum()
    swap(model, Softmax())
    loss.backward()
    assert model.blocks[0].attn.proj.weight.grad is not None  # type: ignore[union-attr, index]


def test_dropped_weights_are_those_at_the_time_of_the_swap() -> None:
    model: Any = vit()[0]
    plan = plan_swap(model, SKA())
    nn.init.constant_(model.blocks[0].attn.qkv.weight, 7.0)
    assert (restore(plan.apply()).blocks[0].attn.qkv.weight == 7.0).all()  # type: ignore[union-attr, index]


# hooks


def test_hooks_move_and_their_handles_follow() -> None:
    model: Any = vit()[0]
    x, calls = vit()[1], []
    attn = model.blocks[0].attn
    handles = [
        attn.register_forward_hook(lambda module, args, output: calls.append("forward")),
        attn.register_forward_pre_hook(lambda module, args, kwargs: calls.append("pre"), with_kwargs=True),
        attn.register_full_backward_hook(lambda module, above, below: calls.append("backward")),
        attn.proj.register_forward_hook(lambda module, args, output: calls.append("proj")),
        attn.register_state_dict_post_hook(lambda _, state, prefix, __: calls.append(f"{prefix}qkv.weight" in state)),
        attn.register_load_state_dict_pre_hook(lambda module, *_: calls.append(isinstance(module, Port))),
    ]  # fmt: skip
    handles[0].remove()
    assert not plan_swap(model, Softmax()).sites[0].lost_hooks
    for change, swapped in ((lambda: swap(model, Softmax()), True), (lambda: swap(model, MiTA(m=4, k=4)), True),
                            (lambda: retune(model, m=6), True), (lambda: restore(model), False)):  # fmt: skip
        change()
        calls.clear()
        model(x).sum().backward()
        model.load_state_dict(model.state_dict())
        assert calls == ["pre", "proj", "backward", True, swapped]
    swap(model, Softmax())
    for handle in handles:
        handle.remove()
    calls.clear()
    model(x).sum().backward()
    assert not calls


def test_hooks_of_parts_that_are_gone_are_named() -> None:
    def watch(module: nn.Module, args: object, output: object) -> None: ...

    model: Any = vit()[0]
    model.blocks[0].attn.qkv.register_forward_hook(watch)
    plan = plan_swap(model, SKA())
    assert plan.sites[0].lost_hooks == ["forward hook watch of qkv"]
    assert "hooks left behind forward hook watch of qkv" in str(plan)
    with pytest.warns(UserWarning, match="blocks.0.attn: forward hook watch of qkv"):
        swap(model, SKA())
    model.blocks[0].attn.regard.operator.register_forward_hook(watch)
    with pytest.warns(UserWarning, match="forward hook watch of regard.operator"):
        restore(model)


def test_a_hook_of_a_projection_that_stays_moves_with_it() -> None:
    """Fused queries, keys and values are one linear layer in the host and after the swap."""
    shapes = []
    model, x = vit()
    handle = model.blocks[1].attn.qkv.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    swap(model, Softmax())
    shapes.clear()
    model(x)
    assert shapes == [(3, 25, 96)]
    handle.remove()
    restore(model)(x)
    assert len(shapes) == 1


# modules and parameters in several places


def test_an_attention_in_two_places_is_replaced_in_both() -> None:
    model, x = vit()
    model.blocks[1].attn = model.blocks[0].attn  # type: ignore[index, union-attr]
    expected = model.eval()(x)
    swap(model, Softmax())
    assert model.blocks[1].attn is model.blocks[0].attn  # type: ignore[index, union-attr]
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_tied_parameters_stay_tied_or_are_refused() -> None:
    model: Any = vit()[0]
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    with pytest.raises(SwapError, match="tied to another parameter"):
        swap(model, SKA())
    swap(model, Softmax())
    assert model.blocks[1].attn.regard.qkv.weight is model.blocks[0].attn.regard.qkv.weight


def test_two_models_with_one_stem_keep_their_grids() -> None:
    (first, x), (second, _) = vit(dynamic_img_size=True), vit(dynamic_img_size=True)
    second.patch_embed = first.patch_embed
    swap(swap(first.eval(), SKA()) and second.eval(), SKA())
    wide = torch.randn(1, 3, 16, 96)
    expected = first(wide)
    restore(second)
    first(x)
    assert torch.equal(first(wide), expected)
    restore(first)
    assert not first.patch_embed.proj._forward_hooks  # type: ignore[union-attr]


def test_an_attribute_of_the_model_comes_back() -> None:
    model: Any = vit()[0]
    model.no_weight_decay = own = lambda: {"pos_embed"}
    assert "pos_embed" in swap(model, SKA()).no_weight_decay()  # type: ignore[operator]
    assert restore(model).no_weight_decay is own


def test_a_plan_and_a_swap_leave_buffers_as_they_are() -> None:
    model: Any = vit()[0]
    norm, model.calls = nn.BatchNorm2d(3), torch.nn.Buffer(torch.zeros(()))

    def count(module: Any, images: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        module.calls = module.calls + 1
        return (norm.train()(*images),)

    model.patch_embed.norm_of_images = norm
    model.register_forward_pre_hook(count)
    before = {name: (value, value.clone()) for name, value in model.named_buffers()}
    plan_swap(model, Softmax())
    swap(model, Softmax())
    for name, value in model.named_buffers():
        if name in before:
            assert value is before[name][0]
            assert torch.equal(*before[name])


# wrapped models


def test_a_model_that_is_wrapped_for_training_is_refused() -> None:
    model, _ = vit()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    with pytest.raises(SwapError, match="before wrapping"):
        swap(wrapped, SKA(), example=torch.randn(1, 3, 32, 48))


@pytest.mark.untyped
def test_a_compiled_model_runs_what_was_swapped_in() -> None:
    """Its code is compiled anew, since its layers are other modules."""
    model, x = vit()
    draw_large_weights(model.eval())
    fast = torch.compile(model, backend="eager")
    plain = fast(x)
    remove(fast)
    assert (fast(x) - plain).abs().max() > 1e-3 * plain.abs().max()
    torch.testing.assert_close(fast(x), model(x))
    restore(fast)
    torch.testing.assert_close(fast(x), plain)


def test_a_model_in_data_parallel_takes_a_swap() -> None:
    model, x = vit()
    draw_large_weights(model.eval())
    wrapped = nn.DataParallel(model)
    expected = wrapped(x)
    torch.testing.assert_close(swap(wrapped, Softmax())(x), expected)
    assert list(restore(wrapped).state_dict()) == [f"module.{key}" for key in model.state_dict()]


def test_what_is_swapped_in_inference_mode_can_be_trained() -> None:
    model, x = vit()
    with torch.inference_mode():
        swap(model, SKA())
    model(x).sum().backward()
    assert all(value.grad is not None for value in model.parameters())


def test_old_layers_can_be_freed() -> None:
    model: Any = vit()[0]
    gone = weakref.ref(swap(model, SKA()).blocks[0].attn)  # type: ignore[union-attr, index]
    restore(model)
    gc.collect()
    assert gone() is None
