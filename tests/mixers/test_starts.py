"""Where parameters start, which are kept out of weight decay, and what autocast must not round: for the mechanisms."""

import pytest
import torch
from torch import Tensor

from regard import Grid, Site, parse
from regard.mixers.performer import orthogonal_features
from regard.ops import (
    flatten,
    inline,
    linear,
    mhla,
    nsa,
    performer,
    polaformer,
    pool_landmarks,
    sample_points,
    ttt,
    ttt_conv,
)
from regard.testing.subject import gap

SITE = Site(64, 2, Grid(8, 8, 1, 1))
SMALL = 0.02
STARTS: dict[str, dict[str, float]] = {
    "FLatten()": {"sigma": 0, "positions.cells": 0, "positions.extra": 0},
    "PolaFormer(position=True)": {"sigma": 0, "w": 0, "positions.cells": 0, "positions.extra": 0},
    "Agent(m=49, bias=True)": {
        f"{part}.{name}": SMALL for part in ("collect", "read") for name in ("table", "rows", "columns", "extra")
    },
    'Linformer(m=16, init="normal")': {
        f"project_{part}.{name}": SMALL for part in "kv" for name in ("cells", "extra")
    },
    "Linformer(m=16)": {f"project_{part}.{name}": 48**-0.5 for part in "kv" for name in ("cells", "extra")},
    'MiTA(m=16, landmarks="learned")': {"extract.landmarks": SMALL},
    "Window()": {"table": 0},
    "Neighbourhood()": {"table": 0},
    "DAT()": {"table": 0.01, "offset.weight": 192**-0.5},
    'DAT(init="zero")': {"table": 0, "offset.weight": 0},
    "ViT3()": {"w1": SMALL, "w2": SMALL, "w3": SMALL},
    "DeformableConv(version=2)": {"offset.weight": 0, "offset.bias": 0},
    "DeformableConv(axes=1)": {"offset.weight": 0, "offset.bias": 0},
    "DynamicConv(kernel_bias=True)": {
        "enter.weight": (2 / 192) ** 0.5, "enter.bias": 0, "kernels.bias": 0, "leave.weight": 64**-0.5, "leave.bias": 0,
    },
    'Factors(preset="transformer_xl")': {"positions_x": SMALL, "positions_y": SMALL},
    "Factors()": {"u": 192**-0.5, "t": 192**-0.5, "positions_x": 32**-0.5, "positions_y": 32**-0.5},
}  # fmt: skip


@pytest.mark.parametrize("text", STARTS)
def test_parameters_start_with_their_standard_deviation_also_when_drawn_again(text: str) -> None:
    torch.manual_seed(0)
    config = parse(text)
    layer = config.build(Site(64, 2, Grid(1, 64, 1)) if "axes=1" in text else SITE)
    part = next(getattr(layer, name) for name in ("operator", "inner", "conv", "enter") if hasattr(layer, name))
    part = layer if text.startswith("DynamicConv") else part
    for again in (False, True):
        if again:
            for module in part.modules():
                for parameter in module.parameters(recurse=False):
                    torch.nn.init.constant_(parameter, 7.0)
                if list(module.parameters(recurse=False)):
                    module.reset_parameters()
        for name, deviation in STARTS[text].items():
            x = part.get_parameter(name).detach()
            if deviation == 0:
                assert not x.any(), name
            else:
                allowed = 4 * deviation / x.numel() ** 0.5
                assert abs(x.mean()) < allowed, name
                assert abs(x.std() - deviation) < allowed, name


UNDECAYED = {
    "FLatten()": {"sigma", "positions.cells", "positions.extra"},
    "PolaFormer(position=True)": {"sigma", "w", "positions.cells", "positions.extra"},
    "Agent(m=16, bias=True)": {
        f"{part}.{name}" for part in ("collect", "read") for name in ("table", "rows", "columns", "extra")
    },
    "Window()": {"table"},
    "Window(table=False)": set(),
    "DAT()": {"table"},
    "DAT(table=False)": set(),
    "XCA()": {"temperature"},
    "XCA(decay_temperature=True)": set(),
    "SKA()": {"keys", "extra_keys"},
    "CSKA()": {"weight", "bias", "col_keys", "row_keys", "extra_row_keys"},
    'CSKA(reading="key")': {"extra_keys"},
    "Neighbourhood()": {"table"},
    "MHLA(m=16)": {"mixing"},
    "Linear(norm='rms')": set(),
    "Linformer(m=16)": set(),
}


@pytest.mark.parametrize("text", UNDECAYED)
def test_which_parameters_are_kept_out_of_weight_decay(text: str) -> None:
    found = set()
    for prefix, module in parse(text).build(SITE).operator.named_modules():
        names = module.no_weight_decay() if hasattr(module, "no_weight_decay") else set()
        found |= {f"{prefix}.{name}".removeprefix(".") for name in names}
    assert found == UNDECAYED[text]


def sampled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    image = v.flatten(0, 1).mT.unflatten(-1, (4, 6))
    return sample_points(image, 5 * torch.sigmoid(q[..., :2].flatten(0, 1)))


def convolved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ttt_conv(*(x.flatten(0, 1).mT.unflatten(-1, (4, 6)) for x in (q, k, v)), torch.ones(8, 3, 3))


@pytest.mark.parametrize(
    "run",
    [
        flatten,
        inline,
        linear,
        lambda q, k, v: polaformer(q, k, v, torch.full((2, 1, 8), 3.0)),
        lambda q, k, v: performer(q, k, v, orthogonal_features(16, 8, torch.Generator().manual_seed(0))),
        lambda q, k, v: mhla(q, k, v, torch.eye(6) + 0.1, Grid(4, 6), 6),
        lambda q, k, v: ttt(q, k, v, torch.full((2, 8, 8), 0.1)),
        convolved,
        sampled,
        lambda q, k, v: nsa(q, k, v, torch.ones(3, 2, 24, 3), Grid(4, 6), 4, 2, 3, execution="dense"),
        lambda q, k, v: pool_landmarks(q, Grid(4, 6), (3, 4)),
    ],
    ids=["flatten", "inline", "linear", "polaformer", "performer", "mhla", "ttt", "ttt_conv", "dat", "nsa", "pooling"],
)
def test_sums_are_not_rounded_under_autocast(run) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 3, 2, 24, 8).unbind()
    expected = run(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*inputs)
    assert gap(out.float(), expected) < 1e-6 * expected.abs().max().item()
