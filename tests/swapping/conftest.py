"""The small hosts as a fixture."""

import pytest
import torch

from small_hosts import HOSTS, Small, spread


@pytest.fixture(params=HOSTS)
def small(request: pytest.FixtureRequest) -> Small:
    """A small host in evaluation mode, float64, and its input; the layer scales are not at zero."""
    torch.manual_seed(0)
    model, x = HOSTS[request.param]()
    spread(model)
    return model.double().eval(), x.double()
