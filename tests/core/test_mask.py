"""Mask: kinds, the dense form for SDPA against the plain one, rows without any key."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from operators import check_error
from regard import Grid, Mask, Site, ops, parse
from regard.core import ShapeError, softmax_rows
from regard.ops import mita_plan, softmax_reference

KEEP = torch.tensor([[True, True, False, True], [True, False, True, True]])


def test_kinds_are_those_in_use() -> None:
    assert Mask().kinds == set()
    assert Mask(causal=True, keep=KEEP).kinds == {"causal", "padding"}
    assert Mask(bias=torch.zeros(1, 4)).kinds == {"bias"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bias", [None, (4, 4), (1, 4), (3, 4, 4), (2, 1, 4, 4)], ids=str)
def test_the_dense_form_is_the_plain_one(causal: bool, padded: bool, bias: tuple[int, ...] | None) -> None:
    q, k, v = torch.randn(3, 2, 3, 4, 5, dtype=torch.float64)
    mask = Mask(
        causal=causal, keep=KEEP if padded else None, bias=None if bias is None else torch.randn(bias, dtype=q.dtype)
    )
    plain = softmax_rows(mask.add_to(q @ k.mT * 5**-0.5)) @ v
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(q, 4))
    assert torch.allclose(plain, dense, rtol=0, atol=1e-12)


def test_a_row_without_keys_is_zero_in_value_and_gradient() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]], requires_grad=True)
    rows = softmax_rows(logits)
    assert rows.tolist() == [[0, 0], [0.5, 0.5]]
    (rows * torch.tensor([1.0, 3.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0].tolist() == [0, 0]


def test_sizes_that_do_not_fit_are_named() -> None:
    sizes, causal = (4, 5, torch.device("cpu"), 2), "as many keys as queries, not 5 keys for 4"
    check_error(ShapeError, causal, Mask(causal=True).allowed_pairs, *sizes)
    check_error(ShapeError, "keep has 4 keys, the operator has 5", Mask(keep=KEEP).allowed_pairs, *sizes)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("keep", "came"),
    [
        (torch.ones(2, 4), r"torch.float32 \(2, 4\)"),  # would be added to the logits, and hide nothing
        (torch.ones(2, 4, dtype=torch.long), r"torch.int64 \(2, 4\)"),
        (KEEP[0], r"torch.bool \(4,\)"),
        (KEEP.tolist(), "list"),
    ],
    ids=["float", "int", "one axis", "list"],
)
def test_what_is_kept_is_boolean_with_two_axes(keep: Any, came: str) -> None:
    check_error(ShapeError, f"Mask.keep is {came}; expected bool .*pass keep.bool", Mask, keep=keep)


@pytest.mark.untyped
def test_a_bias_is_added_and_says_no_yes_or_no() -> None:
    check_error(ShapeError, r"Mask.bias is torch.bool \(1, 4\); expected the floating-point", Mask, bias=KEEP[:1])


@pytest.mark.parametrize("text", ["Softmax", "MiTA(m=4, k=5)", "Linear", "Window(size=3)", "TopK(k=5)", "Conv"])
def test_a_layer_refuses_the_mask_of_other_tokens(text: str) -> None:
    grid = Grid(5, 5)
    layer, x = parse(text).build(Site(16, 2, grid)), torch.randn(2, 25, 16)
    for shape in ((3, 25), (1, 25), (2, 24)):
        said = re.escape(f"Mask.keep is {shape}; expected (batch, keys) = (2, 25)")
        check_error(ShapeError, said, layer, x, grid, Mask(keep=torch.ones(shape, dtype=torch.bool)))


def test_in_cross_attention_the_mask_counts_the_memory() -> None:
    grid, memory = Grid(2, 3), Grid(2, 4)
    layer = parse("Softmax").build_cross(Site(16, 2, grid, memory=memory))
    x, y, keep = torch.randn(2, 6, 16), torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.bool)
    assert layer(x, grid, Mask(keep=keep), memory=y, memory_grid=memory).shape == x.shape
    few, said = Mask(keep=keep[:, :6]), r"\(batch, keys\) = \(2, 8\)"
    check_error(ShapeError, said, layer, x, grid, few, memory=y, memory_grid=memory)


@pytest.mark.untyped
def test_a_memory_has_the_batch_of_the_queries() -> None:
    grid, memory = Grid(2, 3), Grid(2, 4)
    layer = parse("Softmax").build_cross(Site(16, 2, grid, memory=memory))
    x, y = torch.randn(2, 6, 16), torch.randn(2, 8, 16)
    said = r"the memory has shape \(1, 8, 16\); expected \(2, tokens, 16\)"
    check_error(ShapeError, said, layer, x, grid, memory=y[:1], memory_grid=memory)


@pytest.mark.untyped
def test_operators_name_a_batch_that_does_not_fit() -> None:
    q = torch.zeros(3, 1, 4, 2)
    check_error(ShapeError, "keep has a batch of 2, the operator has 3", Mask(keep=KEEP).dense, q, 4)
    one, said = q[:1], "keep has a batch of 2, the operator has 1"
    check_error(ShapeError, said, softmax_reference, one, one, one, mask=Mask(keep=KEEP))
    check_error(ShapeError, said, mita_plan, one, one, one[:, :, :2], 2, mask=Mask(keep=KEEP))
    dense = Mask(keep=KEEP[:1]).dense(q, 4)  # one row for all images
    assert dense is not None
    assert dense.shape == (1, 1, 1, 4)


@pytest.mark.untyped
def test_a_mask_and_identity_queries_compile_as_one_graph() -> None:
    """Doors look at shapes and dtypes only, and so does the dtype of queries under autocast."""
    grid = Grid(2, 2)
    layer = parse("Softmax(projection=IdentityQuery())").build(Site(8, 2, grid))

    def run(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, grid, Mask(keep=keep))

    x = torch.randn(2, 4, 8)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, KEEP), run(x, KEEP))


@pytest.mark.parametrize("name", ["softmax", "softmax_reference", "topk", "topk_reference", "ska"])
def test_a_product_is_a_bias_where_a_function_takes_biases(name: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64)
    mask = Mask(product=(torch.randn(2, 2, 6, 3).double(), torch.randn(6, 3).double()))
    form: Any = getattr(ops, name)
    arguments = (q, k[0] if name == "ska" else k, v, *((4,) if "topk" in name else ()))
    assert torch.allclose(form(*arguments, mask=mask), form(*arguments, mask=mask.with_bias()))
    assert not torch.allclose(form(*arguments, mask=mask), form(*arguments))


@pytest.mark.untyped
@pytest.mark.parametrize(
    "product", [torch.randn(2, 3), "rows", (torch.randn(1, 2, 3, 4),), (torch.randn(1, 2, 3, 4), torch.randn(3, 5))]
)
def test_a_product_is_two_tensors(product) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match="Mask.product is a pair"):
        Mask(product=product)
