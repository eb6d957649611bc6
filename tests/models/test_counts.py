"""Parameter integers of hosts and swaps: hard numbers, derived by hand from the papers and their code."""

import csv
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from regard.lab.studies import load_study
from regard.lab.studies.published_sizes import build, gigaflops, parameters, printed_rows, verdict
from regard.mixers.spelling import parse_mixer
from regard.mixers.xca import XCA
from regard.models.create import create_model, parse_host, spell_host
from regard.swapping.swap import remove, swap

# parameters of rows that neither the authors' code nor a row of a study has
ROWS = {
    "SKAFormer-S18, stage 3": 25_984_536,
    "SKAFormer-S18, stage 4": 25_630_488,
    "SKAFormer-S18, stages 3, 4": 25_273_368,
    "SKAFormer-S18, stages 2, 3": 26_198_802,
    "CSKAFormer-S18, stage 3": 30_518_016,
    "CSKAFormer-S18, stage 4": 26_234_952,
    "CSKAFormer-S18, stages 3, 4": 30_411_312,
    "SKAFormer-B36, stage 3": 95_841_358,
    "SKAFormer-B36, stage 4": 97_097_038,
    "SKAFormer-B36, stages 2, 3": 97_162_294,
    "SKAFormer-B36, stages 3, 4": 94_184_782,
    "CSKAFormer-B36, stage 3": 110_348_494,
    "CSKAFormer-B36, stage 4": 98_003_734,
    "CSKAFormer-B36, stages 3, 4": 109_598_614,
}
NOT_PRINTED = {
    "SKA-ViT-S a", "SKAFormer-S18, stages 3, 4", "CSKAFormer-S18, stage 3", "CSKAFormer-S18, stage 4",
    "CSKAFormer-S18, stages 3, 4", "SKAFormer-B36, stage 2", "SKAFormer-B36, stage 3", "SKAFormer-B36, stages 3, 4",
    "CSKAFormer-B36, stage 3", "CSKAFormer-B36, stage 4", "CSKAFormer-B36, stages 3, 4",
}  # fmt: skip
"""Rows whose printed digits are not those of the model, neither rounded nor cut off."""
STUDIED = {row.exact.get("params") for name in ("ska_table2", "sne_table2") for row in load_study(name).rows("paper")}
with Path(__file__).with_name("derived_sizes.csv").open(encoding="utf-8", newline="") as file:
    DERIVED = list(csv.DictReader(file))
"""Models that no table prints, with sizes computed by hand."""
BY_LABEL = {row.label: row for row in printed_rows()}
QUICK = ("ViT-S", "SKA-ViT-S b", "SKA-CaiT-S b")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row.label in QUICK else pytest.mark.slow) for row in printed_rows()],
    ids=BY_LABEL,
)
def test_published_rows(row):
    """Each model of the papers has its number of parameters, by the authors' code with 100 classes too."""
    with torch.device("meta"):
        params = parameters(build(row))
        assert row.counts[1] in (None, parameters(build(row, classes=100)))
    assert params == (row.counts[0] or ROWS.get(row.label, params))
    assert row.counts[0] or row.label in ROWS or params in STUDIED
    assert (verdict(params, row.params) == "no") == (row.label in NOT_PRINTED)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row['host']} {row['mixer']}"[:70], marks=() if number % 30 == 0 else pytest.mark.slow)
        for number, row in enumerate(DERIVED)
    ],
)
def test_models_without_a_table(row):
    """bare: the host's queries, keys and values have no biases, other than by default."""
    with torch.device("meta"):
        if row["bare"]:
            model = create_model(row["host"], None)
            for block in model.blocks:  # class attention keeps its biases
                block.attn.qkv = nn.Linear(block.attn.qkv.in_features, block.attn.qkv.out_features, bias=False)
            model = swap(model, row["mixer"])
        else:
            model = create_model(row["host"], parse_mixer(row["mixer"]) if row["mixer"] else None)
    assert parameters(model) == int(row["params"])


def test_every_printed_row_is_read():
    assert len(BY_LABEL) == len(printed_rows()) == 16 + 20 + 18


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        pytest.param("ViT-S", 1.2945, marks=pytest.mark.slow),
        *(("CaiT-S", 1.4085), ("SKA-CaiT-S a", 1.2072), ("SKA-CaiT-S b", 1.3780), ("CSKA-CaiT-S", 1.4085)),
    ],
)
def test_flops_of_networks_with_static_keys(label, expected):
    """Logits with learned keys are one product, and nine for the convolution, between the talking heads too."""
    with torch.device("meta"):
        assert gigaflops(build(BY_LABEL[label])) == pytest.approx(expected, abs=5e-5)


@pytest.mark.slow
def test_static_keys_in_stage_3_save_exactly_one_projection():
    """2 * 9 layers * 196 tokens * 320^2."""
    flops = {}
    for label in ("CAFormer-S18", "SKAFormer-S18, stage 3"):
        with torch.device("meta"):
            flops[label] = round(gigaflops(build(BY_LABEL[label])) * 1e9)
    assert flops["CAFormer-S18"] - flops["SKAFormer-S18, stage 3"] == 361_267_200
    assert flops["CAFormer-S18"] / 1e9 == pytest.approx(8.214, abs=5e-4)


@pytest.mark.parametrize(
    ("params", "printed", "sign"),
    [
        (8_250_000, "8.3M", "R"),
        (8_250_000, "8.2M", "T"),
        (9_949_999, "9.9M", "R,T"),
        (26_555_922, "26M", "T"),
        (1_294_500_000, "1.29G", "R,T"),
    ],
)
def test_verdicts(params, printed, sign):
    assert verdict(params, printed) == sign


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


@pytest.mark.parametrize("text", ["vit_desk", "vit_desk(size=(8, 12), dim=32)", "vit_tiny_patch16_224(qkv_bias=False)"])
def test_hosts_are_spelled_as_they_are_read(text):
    assert spell_host(*parse_host(text)) == text
