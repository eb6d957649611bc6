"""Every option of every mechanism has an effect: a layer with it computes something else, in both of its forms."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Grid, MixerConfig, Site, parse
from regard.core import ConfigError
from regard.mixers import MIXERS
from regard.mixers.shared.heads import HeadMixerConfig
from regard.testing.subject import gap, perturb
from samples import texts

GRID, LARGER, LINE = Grid(4, 6, 1, 1), Grid(6, 9, 1, 1), Grid(1, 14, 1)
SHARED = {field.name for field in fields(HeadMixerConfig)}  # tests/mixers/shared/test_heads.py
FORMS = {("Factors", "execution"), ("CSKA", "path")}  # the same numbers in another way
NUMBER = {"scale": 0.9}

CHANGES: dict[str, dict[str, Any]] = {
    "Softmax()": NUMBER,
    "Factors()": {
        "terms": "1011", "scale": 0.3, "window": 3, "stride": 2, "query_stride": 2, "positions": 8, "base": 9.0,
        "magnitude": 0.5, "sign": -1, "position_scale": 0.5, "preset": "mmcv", "axes": 1,
    },
    "SKA()": {"scale": 0.9, "resize": "window", "activation": "relu", "heads": 4, "init": "paper"},
    'SKA(activation="gelu")': {"normalise": "1/N"},
    "CSKA()": {
        "scale": 0.9, "resize": "window", "activation": "relu", "heads": 4, "init": "paper", "kernel": 1,
        "rows": "centre", "cols": "conv", "factorised": True, "bias": False, "reading": "key", "stride": 2,
    },
    'CSKA(activation="gelu")': {"normalise": "1/N"},
    'CSKA(reading="key")': {"scale": 0.9, "init": "paper", "kernel": 1, "bias": False},
    "XCA()": {},
    "Linear()": {"feature": "relu", "norm": "rms", "eps": 0.5},
    "FLatten()": {"power": 2.0, "over": "head", "position": False, "local": 3, "eps": 0.5},
    "PolaFormer()": {"alpha": 2.0, "position": True, "local": 3, "eps": 0.5},
    "MHLA(m=4)": {"m": 6, "init": "exp", "normalize": "none", "norm": True, "eps": 0.5},
    "InLine()": {"scale": 0.9, "residual": True},
    "Performer()": {"features": 12, "kernel": "relu", "eps": 0.5},
    "ViT3()": {"inner": "linear", "local": False, "lr": 0.5, "clip": False},
    "ViT3(local=False)": {"batch": 5, "loss": "squared"},
    "Agent(m=4)": {"m": 6, "bias": True, "landmarks": "avg1d", "preset": "official"},
    "Linformer(m=4)": {"m": 6, "share": "kv", "per_head": True, "init": "normal", "scale": 0.9},
    "Nystrom(m=4)": {"m": 6, "landmarks": "avg2d", "iterations": 3, "start": "batch", "kernel": 3},
    "PVT()": {"ratio": 3, "pool": 2},
    "TopK(k=5)": {"k": 6, "scale": 0.9, "indexer": "lightning"},
    'TopK(k=5, indexer="lightning")': {"index_heads": 2, "index_width": 4},
    'TopK(k=5, indexer="spark", rank=3)': {"rank": 5, "statistical": True},
    "BRA(regions=2, k=1)": {"regions": 3, "k": 2, "scale": 0.9, "preset": "official"},
    "MoBA(block=(2, 2), k=1)": {"block": 4, "k": 2, "own": False, "scale": 0.9},
    "Routing(clusters=3)": {"clusters": 4, "scale": 0.9},
    "Reformer(chunk=4)": {"chunk": 6, "rounds": 2, "duplicates": "every", "scale": 0.9, "seed": 1},
    "DAT(stride=2)": {"stride": 1, "groups": 2, "kernel": 3, "reach": 0.2, "table": False, "init": "zero"},
    "Window(size=2)": {"size": 3, "pattern": "grid", "shift": 1, "table": False, "scale": 0.9},
    "MiTA(m=4, k=5)": {
        "m": 6, "k": 6, "experts": 2, "branches": "route", "landmarks": "avg1d", "preset": "official",
        "shared_expert": "ttt",
    },
    "MiTA(m=4, k=9, experts=3)": {"duplicates": "union"},
    "MiTA(m=(3, 4), k=5)": {"windows": "partition"},
    "NSA()": {"block": 3, "k": 2, "window": 5, "group": 2, "scale": 0.9},
    "Conv()": {"kernel": 5, "axes": 1, "extra": "zero", "groups": 4, "dilation": 2},
    "Conv(axes=1)": {"causal": True},
    "DeformableConv()": {
        "kernel": 5, "axes": 1, "extra": "zero", "version": 2, "groups": 4, "dilation": 2, "offset_kernel": 1,
    },
    "DeformableConv(axes=1)": {"causal": True},
    "DeformableConv(version=2)": {"mask_init": 0.5},
    "DynamicConv(kernel=3)": {
        "kernel": 5, "axes": 1, "extra": "zero", "groups": 4, "glu": False, "renorm_padding": True, "kernel_bias": True,
    },
    "DynamicConv(kernel=3, axes=1)": {"causal": True},
}  # fmt: skip
"""Spelling -> options and other values, each alone. A mechanism that is not here has those of its `samples`."""


def sampled(kind: type[MixerConfig]) -> dict[str, dict[str, Any]]:
    """What the further samples of a mechanism change in its first one."""
    spelled = texts(kind)
    first, *further = map(parse, spelled)
    found = {
        field.name: getattr(sample, field.name)
        for sample in further
        for field in fields(kind)
        if field.name not in SHARED and getattr(sample, field.name) != getattr(first, field.name)
    }
    return {spelled[0]: found}


LISTED = {type(parse(base)) for base in CHANGES}
ALL = CHANGES | {base: found for kind in MIXERS if kind not in LISTED for base, found in sampled(kind).items()}
PAIRS = [(base, name, value) for base, changes in ALL.items() for name, value in changes.items()]


@cache
def first_outputs(base: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Those of the configuration that options change."""
    return outputs(parse(base))


def outputs(config: MixerConfig, state: dict[str, Tensor] | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs on the grid of the build and on a larger one, and the parameters. state: used if its shapes fit.

    The fast and the plain form must agree: one of them could ignore an option in one of its branches.
    """
    torch.manual_seed(0)
    line = getattr(config, "axes", 2) == 1
    layer = perturb(config.build(Site(16, 2, LINE if line else GRID)))
    own = layer.state_dict()
    if state is not None and {n: x.shape for n, x in own.items()} == {n: x.shape for n, x in state.items()}:
        layer.load_state_dict(state)
    grids = (LINE, Grid(1, 20, 1)) if line else (GRID, LARGER)
    found = []
    for grid in grids:
        torch.manual_seed(1)
        x = torch.randn(3, grid.tokens, 16, dtype=torch.float64)
        found.append(layer(x, grid))
        assert gap(found[-1], layer.reference(x, grid)) < 1e-9
    return found, own


@pytest.mark.parametrize(("base", "name", "value"), PAIRS, ids=str)
def test_every_option_changes_what_a_layer_computes(base: str, name: str, value: Any) -> None:
    second = replace(parse(base), **{name: value})
    before, state = first_outputs(base)
    after, other = outputs(second, None if name in ("init", "seed") else state)
    if name == "axes":  # on other grids
        assert {n: x.shape for n, x in state.items()} != {n: x.shape for n, x in other.items()}
    else:
        largest = max(gap(x, y) for x, y in zip(before, after, strict=True))
        assert largest > 1e-4, f"{name}={value!r} changes nothing in {base}, with equal parameters"


UNUSED = (
    "Factors(terms='1000', positions=8)", "Factors(terms='0010', sign=-1)", "Factors(terms='0000', base=10.0)",
    "Factors(terms='1010', magnitude=2.0)", "Factors(terms='1010', position_scale=0.5)",
    "Nystrom(iterations=None, start='batch')", "MHLA(normalize='none', eps=0.5)",
    "MiTA(branches='compress', experts=2)",
)  # fmt: skip


@pytest.mark.parametrize("spelling", UNUSED)
def test_an_option_that_nothing_uses_is_refused(spelling: str) -> None:
    with pytest.raises(ConfigError, match=r"\w+=.* belongs to .*; remove it"):
        parse(spelling)


def test_no_option_is_left_out() -> None:
    changed = {(type(parse(base)).__name__, name) for base, name, _ in PAIRS}
    options = {(kind.__name__, field.name) for kind in MIXERS for field in fields(kind) if field.name not in SHARED}
    assert options - changed == FORMS | {("XCA", "decay_temperature"), ("Routing", "decay")}
