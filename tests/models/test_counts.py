"""Parameter integers of hosts and swaps: hard numbers, derived by hand from the papers and their code."""

import pytest
import timm
import torch
from torch import nn

from regard.core import ConfigError
from regard.lab.studies.derived_sizes import built, derived_counts, derived_rows
from regard.lab.studies.published_sizes import _gflops, build, printed_rows, published_counts, verdict
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse_mixer
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA
from regard.models.create import create_model, parse_host, spell_host
from regard.projections.sne import FSNE, PSNE, SNE
from regard.swapping.swap import remove, swap


def count(model):
    return sum(value.numel() for value in model.parameters())


COUNTS = [
    ("vit_s_32", None, 9_523_722),
    ("vit_s_32", Softmax(), 9_523_722),
    ("vit_s_32", SKA(), 8_150_538),
    ("vit_s_32_spt(num_classes=100)", None, 9_668_682),
    ("vit_s_32_spt", SKA(), 8_249_322),
    ("cait_s_32(num_classes=100)", None, 12_731_492),
    ("swin_t_32(num_classes=100)", None, 26_667_856),
    ("cvt_13(num_classes=100)", None, 19_650_980),
    ("cvt_13(num_classes=1000)", None, 19_997_480),
    ("cvt_13_32", None, 19_555_146),
    ("deit_tiny_patch16_224", None, 5_717_416),
    ("deit_tiny_patch16_224", SKA(), 5_726_632),
    ("xcit_nano_12_p16_224(num_classes=10)", None, 2_925_514),
    ("xcit_nano_12_p16_224(num_classes=100)", None, 2_937_124),
    ("xcit_nano_12_p16_224(num_classes=196)", None, 2_949_508),
]
SLOW = [
    ("cait_s_32(keep_talking=False)", SKA(), 11_308_298),
    ("swin_t_32", SKA(), 24_512_758),
    ("cvt_13(kv_stride=1)", SKA(), 18_041_930),
    ("cvt_13_32(kv_stride=1)", SKA(), 18_028_362),
    ("deit_tiny_patch16_224", Softmax(projection=SNE(width=96)), 5_720_872),
    ("deit_tiny_patch16_224", Softmax(projection=PSNE(width=144)), 5_717_992),
    ("deit_tiny_patch16_224", Softmax(projection=FSNE(code=8, width=192)), 5_291_200),
    ("deit_tiny_patch16_224", Softmax(projection=FSNE(code=8, width=282)), 5_715_640),
    ("deit_small_patch16_224", None, 22_050_664),
    ("deit_small_patch16_224", SKA(), 21_184_360),
    ("swin_tiny_patch4_window7_224", Softmax(), 28_288_354),
    ("swin_tiny_patch4_window7_224", SKA(), 26_343_778),
    ("xcit_nano_12_p16_224", XCA(projection=FSNE(code=8, width=186, tied=False)), 3_052_096),
    ("xcit_tiny_12_p16_224(num_classes=10)", None, 6_525_202),
    ("xcit_tiny_12_p16_224(num_classes=100)", None, 6_542_572),
    ("xcit_tiny_12_p16_224(num_classes=196)", None, 6_561_100),
    # convolutional static keys
    ("vit_s_32", "CSKA(cols='conv')", 9_950_778),
    ("vit_s_32", "CSKA()", 9_926_154),
    ("vit_s_32", "CSKA(rows='centre', cols='conv')", 9_751_098),
    ("vit_s_32", "CSKA(rows='centre')", 9_726_474),
    ("vit_s_32_spt", "CSKA(cols='conv')", 10_049_562),
    ("cait_s_32(keep_talking=False)", "CSKA()", 12_884_234),
    ("swin_t_32", "CSKA()", 25_080_214),
    ("cvt_13", "CSKA()", 18_081_710),
    ("cvt_13_32(kv_stride=1)", "CSKA()", 18_233_562),
    ("deit_tiny_patch16_224", "CSKA()", 9_800_248),
    ("deit_tiny_patch16_224", "CSKA(rows='centre')", 9_346_360),
]


def parsed(mixer):
    """A configuration from its spelling; the test is skipped where the mechanism is not there."""
    if not isinstance(mixer, str) or not mixer:
        return mixer
    from regard.mixers import MIXERS

    if mixer.partition("(")[0] not in {kind.__name__ for kind in MIXERS}:
        pytest.skip(f"{mixer} is not among the mechanisms")
    return parse_mixer(mixer)


@pytest.mark.parametrize(("host", "mixer", "expected"), COUNTS, ids=lambda value: str(value)[:60])
def test_parameters(host, mixer, expected):
    assert count(create_model(host, mixer)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("host", "mixer", "expected"), SLOW, ids=lambda value: str(value)[:60])
def test_parameters_of_larger_hosts(host, mixer, expected):
    mixer = parsed(mixer)
    with torch.device("meta"):
        assert count(create_model(host, mixer)) == expected


# every row of the papers: our integer, and how it stands to the printed number
ROWS = {
    "ViT-S": (9_622_512, "R,T"),
    "SKA-ViT-S a": (8_249_328, "no"),
    "SKA-ViT-S b": (9_478_896, "R"),
    "CSKA-ViT-S": (10_049_568, "R,T"),
    "CaiT-S": (12_685_322, "R"),
    "SKA-CaiT-S a": (11_309_066, "R,T"),
    "SKA-CaiT-S b": (12_788_810, "T"),
    "CSKA-CaiT-S": (12_885_002, "T"),
    "Swin-T": (26_598_646, "R"),
    "SKA-Swin-T a": (24_577_270, "R"),
    "SKA-Swin-T b": (26_778_870, "T"),
    "CSKA-Swin-T": (26_883_574, "T"),
    "CvT-13": (19_616_330, "R,T"),
    "SKA-CvT-13 a": (18_022_730, "R,T"),
    "SKA-CvT-13 b": (19_694_000, "T"),
    "CSKA-CvT-13": (18_081_710, "T"),
    "CAFormer-S18": (26_341_656, "R,T"),
    "CAFormer-B36": (98_753_614, "R"),
    "SKAFormer-S18, stage 2": (26_555_922, "T"),
    "SKAFormer-S18, stage 3": (25_984_536, "R"),
    "SKAFormer-S18, stage 4": (25_630_488, "R"),
    "SKAFormer-S18, stages 3, 4": (25_273_368, "no"),
    "SKAFormer-S18, stages 2, 3": (26_198_802, "R,T"),
    "CSKAFormer-S18, stage 2": (28_973_778, "T"),
    "CSKAFormer-S18, stage 3": (30_518_016, "no"),
    "CSKAFormer-S18, stage 4": (26_234_952, "no"),
    "CSKAFormer-S18, stages 3, 4": (30_411_312, "no"),
    "SKAFormer-B36, stage 2": (100_074_550, "no"),
    "SKAFormer-B36, stage 3": (95_841_358, "no"),
    "SKAFormer-B36, stage 4": (97_097_038, "R,T"),
    "SKAFormer-B36, stages 2, 3": (97_162_294, "R,T"),
    "SKAFormer-B36, stages 3, 4": (94_184_782, "no"),
    "CSKAFormer-B36, stage 2": (119_417_398, "R,T"),
    "CSKAFormer-B36, stage 3": (110_348_494, "no"),
    "CSKAFormer-B36, stage 4": (98_003_734, "no"),
    "CSKAFormer-B36, stages 3, 4": (109_598_614, "no"),
    "XCiT-Nano baseline": (3_053_224, "R"),
    "XCiT-Nano SNE": (3_055_528, "R"),
    "XCiT-Nano P-SNE": (3_053_608, "R"),
    "XCiT-Nano F-SNE 8": (2_867_392, "R"),
    "XCiT-Nano F-SNE 8*": (3_051_832, "R"),
    "XCiT-Nano F-SNE 16": (2_879_704, "R"),
    "XCiT-Nano F-SNE 16*": (3_056_608, "R"),
    "XCiT-Nano F-SNE 32": (2_904_328, "R,T"),
    "XCiT-Nano F-SNE 64": (2_953_576, "T"),
    "XCiT-Tiny baseline": (6_716_272, "R,T"),
    "XCiT-Tiny SNE": (6_719_728, "R,T"),
    "XCiT-Tiny P-SNE": (6_716_848, "R,T"),
    "XCiT-Tiny F-SNE 8": (6_290_056, "R"),
    "XCiT-Tiny F-SNE 8*": (6_714_496, "R,T"),
    "XCiT-Tiny F-SNE 16": (6_308_512, "R,T"),
    "XCiT-Tiny F-SNE 16*": (6_712_720, "R,T"),
    "XCiT-Tiny F-SNE 32": (6_345_424, "R,T"),
    "XCiT-Tiny F-SNE 64": (6_419_248, "R,T"),
}
# the code of the paper computes something else there
DIFFERENT = {"CSKA-CvT-13": 18_074_030}
BY_LABEL = {row.label: row for row in printed_rows()}
QUICK = ("ViT-S", "SKA-ViT-S b", "SKA-CaiT-S b", "SKA-Swin-T a", "SKA-CvT-13 a", "XCiT-Nano F-SNE 8*")


def check_row(row):
    parsed(row.mixer)
    if "cska" in row.host:
        parsed("CSKA()")
    expected, sign = ROWS[row.label]
    with torch.device("meta"):
        assert count(build(row)) == expected
    assert verdict(expected, row.params) == sign
    assert row.official in (None, DIFFERENT.get(row.label, expected))


@pytest.mark.parametrize("row", [row for row in printed_rows() if row.label in QUICK], ids=lambda row: row.label)
def test_published_rows_of_each_host(row):
    check_row(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in printed_rows() if row.label not in QUICK], ids=lambda row: row.label)
def test_published_rows(row):
    check_row(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", derived_rows(), ids=lambda row: f"{row.host} {row.mixer}"[:70])
def test_models_without_a_table(row):
    with torch.device("meta"):
        assert count(built(row)) == row.params


def test_counting_leaves_what_is_made_between_two_rows_in_memory():
    row, params = next(rows := derived_counts())
    assert torch.empty(1).device.type == "cpu"
    assert params == row.params
    rows.close()


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in printed_rows() if row.official_100], ids=lambda row: row.label)
def test_sizes_with_100_classes(row):
    with torch.device("meta"):
        params = count(build(row, classes=100))
    assert params == row.counts[1]


@pytest.mark.slow
def test_heads_of_the_authors_cskaformer():
    """784 biases a layer and head: four heads more in three layers."""
    with torch.device("meta"):
        assert count(create_model("cskaformer_s18(heads=8)", None)) == 28_983_186 == 28_973_778 + 4 * 3 * 784
    with pytest.raises(ConfigError, match="5 heads do not divide a width of 64"):
        create_model("skaformer_desk(heads=5)", None, img_size=32)


def test_every_printed_row_has_its_integer():
    assert [row.label for row in printed_rows()] == list(ROWS)
    assert len(ROWS) == 16 + 20 + 18


@pytest.mark.slow
def test_published_counts_gives_rows_with_flops():
    first = next(iter(published_counts("SKA Table 1")))
    assert (first.row.label, first.params, first.verdict) == ("ViT-S", 9_622_512, "R,T")
    assert first.gflops == pytest.approx(1.2945, abs=5e-5)
    assert first.gflops_verdict == "R,T"


@pytest.mark.parametrize(
    ("label", "expected"),
    [("CaiT-S", 1.4085), ("SKA-CaiT-S a", 1.2072), ("SKA-CaiT-S b", 1.3780), ("CSKA-CaiT-S", 1.4085)],
)
def test_flops_of_cait_with_static_keys(label, expected):
    """Logits with learned keys are one product, and nine for the convolution, between the talking heads too."""
    with torch.device("meta"):
        assert _gflops(build(BY_LABEL[label])) == pytest.approx(expected, abs=5e-5)


def test_static_keys_in_stage_3_save_exactly_one_projection():
    """2 * 9 layers * 196 tokens * 320^2."""
    flops = {}
    for label in ("CAFormer-S18", "SKAFormer-S18, stage 3"):
        with torch.device("meta"):
            flops[label] = round(_gflops(build(BY_LABEL[label])) * 1e9)
    assert flops["CAFormer-S18"] - flops["SKAFormer-S18, stage 3"] == 361_267_200
    assert flops["CAFormer-S18"] / 1e9 == pytest.approx(8.214, abs=5e-4)


@pytest.mark.parametrize(
    ("params", "printed", "sign"),
    [(8_250_000, "8.3M", "R"), (8_250_000, "8.2M", "T"), (9_949_999, "9.9M", "R,T"), (26_555_922, "26M", "T")],
)
def test_verdicts(params, printed, sign):
    assert verdict(params, printed) == sign


@pytest.mark.slow
@pytest.mark.parametrize(
    ("projection", "bare", "biased"),
    [
        (SNE(width=64, hidden_bias=False), 3_048_616, 3_053_224),
        (PSNE(width=96, hidden_bias=False), 3_048_616, 3_050_152),
        (FSNE(code=8, width=128, hidden_bias=False), 2_864_320, 2_865_856),
        (FSNE(code=16, width=182, hidden_bias=False), 3_052_888, 3_054_424),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bias_flags_of_xcit(projection, bare, biased):
    """The columns (F, F) and (F, T): no bias at all, or only of the last layer."""
    with torch.device("meta"):
        assert count(create_model("xcit_nano_12_p16_224", XCA(projection=projection))) == biased
        model = create_model("xcit_nano_12_p16_224", None)
        for block in model.blocks:
            block.attn.qkv = nn.Linear(128, 384, bias=False)
        assert count(swap(model, XCA(projection=projection))) == bare


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


def test_xcit_desk_is_xcit_with_another_stem():
    text = "xcit_desk(size=(8, 12), patch=4, dim=32, depth=2, heads=2)"
    model = create_model(text, None, num_classes=7, in_chans=1).double().eval()
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    tokens, grid = model.patch_embed(x)
    assert grid == (2, 3)
    assert torch.equal(tokens.mT.reshape(2, 32, 2, 3), model.patch_embed.norm(model.patch_embed.proj(x)))
    whole = timm.create_model("xcit_nano_12_p16_224", depth=2, embed_dim=32, num_heads=2, cls_attn_layers=1)
    stem = ("patch_embed.",)
    assert [k for k in model.state_dict() if not k.startswith(stem)] == [
        k for k in whole.state_dict() if not k.startswith(stem)
    ]
    before = model(x)
    assert before.shape == (2, 7)
    assert torch.allclose(swap(model, XCA())(x), before, rtol=0, atol=1e-12)
    assert not torch.allclose(remove(model)(x), before)
    maps = create_model(text, XCA(), in_chans=1, features_only=True)(x.float())
    assert [tuple(row.shape) for row in maps] == [(2, 32, 2, 3)] * 2
    with pytest.raises(ConfigError, match="cannot be cut into patches of 4x4"):
        create_model("xcit_desk(size=10)", None)
    with pytest.raises(ConfigError, match="multiple of 3 heads"):
        create_model("xcit_desk(heads=3)", None)


@pytest.mark.parametrize("text", ["vit_desk", "vit_desk(size=(8, 12), dim=32)", "vit_tiny_patch16_224(qkv_bias=False)"])
def test_hosts_are_spelled_as_they_are_read(text):
    assert spell_host(*parse_host(text)) == text
