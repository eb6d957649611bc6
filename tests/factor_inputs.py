"""What the operator function of the four factors is called with, its executions, and the places of its paper."""

import itertools
from typing import Any

import torch
from torch import Tensor

from regard import Grid, MixerConfig, Site

TERMS = ["".join(flags) for flags in itertools.product("01", repeat=4)]
DETECTION = ((50, 84, 256, 6), (25, 42, 512, 3)), 213.7
SEGMENTATION = ((96, 96, 256, 6), (96, 96, 512, 4)), 449.5
"""Zhu et al. 2019: height, width, channels and number of modules in conv4 and conv5 of a ResNet-50; other GMAC."""


def executions(terms: str) -> list[str]:
    """Those that can compute the terms: the product over the axes knows no E1."""
    return ["auto", "compressed", "materialised", *(["factorised"] if terms[0] == "0" else [])]


def inputs(
    terms: str,
    grid: Grid,
    stride: int = 1,
    query_stride: int = 1,
    *,
    batch: int = 3,
    heads: int = 2,
    d: int = 4,
    e: int = 6,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """q, k and v, and the other arguments, with tables of any numbers. grid: the map; strides: of which cells."""
    torch.manual_seed(0)
    queries, keys = grid.every(query_stride), grid.every(stride)
    shapes = {"q": (queries.tokens, d), "k": (keys.tokens, d), "v": (keys.tokens, e)}
    made = {name: torch.randn(batch, heads, *shape, dtype=dtype) for name, shape in shapes.items()}
    tables = tuple(torch.randn(heads, 2 * side - 1, d, dtype=dtype) for side in (grid.width, grid.height))
    u, t = torch.randn(2, heads, d, dtype=dtype)
    rest = {"terms": terms, "grid": queries, "tables": tables, "u": u, "t": t, "stride": stride}
    return made, rest if query_stride == 1 else rest | {"query_stride": query_stride, "key_grid": keys}


def paper_gmacs(config: MixerConfig, of: tuple[Any, float], accounting: str = "paper") -> float:
    """Of a whole network with the mechanism in its places."""
    places, others = of
    sites = [(count, Site(dim, 8, Grid(height, width), qkv_bias=False)) for height, width, dim, count in places]
    return others + sum(count * config.cost(site, accounting=accounting).macs for count, site in sites) / 1e9
