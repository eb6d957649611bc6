"""Random numbers of the tests of mechanisms are the same each time."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
