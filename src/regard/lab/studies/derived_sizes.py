"""Sizes that no table prints, computed by hand from the hosts and mechanisms of the SKA and SNE papers.

The models that Regard builds must have them: presets without the errors of the authors' code, mechanisms in timm's
models, and presets of the authors' code that are not rows of a table.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.mixers.spelling import parse_mixer
from regard.models.create import create_model
from regard.swapping.swap import swap

from .published_sizes import XCIT, parameters


class Derived(NamedTuple):
    """A model and its number of parameters, computed by hand. host, mixer: as in `published_sizes.Printed`.

    bare: whether the host's queries, keys and values have no biases, other than by default.
    """

    table: str
    host: str
    mixer: str
    params: int
    bare: bool = False


class Unbuilt(NamedTuple):
    """A model that Regard does not build, its number of parameters, and why it is not built."""

    model: str
    params: int
    reason: str


_ROWS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "Presets of small hosts, 10 classes": (
        ("vit_s_32", "", 9_523_722),
        ("vit_s_32", "SKA()", 8_150_538),
        ("vit_s_32", "CSKA(cols='conv')", 9_950_778),
        ("vit_s_32", "CSKA()", 9_926_154),
        ("vit_s_32", "CSKA(rows='centre', cols='conv')", 9_751_098),
        ("vit_s_32", "CSKA(rows='centre')", 9_726_474),
        ("vit_s_32_spt", "SKA()", 8_249_322),
        ("vit_s_32_spt", "CSKA(cols='conv')", 10_049_562),
        ("cait_s_32(keep_talking=False)", "SKA()", 11_308_298),
        ("cait_s_32(keep_talking=False)", "CSKA()", 12_884_234),
        ("swin_t_32", "SKA()", 24_512_758),
        ("swin_t_32", "CSKA()", 25_080_214),
        ("cvt_13", "CSKA()", 18_081_710),
        ("cvt_13(kv_stride=1)", "SKA()", 18_041_930),
        ("cvt_13_32", "", 19_555_146),
        ("cvt_13_32(kv_stride=1)", "SKA()", 18_028_362),
        ("cvt_13_32(kv_stride=1)", "CSKA()", 18_233_562),
    ),
    "Presets of the authors' code": (
        ("skaformer_s18(mixers=('conv', 'conv', 'ska', 'ska'), query='identity')", "", 23_565_336),
        ("cskaformer_s18(heads=8)", "", 28_983_186),
        ("cskaformer_b36(heads=16)", "", 119_492_662),
        ("cvt_13(num_classes=1000)", "", 19_997_480),
    ),
    "Mechanisms in timm's models, 1,000 classes": (
        ("deit_tiny_patch16_224", "", 5_717_416),
        ("deit_tiny_patch16_224", "SKA()", 5_726_632),
        ("deit_tiny_patch16_224", "CSKA()", 9_800_248),
        ("deit_tiny_patch16_224", "CSKA(rows='centre')", 9_346_360),
        ("deit_tiny_patch16_224", "Softmax(projection=SNE(width=96))", 5_720_872),
        ("deit_tiny_patch16_224", "Softmax(projection=PSNE(width=144))", 5_717_992),
        ("deit_tiny_patch16_224", "Softmax(projection=FSNE(code=8, width=192))", 5_291_200),
        ("deit_tiny_patch16_224", "Softmax(projection=FSNE(code=8, width=282))", 5_715_640),
        ("deit_small_patch16_224", "", 22_050_664),
        ("deit_small_patch16_224", "SKA()", 21_184_360),
        ("swin_tiny_patch4_window7_224", "", 28_288_354),
        ("swin_tiny_patch4_window7_224", "SKA()", 26_343_778),
    ),
    "XCiT with other classes and codes": (
        ("xcit_nano_12_p16_224(num_classes=10)", "", 2_925_514),
        ("xcit_nano_12_p16_224(num_classes=100)", "", 2_937_124),
        ("xcit_nano_12_p16_224(num_classes=196)", "", 2_949_508),
        ("xcit_tiny_12_p16_224(num_classes=10)", "", 6_525_202),
        ("xcit_tiny_12_p16_224(num_classes=100)", "", 6_542_572),
        ("xcit_tiny_12_p16_224(num_classes=196)", "", 6_561_100),
        ("xcit_nano_12_p16_224", "XCA(projection=FSNE(code=8, width=186, tied=False))", 3_052_096),
    ),
}
# projection, parameters with a bias of the last layer alone (Nano, Tiny), and without any (Nano, Tiny)
_BIASES = (
    ("SNE(hidden_bias=False)", 3_053_224, 6_716_272, 3_048_616, 6_709_360),
    ("PSNE(hidden_bias=False)", 3_050_152, 6_711_664, 3_048_616, 6_709_360),
    ("FSNE(code=8, hidden_bias=False)", 2_865_856, 6_287_752, 2_864_320, 6_285_448),
    ("FSNE(code=8, width={0}, hidden_bias=False)", 3_049_600, 6_711_112, 3_048_064, 6_708_808),
    ("FSNE(code=16, hidden_bias=False)", 2_878_168, 6_306_208, 2_876_632, 6_303_904),
    ("FSNE(code=16, width={1}, hidden_bias=False)", 3_054_424, 6_709_408, 3_052_888, 6_707_104),
    ("FSNE(code=32, hidden_bias=False)", 2_902_792, 6_343_120, 2_901_256, 6_340_816),
    ("FSNE(code=64, hidden_bias=False)", 2_952_040, 6_416_944, 2_950_504, 6_414_640),
)
_NO_WINDOWS = "swin_t_32 has no option without windows"
_MATCHED = "no option widens the MLPs to make up for the keys that are not projected"
UNBUILT = (
    Unbuilt("swin_t_32 without windows, SKA", 24_579_446, _NO_WINDOWS),
    Unbuilt("swin_t_32 without windows, CSKA", 25_665_014, _NO_WINDOWS),
    Unbuilt("vit_s_32, SKA, MLPs of 736", 9_528_138, _MATCHED),
    Unbuilt("cait_s_32, SKA, MLPs of 736 in patch layers", 12_686_666, _MATCHED),
    Unbuilt("swin_t_32, SKA, MLPs of 424, 856, 1720, 3448", 26_600_758, _MATCHED),
    Unbuilt("cvt_13_32, SKA, MLPs 88 and 190 wider in stages 2 and 3", 19_557_222, _MATCHED),
    Unbuilt("CSKA-CvT-13 of the authors' code", 18_074_030, "a defect: it has one key for two values in stage 3"),
    Unbuilt(
        "Swin-T of the authors' code", 26_601_718, "the same model; the code stores 3,072 mask values as parameters"
    ),
)


def derived_rows() -> tuple[Derived, ...]:
    """All models, table by table."""
    rows = [Derived(table, *row) for table, group in _ROWS.items() for row in group]
    for bare, table in enumerate(("XCiT with a bias of the last layer alone", "XCiT without biases of the embedding")):
        for index, (host, widths) in enumerate(XCIT.values()):
            for projection, *params in _BIASES:
                mixer = f"XCA(projection={projection.format(*widths)})"
                rows.append(Derived(table, host, mixer, params[2 * bare + index], bool(bare)))
    return tuple(rows)


def derived_counts() -> Iterator[tuple[Derived, int]]:
    """Every row with the number of parameters of the model that is built here (on the meta device)."""
    for row in derived_rows():
        with torch.device("meta"):
            params = parameters(built(row))
        yield row, params


def built(row: Derived) -> nn.Module:
    """The model of a row."""
    if not row.bare:
        return create_model(row.host, parse_mixer(row.mixer) if row.mixer else None)
    model: Any = create_model(row.host, None)
    for block in model.blocks:  # class attention keeps its biases
        block.attn.qkv = nn.Linear(block.attn.qkv.in_features, block.attn.qkv.out_features, bias=False)
    return swap(model, row.mixer)
