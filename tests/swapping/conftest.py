"""The small hosts as a fixture."""

import pytest

from small_hosts import HOSTS, HostAndInput, with_large_weights


@pytest.fixture(params=HOSTS)
def small(request: pytest.FixtureRequest) -> HostAndInput:
    return with_large_weights(HOSTS[request.param])
