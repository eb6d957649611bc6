"""Embeddings beside independent modules: torch's MLP, timm's MLP, torch's own multi-head attention."""

import pytest
import torch
from torch import nn

from regard.core import Grid, Site
from regard.mixers.softmax import Softmax
from regard.projections.sne import FSNE, PSNE, SNE

F64 = torch.float64
SITE = Site(dim=12, heads=3, grid=Grid(3, 5, 1))


def drawn(config):
    torch.manual_seed(0)
    made = config.build(SITE, "qkv").double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made, torch.randn(3, 16, 12, dtype=F64)


def flat(y):
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_sne_is_a_sequential_of_torch_for_each_role(layers, activation):
    width = {"width": 7} if layers > 1 else {}
    made, x = drawn(SNE(layers=layers, activation=activation, **width))
    sizes = [12, *[7] * (layers - 1), 12]
    for i, y in enumerate(made(x, "qkv")):
        modules = []
        for j in range(layers):
            one = nn.Linear(sizes[j], sizes[j + 1], dtype=F64)
            rows = slice(i * sizes[j + 1], (i + 1) * sizes[j + 1])
            one.load_state_dict(
                {"weight": getattr(made, f"weight{j + 1}")[rows], "bias": getattr(made, f"bias{j + 1}")[rows]}
            )
            modules += [one, nn.ReLU() if activation == "relu" else nn.GELU()]
        assert torch.allclose(flat(y), nn.Sequential(*modules[:-1])(x), atol=1e-12)


def test_sne_and_psne_are_the_mlp_of_timm():
    layers = pytest.importorskip("timm.layers")
    for config, shared in ((SNE(width=7), False), (PSNE(width=7), True)):
        made, x = drawn(config)
        for i, y in enumerate(made(x, "qkv")):
            mlp = layers.Mlp(12, 7, 12, act_layer=nn.ReLU).double()
            second = slice(0, 12) if shared else slice(12 * i, 12 * i + 12)
            mlp.load_state_dict(
                {
                    "fc1.weight": made.weight1[7 * i : 7 * i + 7],
                    "fc1.bias": made.bias1[7 * i : 7 * i + 7],
                    "fc2.weight": made.weight2[second],
                    "fc2.bias": made.bias2[second],
                }
            )
            assert torch.allclose(flat(y), mlp(x), atol=1e-12)


@pytest.mark.parametrize("config", [SNE(), PSNE(), FSNE(code=5)])
def test_attention_on_embeddings_is_torchs_attention_on_the_same_roles(config):
    """nn.MultiheadAttention with identity input projections gets q, k, v from the embedding."""
    torch.manual_seed(0)
    layer = Softmax(projection=config).build(SITE).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 16, 12, dtype=F64)
    own = nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64)
    own.load_state_dict(
        {
            "in_proj_weight": torch.eye(12, dtype=F64).repeat(3, 1),
            "in_proj_bias": torch.zeros(36, dtype=F64),
            "out_proj.weight": layer.proj.weight,
            "out_proj.bias": layer.proj.bias,
        }
    )
    q, k, v = (flat(y) for y in layer.project(x, "qkv"))
    assert torch.allclose(layer(x, SITE.grid), own(q, k, v, need_weights=False)[0], atol=1e-12)
