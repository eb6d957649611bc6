"""Wrong tensors at layers, operators and operator functions. Annotation checks would answer before the package does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from operators import check_error
from regard import Grid, MiTA, Site, Softmax
from regard.core import Mask, RegardError, ShapeError
from regard.ops import (
    bra_plan,
    deformable_conv,
    linear,
    linformer,
    linformer_reference,
    moba,
    moba_plan,
    softmax,
    softmax_reference,
    topk,
    window,
    window_reference,
    xca_reference,
)

pytestmark = pytest.mark.untyped

GRID = Grid(4, 4)
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "float64": lambda x: x.double(),
    "half": lambda x: x.half(),
    "integers": lambda x: x.int(),
    "complex": lambda x: x * 1j,
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "None": lambda x: None,
    "another device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
    "fewer axes": lambda x: x[0],
    "fewer channels": lambda x: x[..., :-1],
    "fewer tokens": lambda x: x[..., :-1, :],
}


def test_numbers_of_numpy_are_those_of_python() -> None:
    q = torch.randn(1, 2, 16, 4)
    assert torch.equal(softmax(q, q, q, scale=np.float32(0.5)), softmax(q, q, q, scale=0.5))
    assert torch.equal(topk(q, q, q, np.int64(2)), topk(q, q, q, 2))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_layer_refuses_a_wrong_input(wrong: str) -> None:
    x = torch.randn(2, 16, 16)
    for config in (Softmax(), MiTA(m=4, k=4)):
        layer = config.build(Site(16, 2, GRID))
        for form in (layer, layer.reference):
            with pytest.raises(RegardError):
                form(WRONG[wrong](x), GRID)


@pytest.mark.parametrize("wrong", WRONG)
def test_an_operator_function_refuses_a_wrong_key(wrong: str) -> None:
    q = torch.randn(2, 2, 16, 8)
    for function in (softmax, softmax_reference):
        with pytest.raises(RegardError):
            function(q, WRONG[wrong](q), q)


def test_what_is_no_size_or_function_is_refused() -> None:
    q, grid = torch.randn(2, 2, 16, 8), Grid(4, 4)
    x, weight, offsets = torch.randn(2, 4, 6, 7), torch.randn(4, 4, 3, 3), torch.randn(2, 18, 4, 5)
    for wrong in (None, [], (1,), (1, 2, 3), "", b"s", torch.tensor(2), 2.5, grid):
        for use in (
            lambda wrong=wrong: window(q, q, q, grid, wrong),
            lambda wrong=wrong: window_reference(q, q, q, grid, wrong),
            lambda wrong=wrong: moba_plan(q, q, grid, wrong, 1),
            lambda wrong=wrong: bra_plan(q, q, grid, wrong, 1),
            lambda wrong=wrong: deformable_conv(x, weight, offsets, stride=wrong),
            lambda wrong=wrong: linear(q, q, q, feature=wrong),
        ):
            with pytest.raises(RegardError):
                use()
    assert torch.equal(window(q, q, q, grid, [2, 4]), window(q, q, q, grid, (2, 4)))  # type: ignore[arg-type]


def test_a_reference_refuses_the_same_shapes() -> None:
    q, rows = torch.randn(2, 2, 16, 8), torch.randn(4, 3, 16)
    for form in (linformer, linformer_reference):
        check_error(ShapeError, "project_k has shape", form, q, q, q, rows, rows)


def test_a_nested_tensor_without_sizes_is_refused() -> None:
    q = torch.randn(2, 2, 16, 8)
    check_error(ShapeError, "q has width 0", softmax, q[..., :0], q[..., :0], q)
    check_error(ShapeError, "nested", softmax, q, torch.nested.nested_tensor(list(q)), q)


@pytest.mark.parametrize("grid", [(4, 4), 16, "4x4", Grid(5, 5)])
def test_what_is_no_grid_of_the_input_is_refused(grid: Any) -> None:
    q, x = torch.randn(2, 2, 16, 8), torch.randn(2, 16, 16)
    layer = Softmax().build(Site(16, 2, GRID))
    for use in (
        lambda: moba(q, q, q, grid, (2, 2), 2),
        lambda: layer(x, grid),
        lambda: layer.operator(q, q, q, grid=grid),
    ):
        with pytest.raises(ShapeError):
            use()


def test_masks_of_another_kind_shape_or_device_are_refused() -> None:
    x, layer = torch.randn(2, 16, 16), Softmax().build(Site(16, 2, GRID))
    wrong = [torch.ones(2, 16).bool(), "causal", Mask(bias=torch.zeros(16, 9)), Mask(bias=torch.zeros(5, 2, 16, 16))]
    wrong += [Mask(keep=torch.ones(2, 16, device="meta").bool()), Mask(bias=torch.zeros(16, 16, device="meta"))]
    for mask in wrong:
        with pytest.raises(ShapeError):
            layer(x, GRID, mask)


def test_right_inputs_of_unusual_layout_pass() -> None:
    x, layer = torch.randn(2, 16, 16), Softmax().build(Site(16, 2, GRID))
    expected = layer(x, GRID)
    strided = x.mT.contiguous().mT
    assert torch.allclose(layer(strided, GRID), expected, atol=1e-6)
    assert torch.allclose(layer(x[:1].expand(3, -1, -1), GRID), expected[:1].expand(3, -1, -1), atol=1e-6)
    assert layer(x[:0], GRID).shape == (0, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, GRID).isfinite().all()


def test_an_axis_of_fixed_length_has_that_length() -> None:
    x = torch.randn(2, 2, 16, 8)
    check_error(ShapeError, r"temperature has shape \(2, 1, 0\)", xca_reference, x, x, x, torch.ones(2, 1, 0))
