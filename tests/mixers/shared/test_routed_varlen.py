"""Routed attention by PyTorch's varlen attention: with a twin of its operators in plain PyTorch, and on a GPU."""

import pytest
import torch
from torch import Tensor

from operators import check_error
from regard.core import UnsupportedError
from regard.mixers.shared.routed import Parts
from regard.mixers.shared.routed_attention import attend
from regard.mixers.shared.routed_varlen import Sequences, Varlen, varlen


class Twin(Varlen):
    """The same results, sequence by sequence; like PyTorch's, its backward pass takes the output and lse as given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> tuple[Tensor, Tensor]:
        outs, sums = [], []
        for rows, keys in sequences(at):
            logits = q[rows] @ k[keys].mT
            outs.append(logits.softmax(-1) @ v[keys])
            sums.append(logits.logsumexp(-1))
        return torch.cat(outs), torch.cat(sums)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows, keys in sequences(at):
            weights = (q[rows] @ k[keys].mT - lse[rows, None]).exp()
            change = weights * (grad[rows] @ v[keys].mT - (grad[rows] * out[rows]).sum(-1, keepdim=True))
            dq[rows], dk[keys], dv[keys] = change @ k[keys], change.mT @ q[rows], weights.mT @ grad[rows]
        return dq, dk, dv


def sequences(at: Sequences) -> list[tuple[slice, slice]]:
    queries, keys = at.queries.tolist(), at.keys.tolist()
    pairs = zip(zip(queries, queries[1:], strict=False), zip(keys, keys[1:], strict=False), strict=True)
    return [(slice(*rows), slice(*columns)) for rows, columns in pairs]


def parts(shared: bool, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Parts:
    """Three experts, of which the first head never uses the last."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=dtype, device=device).requires_grad_() for n in (17, 13, 13))
    logits, values = (
        torch.randn(2, 2, n, c, dtype=dtype, device=device).requires_grad_() for n, c in ((17, 4), (4, 8))
    )
    keys = torch.rand(2, 2, 3, 13, device=device).topk(5).indices
    experts = torch.randint(3, (2, 2, 17, 1), device=device)
    experts[:, 0] %= 2
    return Parts(q, k, v, keys, experts, logits if shared else None, values if shared else None)


def check(case: Parts, out: Tensor, close: float) -> None:
    """Outputs and gradients beside those of the form with all logits; close: relative to the size of each tensor."""
    expected = attend("dense", case)
    leaves = [x for x in (case.q, case.k, case.v, case.shared, case.values) if x is not None]
    grad = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    for one, other in zip(found, (expected, *torch.autograd.grad(expected, leaves, grad)), strict=True):
        assert (one - other).norm() <= close * other.norm()


@pytest.mark.parametrize("shared", [True, False])
def test_the_twin_gives_outputs_and_gradients(shared: bool) -> None:
    case = parts(shared)
    check(case, varlen(case, Twin()), 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype, shared: bool) -> None:
    case = parts(shared, dtype, "cuda")
    check(case, varlen(case), 3e-2)


def test_what_it_cannot_do_is_refused() -> None:
    case = parts(True)
    check_error(UnsupportedError, 'needs a CUDA device.*use "auto"', attend, "varlen", case)
    several = Parts(case.q, case.k, case.v, case.keys, case.experts.expand(-1, -1, -1, 2))
    check_error(UnsupportedError, "one expert per query", varlen, several, Twin())
