"""Routed attention in float16, whose products of queries and keys exceed its range."""

import pytest
import torch

from regard import Grid
from regard.ops import mita, moba

GRID = Grid(16, 16)
FORMS = {
    "MiTA with two experts": lambda q, k, v: mita(q, k, v, q[:, :, ::32], 9, experts=2),
    "MiTA, dense": lambda q, k, v: mita(q, k, v, q[:, :, ::32], 9, experts=2, execution="dense"),
    "MoBA": lambda q, k, v: moba(q, k, v, GRID, 4, 2),
    "MoBA, gathered": lambda q, k, v: moba(q, k, v, GRID, 4, 2, execution="gather"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_logits_beyond_the_range_of_float16(name: str, autocast: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 256, 64, generator=generator).half() for _ in range(3))
    q, k, form = 300 * q, 300 * k, FORMS[name]
    assert (q.double() @ k.double().mT).abs().max() > 65504 * 8  # also after the scale
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = form(q, k, v)
    torch.testing.assert_close(out.double(), form(q.double(), k.double(), v.double()), atol=4e-3, rtol=0)
