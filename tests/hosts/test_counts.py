"""Parameter integers of hosts and swaps, from the reference's derivations."""

import pytest
import torch

from regard.hosts.swap import create_model, parse_host, spell_host
from regard.mixers.ska import SKA
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from regard.projections.sne import FSNE, PSNE, SNE

COUNTS = [
    ("vit_s_32", None, 9_523_722),
    ("vit_s_32", Softmax(), 9_523_722),
    ("vit_s_32", SKA(), 8_150_538),
    ("vit_s_32_spt", None, 9_622_512),
    ("vit_s_32_spt(num_classes=100)", None, 9_668_682),
    ("vit_s_32_spt", SKA(), 8_249_322),
    ("deit_tiny_patch16_224", None, 5_717_416),
    ("deit_tiny_patch16_224", SKA(), 5_726_632),
    ("deit_tiny_patch16_224", Softmax(projection=SNE(width=96)), 5_720_872),
    ("deit_tiny_patch16_224", Softmax(projection=PSNE(width=144)), 5_717_992),
    ("deit_tiny_patch16_224", Softmax(projection=FSNE(code=8, width=192)), 5_291_200),
    ("xcit_nano_12_p16_224", XCA(), 3_053_224),
    ("xcit_nano_12_p16_224", XCA(projection=SNE(width=64)), 3_055_528),
    ("xcit_nano_12_p16_224", XCA(projection=PSNE(width=96)), 3_053_608),
    ("xcit_nano_12_p16_224", XCA(projection=FSNE(code=8, width=128)), 2_867_392),
    ("xcit_nano_12_p16_224(num_classes=100)", None, 2_937_124),
]


@pytest.mark.parametrize(("host", "mixer", "count"), COUNTS, ids=lambda value: str(value)[:60])
def test_parameters(host, mixer, count):
    assert sum(value.numel() for value in create_model(host, mixer).parameters()) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "mixer", "count"),
    [
        ("deit_small_patch16_224", None, 22_050_664),
        ("deit_small_patch16_224", SKA(), 21_184_360),
        ("swin_tiny_patch4_window7_224", Softmax(), 28_288_354),
        ("swin_tiny_patch4_window7_224", SKA(), 26_343_778),
        ("caformer_s18", Softmax(), 26_341_656),
        ("xcit_tiny_12_p16_224", XCA(projection=FSNE(code=8, width=192)), 6_290_056),
    ],
    ids=lambda value: str(value)[:60],
)
def test_parameters_of_larger_hosts(host, mixer, count):
    assert sum(value.numel() for value in create_model(host, mixer).parameters()) == count


def test_vit_desk_is_what_its_spelling_says():
    model = create_model("vit_desk(size=(8, 12), patch=4, dim=32, depth=2, heads=2)", None, num_classes=7, in_chans=1)
    assert model(torch.randn(2, 1, 8, 12)).shape == (2, 7)
    assert model.cls_token is None
    assert model.blocks[0].attn.qkv.bias is None
    assert len(model.blocks) == 2
    table = model.pos_embed.detach().reshape(2, 3, 32)
    assert torch.allclose(table[1, 0, 0], 0.5 * torch.tensor(1.0).sin())  # rows first
    assert torch.equal(table[0, :, :8], table[0, :1, :8].expand(3, -1))
    assert create_model("vit_desk(size=32)", None, img_size=16).pos_embed.shape == (1, 16, 64)


def test_shifted_patches_hold_the_image_and_its_shifts():
    model = create_model("vit_s_32_spt", None)
    shifted = model.patch_embed.proj
    x = torch.zeros(1, 3, 32, 32)
    x[0, 0, 3, 8] = 1.0  # the lowest row of patch (0, 2): the downward shift moves it into patch (1, 2)
    changed = (shifted(x) - shifted(torch.zeros_like(x))).abs().amax(1)[0] > 1e-6
    assert {tuple(cell) for cell in changed.nonzero().tolist()} == {(0, 2), (1, 2), (0, 1)}


def test_locality_attention_does_not_look_at_itself():
    attention = create_model("vit_s_32_spt", None).eval().blocks[0].attn
    x = torch.randn(1, 5, 512)
    y = x.clone()
    y[0, 2] += 1.0
    logits_free = attention.qkv.weight.detach().clone()
    with torch.no_grad():
        attention.qkv.weight[:1024] = 0.0  # uniform over the others
    a, b = attention(x), attention(y)
    assert torch.allclose(a[0, 2], b[0, 2], atol=1e-6)
    assert not torch.allclose(a[0, 1], b[0, 1], atol=1e-6)
    assert logits_free.shape == (1536, 512)


@pytest.mark.parametrize("text", ["vit_desk", "vit_desk(size=(8, 12), dim=32)", "vit_tiny_patch16_224(qkv_bias=False)"])
def test_hosts_are_spelled_as_they_are_read(text):
    assert spell_host(*parse_host(text)) == text
