"""The small hosts as a fixture."""

import pytest
import torch

from small_hosts import HOSTS, HostAndInput, draw_large_weights


@pytest.fixture(params=HOSTS)
def small(request: pytest.FixtureRequest) -> HostAndInput:
    """A small host in evaluation mode, float64, and its input; the layer scales are not at zero."""
    torch.manual_seed(0)
    model, x = HOSTS[request.param]()
    draw_large_weights(model)
    return model.double().eval(), x.double()
