"""What tells an export from a compilation."""

import pytest
import torch
from torch import Tensor, nn

from regard.core.tensors import is_exporting

pytestmark = pytest.mark.untyped


class Told(nn.Module):
    """Adds one, or ten where it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (10 if is_exporting() else 1)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_one(strict: bool) -> None:
    assert torch.export.export(Told(), (torch.zeros(1),), strict=strict).module()(torch.zeros(1)).item() == 10


def test_a_compilation_and_a_call_are_none() -> None:
    """In PyTorch 2.11 a compilation is one for `torch.compiler.is_exporting()`."""
    assert torch.compile(Told(), backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1
    assert Told()(torch.zeros(1)).item() == 1
