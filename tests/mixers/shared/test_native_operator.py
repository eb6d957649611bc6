"""Compiled kernels run directly in eager mode, and as operators of `torch.library` where something looks at them."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels import check_compile_takes_it_and_export_does_not, needs_kernels
from regard import DAT, MiTA, MixerConfig, TopK, spell
from regard.ops import mita
from regard.testing import check
from regard.testing.subject import gap

pytestmark = needs_kernels


def draw() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((30, 8), (40, 8), (40, 8), (6, 8))
    return [torch.randn(2, 2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def results(inputs: list[Tensor]) -> list[Tensor]:
    out = mita(*inputs, 5, execution="native")
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


class Names(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators_and_nothing_changes() -> None:
    inputs = draw()
    direct = results(inputs)
    with Names() as names:
        dispatched = results(inputs)
    assert {"regard.mita.default", "regard.mita_backward.default"} <= names.seen
    assert all(torch.equal(one, other) for one, other in zip(direct, dispatched, strict=True))


def test_products_are_counted_forward_and_backward() -> None:
    inputs = draw()
    with FlopCounterMode(display=False) as counter:
        mita(*inputs, 5, execution="native").sum().backward()
    counts = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    assert counts["regard.mita"] > 0
    assert counts["regard.mita_backward"] == 2 * counts["regard.mita"]


def test_checkpointing_and_hooks_of_saved_tensors() -> None:
    inputs, packed = draw(), []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x

    plain = results(inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = mita(*inputs, 5, execution="native")
    assert torch.Size([2, 2, 30, 8]) in packed
    again = checkpoint(lambda *inputs: mita(*inputs, 5, execution="native"), *inputs, use_reentrant=False)
    for value in (out, again):
        grads = torch.autograd.grad(value.square().sum(), inputs)
        assert max(gap(one, other) for one, other in zip([value, *grads], plain, strict=True)) == 0.0


def test_inputs_without_gradient_and_part_of_them() -> None:
    inputs = draw()
    expected = results(inputs)
    with torch.no_grad():
        assert not mita(*inputs, 5, execution="native").requires_grad
    only = [x.detach() for x in inputs]
    only[2].requires_grad_()
    out = mita(*only, 5, execution="native")
    assert torch.equal(torch.autograd.grad(out.square().sum(), only[2])[0], expected[3])


def test_inference_mode() -> None:
    inputs = draw()
    with torch.inference_mode():
        out = mita(*inputs, 5, execution="native")
    assert out.is_inference()
    assert torch.equal(out, results(inputs)[0])


@pytest.mark.untyped
@pytest.mark.parametrize(("config", "operator"), [(MiTA(m=4, k=5), "mita"), (TopK(k=5), "topk")], ids=str)
def test_torch_compile_takes_them_and_export_does_not(
    config: MixerConfig, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGARD_NATIVE", raising=False)
    check_compile_takes_it_and_export_does_not(config, operator)


@pytest.mark.parametrize("config", [MiTA(m=4, k=5), TopK(k=5), DAT(stride=2, kernel=3)], ids=spell)
def test_the_contract_holds_without_kernels(config: MixerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_NATIVE", "0")
    check(config, skip={"compile": "tested by test_contract"})
