"""Mask: kinds, the dense form for SDPA against the plain one, rows without any key."""

import pytest
import torch
import torch.nn.functional as F

from regard import Mask
from regard.core import ShapeError, softmax_rows

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
    plain = softmax_rows(mask.added(q @ k.mT * 5**-0.5)) @ v
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(q, 4))
    assert torch.allclose(plain, dense, rtol=0, atol=1e-12)


def test_a_query_sees_no_later_key() -> None:
    logits = Mask(causal=True).added(torch.zeros(1, 1, 3, 3))
    assert logits.isinf()[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_a_row_without_keys_is_zero_in_value_and_gradient() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]], requires_grad=True)
    rows = softmax_rows(logits)
    assert rows.tolist() == [[0, 0], [0.5, 0.5]]
    (rows * torch.tensor([1.0, 3.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0].tolist() == [0, 0]


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="as many keys as queries, not 5 keys for 4"):
        Mask(causal=True).allowed(4, 5, torch.device("cpu"))
    with pytest.raises(ShapeError, match="keep has 4 keys, the operator has 5"):
        Mask(keep=KEEP).allowed(4, 5, torch.device("cpu"))
