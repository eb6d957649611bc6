"""Segmenters from any host, on rectangular images, with mechanisms in the right places."""

import pytest
import torch
import torch.nn.functional as F

from regard.core import ConfigError
from regard.explain.pictures import attention_maps
from regard.explain.views import available_views
from regard.measure.cost import count_macs
from regard.mixers.spelling import parse_mixer
from regard.models.segmentation import VOID, make_segmenter
from regard.models.segmentation.segmenter import pixel_loss
from regard.swapping.shared_state import swapped_layers


@pytest.mark.parametrize(
    ("host", "head", "size"),
    [
        ("vit_desk(patch=7)", "linear", (28, 42)),
        ("vit_desk(patch=7)", "pixels", (28, 42)),
        ("deit_tiny_patch16_224(depth=2)", "mask", (32, 64)),
        ("xcit_desk(patch=4)", "depict", (16, 24)),
        ("skaformer_desk", "cbt", (64, 96)),
        ("swin_tiny_patch4_window7_224(depths=(1, 1))", "conv", (56, 112)),
        ("resnet18", "conv", (64, 96)),
        ("vit_desk", "conv", (16, 24)),
    ],
)  # fmt: skip
def test_every_pixel_has_scores(host: str, head: str, size: tuple[int, int]) -> None:
    model = make_segmenter(host, None, head, classes=3, size=size)
    images = torch.randn(2, 3, *size)
    assert model.eval()(images).shape == (2, 3, *size)
    loss = model.train()(images, torch.randint(0, 3, (2, *size), dtype=torch.uint8))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())


def test_a_token_map_is_the_hosts_normalised_tokens() -> None:
    model = make_segmenter("deit_tiny_patch16_224(depth=2)", None, "linear", classes=3, size=(32, 64)).eval()
    host = model.encoder.model
    images = torch.randn(1, 3, 32, 64)
    expected = host.forward_features(images)[0, 1:]  # type: ignore[operator, union-attr]  # without the class token
    (got,) = model.encoder(images)
    for row in range(2):
        for column in range(4):
            assert torch.allclose(got[0, :, row, column], expected[4 * row + column], atol=1e-5)


def test_mechanisms_are_in_the_encoder_alone() -> None:
    model = make_segmenter("vit_desk(patch=7)", parse_mixer("MiTA(m=4, k=4)"), "mask", classes=3, size=(28, 42))
    assert [name.partition(".")[0] for name in swapped_layers(model)] == ["encoder"] * 4


def test_the_extra_module_follows_the_backbone() -> None:
    host = "attended_resnet18(stages=(4,))"
    config = parse_mixer("Factors(terms='0010')")
    without = make_segmenter(host, config, "conv", classes=3, size=(64, 96))
    model = make_segmenter(host, config, "conv(attention=True)", classes=3, size=(64, 96))
    assert set(swapped_layers(model)) - set(swapped_layers(without)) == {"head.attn"}
    removed = make_segmenter(host, None, "conv(attention=True)", classes=3, size=(64, 96), removed=True)
    assert removed.eval()(torch.randn(1, 3, 64, 96)).shape == (1, 3, 64, 96)


def test_output_stride_dilates() -> None:
    model = make_segmenter("resnet50(output_stride=8)", None, "conv", classes=3, size=(64, 96))
    assert [tuple(x.shape) for x in model.encoder(torch.randn(1, 3, 64, 96))] == [(1, 1024, 8, 12), (1, 2048, 8, 12)]


def test_macs_of_esas_segmentation_network() -> None:
    """Zhu et al. 2019, Table 2: 449.5 GMACs without attention on Cityscapes crops of 769 x 769; the auxiliary head is
    used in training only."""
    with torch.device("meta"):
        model = make_segmenter("attended_resnet50(output_stride=8)", None, "conv", classes=19, size=(769, 769))
        macs = count_macs(model, torch.zeros(1, 3, 769, 769))
    assert macs / 1e9 == pytest.approx(449.5, rel=0.005)


def test_the_loss_leaves_void_pixels_out() -> None:
    torch.manual_seed(0)
    scores, masks = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5)).to(torch.uint8)
    masks[0, :2] = VOID
    by_hand = [
        -scores[n, :, y, x].log_softmax(0)[masks[n, y, x].long()]
        for n in range(2) for y in range(4) for x in range(5) if masks[n, y, x] != VOID
    ]  # fmt: skip
    assert torch.allclose(pixel_loss(scores, masks), torch.stack(by_hand).mean())
    assert pixel_loss(scores, torch.full_like(masks, VOID)) == 0


def test_the_auxiliary_loss_has_weight_two_fifths() -> None:
    model = make_segmenter("resnet18", None, "conv(dropout=0.0)", classes=3, size=(64, 96)).eval()
    images, masks = torch.randn(1, 3, 64, 96), torch.randint(0, 3, (1, 64, 96)).to(torch.uint8)
    before, _ = model.encoder(images)
    auxiliary = F.interpolate(model.head.auxiliary(before), (64, 96), mode="bilinear")  # type: ignore[operator]
    expected = pixel_loss(model(images), masks) + 0.4 * pixel_loss(auxiliary, masks)
    assert torch.allclose(model(images, masks), expected)


@pytest.mark.parametrize(
    ("host", "head", "size", "message"),
    [
        ("vit_desk", "cpt", (16, 24), "no head 'cpt'.*cbt"),
        ("vit_desk", "cbt(layer=2)", (16, 24), "head cbt.layer=2. cannot be built.*layer"),
        ("resnet18", "pixels", (50, 70), "square patches: resnet18 has 2x3 tokens for images of 50x70"),
    ],
)
def test_a_wrong_head_is_one_line(host: str, head: str, size: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_segmenter(host, None, head, classes=3, size=size)


def test_attention_of_a_segmenter_can_be_shown() -> None:
    vit = make_segmenter("vit_desk(patch=7)", parse_mixer("Softmax()"), "mask", classes=3, size=(28, 42))
    assert available_views(vit) == ("maps",)
    maps = attention_maps(vit.eval(), torch.randn(3, 28, 42))
    assert len(maps["layers"]) == 4
    assert available_views(make_segmenter("resnet18", None, "conv", classes=3, size=(64, 96))) == ()
