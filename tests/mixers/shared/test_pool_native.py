"""The compiled kernel of window means against the matrix of the same windows."""

import pytest
import torch
from torch import Tensor

from kernels import needs_kernels, opcheck
from operators import check_same
from regard import Grid
from regard.mixers.shared.landmarks import pool_matrix
from regard.ops import pool_landmarks
from regard.testing.subject import gap

pytestmark = needs_kernels


@pytest.mark.parametrize("policy", ["adaptive", "partition"])
@pytest.mark.parametrize(
    ("grid", "m"), [(Grid(14, 14), 25), (Grid(5, 7, 2), (2, 3)), (Grid(1, 9), 4), (Grid(6, 6), 36)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["contiguous", "packed"])
def test_it_equals_a_matrix(grid: Grid, m: int, policy: str, packed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, grid.tokens, 3, 4, 5, dtype=torch.float64).unbind(2)[1].transpose(1, 2)
    x = (x if packed else x.contiguous()).detach().requires_grad_()
    exact = pool_matrix(grid, m, policy=policy, dtype=x.dtype) @ x
    check_same(pool_landmarks(x, grid, m, policy=policy), exact, (x,), 1e-14, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(1, 1, 1024, 4).to(dtype)
    exact = pool_landmarks(x.float(), Grid(32, 32), 1)
    assert torch.equal(pool_landmarks(x, Grid(32, 32), 1), exact.to(dtype))


def test_its_gradient_is_differentiable_and_it_runs_under_vmap() -> None:
    x = torch.randn(2, 1, 12, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return torch.ops.regard.pool(x, [0, 4, 2, 2, 0, 2, 1, 3, 0, 3, 2, 4])

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))
    mapped = torch.vmap(run)(torch.stack([x, 2 * x]))
    assert gap(mapped[1], 2 * run(x)) < 1e-14


@pytest.mark.untyped
def test_opcheck() -> None:
    x = torch.randn(2, 3, 13, 4, requires_grad=True)
    opcheck("pool", x, [1, 4, 2, 2, 0, 2, 1, 3, 0, 3, 2, 4])
