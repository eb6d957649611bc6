"""Linear attention in Triton, against the plain forms in float64."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from interpreter import DEVICE, EXACT, check_close, draw, elsewhere, here, run_in_interpreter
from regard import Grid, Linear, Mask, Site
from regard.core import UnsupportedError
from regard.mixers.flatten import flatten, flatten_reference
from regard.mixers.inline import inline, inline_reference
from regard.mixers.linear import linear, linear_reference
from regard.mixers.mhla import mhla, mhla_reference
from regard.mixers.performer import orthogonal_features, performer, performer_reference
from regard.mixers.polaformer import polaformer, polaformer_reference

pytestmark = pytest.mark.untyped
CASES = {  # (B, H, N, M, d, e), feature, whether keys are hidden
    "elu": ((2, 3, 70, 130, 16, 16), "elu", False), "relu, hidden": ((2, 2, 5, 9, 20, 12), "relu", True),
    "many keys": ((1, 1, 33, 700, 8, 8), "elu", True), "wide": ((1, 2, 9, 40, 130, 70), "relu", False),
    "one token": ((3, 1, 1, 1, 3, 5), "elu", False), "identity": ((1, 2, 65, 64, 16, 1), "identity", False),
}  # fmt: skip


@elsewhere
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def drawn(name: str, dtype: torch.dtype = EXACT) -> tuple[list[Tensor], dict]:
    (batch, heads, queries, keys, width, out), feature, hidden = CASES[name]
    sizes = (batch, queries, heads, width), (batch, keys, heads, width), (batch, keys, heads, out)
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in draw(*sizes, dtype=dtype)]  # as heads are split
    if feature == "identity":  # of positive features, else a divisor may be near 0
        leaves = [leaves[0].detach().abs().requires_grad_(), leaves[1].detach().abs().requires_grad_(), leaves[2]]
    mask = Mask(keep=(torch.arange(keys, device=DEVICE) % 3 > 0).expand(batch, -1)) if hidden else None
    return leaves, {"feature": feature, "mask": mask}


@here
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str) -> None:
    leaves, options = drawn(name)
    check_close(partial(linear, execution="triton", **options), partial(linear_reference, **options), leaves)


@here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    leaves, options = drawn("elu", dtype)
    check_close(partial(linear, execution="triton", **options), partial(linear_reference, **options), leaves)


def performed(form: Callable, q: Tensor, *rest: Tensor, **more: object) -> Tensor:
    features = orthogonal_features(21, q.shape[-1], torch.Generator().manual_seed(0), q.dtype).to(q.device)
    return form(q, *rest, features, **more)


@here
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("form", "plain"),
    [
        (flatten, flatten_reference), (partial(performed, performer), partial(performed, performer_reference)),
        (lambda *x, **more: polaformer(*x, POWER, **more), lambda *x, **more: polaformer_reference(*x, POWER, **more)),
    ],
    ids=["flatten", "performer", "polaformer"],
)  # fmt: skip
def test_features_made_before(form: Callable, plain: Callable, masked: bool) -> None:
    leaves = draw((2, 2, 7, 6), (2, 2, 9, 6), (2, 2, 9, 5))
    mask = Mask(keep=(torch.arange(9, device=DEVICE) < 6).expand(2, -1)) if masked else None
    check_close(partial(form, execution="triton", mask=mask), partial(plain, mask=mask), leaves)


POWER = torch.full((2, 1, 6), 2.5, dtype=EXACT, device=DEVICE)


@here
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [9, 700])
def test_inline(keys: int, masked: bool) -> None:
    """Keys far from 0, whose mean must not take their last digits."""
    q, k, v = draw((2, 3, 70, 20), (2, 3, keys, 20), (2, 3, keys, 12))
    k = (k.detach() + 100).requires_grad_()
    keep = torch.arange(keys, device=DEVICE) < torch.tensor([[5], [keys]], device=DEVICE)
    mask = Mask(keep=keep) if masked else None
    check_close(partial(inline, execution="triton", mask=mask), partial(inline_reference, mask=mask), [q, k, v])


@here
@pytest.mark.parametrize("normalize", ["correct", "none"])
@pytest.mark.parametrize(
    ("grid", "m"),
    [(Grid(4, 6), 4), (Grid(7, 9, 2), (2, 3)), (Grid(5, 4, 1, 3), 1), (Grid(4, 4, 4, depth=2), (2, 2, 1))], ids=str,
)  # fmt: skip
def test_mhla(grid: Grid, m: int | tuple[int, ...], normalize: str) -> None:
    number = math.prod(m if isinstance(m, tuple) else (m,)) + bool(grid.extra)
    sizes = (2, 2, grid.tokens, 6), (2, 2, grid.tokens, 6), (2, 2, grid.tokens, 5), (number, number)
    q, k, v, mixing = draw(*sizes)
    leaves = [q, k, v, mixing.detach().abs().requires_grad_()]
    for mask in (None, Mask(keep=torch.rand(2, grid.tokens, device=DEVICE) > 0.3)):
        options = {"grid": grid, "m": m, "normalize": normalize, "mask": mask}
        check_close(partial(mhla, execution="triton", **options), partial(mhla_reference, **options), leaves)


@here
def test_blocks_longer_than_a_step() -> None:
    grid, options = Grid(16, 17), {"m": (1, 2)}
    leaves = draw((1, 2, 272, 16), (1, 2, 272, 16), (1, 2, 272, 16))
    mixing = torch.tensor([[0.5, 1.0], [2.0, 0.1]], device=DEVICE, dtype=EXACT)
    forms = (lambda *x, form=form, **more: form(*x, mixing.to(x[0].dtype), grid, **options, **more)
             for form in (mhla, mhla_reference))  # fmt: skip
    check_close(partial(next(forms), execution="triton"), next(forms), leaves)


@here
def test_hidden_keys_may_hold_anything_and_no_key_gives_zeros() -> None:
    (q, k, v), _ = drawn("elu")
    keep = torch.arange(130, device=DEVICE).expand(2, -1) < torch.tensor([[100], [0]], device=DEVICE)
    wild_k, wild_v = (x.detach().masked_fill(~keep[:, None, :, None], torch.nan).requires_grad_() for x in (k, v))
    out = linear(q, wild_k, wild_v, mask=Mask(keep=keep), execution="triton")
    assert torch.equal(out, linear(q, k, v, mask=Mask(keep=keep), execution="triton"))
    assert not out[1].any()
    dk, dv = torch.autograd.grad(out.sum(), (wild_k, wild_v))
    assert not dk[0, :, 100:].any()
    assert not dv[1].any()


@here
def test_nan_is_not_lost() -> None:
    (q, k, v), _ = drawn("relu, hidden")
    q.detach()[0, 0, 2, 3] = torch.nan
    for feature in ("elu", "relu"):
        out = linear(q, k, v, feature=feature, execution="triton")
        assert out[0, 0, 2].isnan().all()
        assert out.isnan().sum() == 12


@here
def test_no_image_and_no_channel() -> None:
    q, k, v = draw((0, 2, 4, 8), (0, 2, 4, 8), (0, 2, 4, 8))
    assert linear(q, k, v, execution="triton").shape == q.shape
    q, k, v = draw((2, 2, 4, 1), (2, 2, 4, 1), (2, 2, 4, 1))  # PolaFormer's second half has no channel
    check_close(
        lambda *x: polaformer(*x, POWER[..., :1], execution="triton"),
        lambda *x: polaformer_reference(*x, POWER[..., :1]), [q, k, v],
    )  # fmt: skip


@here
def test_a_layer_joins_heads_without_a_copy() -> None:
    layer = Linear().build(Site(32, 2, Grid(5, 5))).to(DEVICE, EXACT)
    x = torch.randn(2, 25, 32, device=DEVICE, dtype=EXACT)
    expected = layer(x, Grid(5, 5))
    layer.operator.execution = "triton"
    assert torch.allclose(layer(x, Grid(5, 5)), expected, atol=1e-5)
    (q, k, v), _ = drawn("elu")
    assert linear(q, k, v, execution="triton").transpose(1, 2).is_contiguous()


@here
def test_the_operators_keep_the_rules_of_pytorch() -> None:
    import regard.mixers.shared.linear_triton  # noqa: F401

    (q, k, v), _ = drawn("elu")
    keep, shift = torch.ones(2, 130, dtype=torch.int8, device=DEVICE), torch.ones(2, 3, 16, device=DEVICE, dtype=EXACT)
    blocks = [torch.arange(x.shape[2], dtype=torch.int32, device=DEVICE).view(2, -1) for x in (q, k)]
    for mask, moved, (of_q, of_k) in ((None, None, (None, None)), (keep, None, (None, None)), (None, shift, blocks)):
        torch.library.opcheck(torch.ops.regard.linear_sums, (k, v, mask, moved, of_k, "elu"))
        sums = torch.rand(6, 1 if of_q is None else 2, 16 * 16 + 32, device=DEVICE, dtype=EXACT, requires_grad=True)
        options = 16, EXACT, "elu", 1e-6, of_q is None, of_q is not None
        torch.library.opcheck(torch.ops.regard.linear_outputs, (q, sums, of_q, *options))


@here
def test_no_second_derivative() -> None:
    leaves, _ = drawn("elu")
    out = linear(*leaves, execution="triton")
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        first.sum().backward()


@here
def test_wide_values_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="at most 128 channels a head, not 129"):
        linear(*draw((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 129)), execution="triton")


@elsewhere
def test_without_a_gpu() -> None:
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        linear(*draw((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4)), execution="triton")
