"""Printed sizes of the SKA and SNE papers beside the sizes of the models that Regard builds, row by row.

Sources: SKA is "Static Key Attention in Vision" (Tables 1 and 2); its code is the repository zizhao-hu/SKA. SNE is
"Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints" (Tables 2 and 4).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from regard.mixers.spelling import parse_mixer
from regard.models.create import create_model
from regard.swapping.count import count_macs
from regard.swapping.inspect import example_input


@dataclass(frozen=True)
class Printed:
    """One row of a paper. host, mixer: how Regard builds it ("" = the host's own attention).

    params, gflops: as printed, "9.6M" and "1.29" ("" = not printed). official, official_100: the counts of the authors'
    code with 10 and with 100 classes, None if there is no code. note: why it differs from Regard's count, or what the
    paper leaves open.
    """

    table: str
    label: str
    host: str
    mixer: str
    params: str
    gflops: str = ""
    official: int | None = None
    note: str = ""
    official_100: int | None = None

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """The right counts with 10 and with 100 classes: those of `CORRECTED`, else those of the authors' code."""
        return CORRECTED.get(self.label, (self.official, self.official_100))


@dataclass(frozen=True)
class Counted:
    """A row as counted here. params: parameters; gflops: 2 MACs of one image / 1e9.

    verdict: of the parameters, as `verdict` returns it. gflops_verdict: of the GFLOPs, "" where none are printed.
    """

    row: Printed
    params: int
    gflops: float
    verdict: str
    gflops_verdict: str


_DEFECT = "the code's class token gets one key for two values in stage 3; ours has a key for each"
_SPT = "shifted patch tokens, temperature and diagonal mask kept"
_OPEN = "the paper does not say which stages; its code replaces 3 and 4 with query='identity' (23,565,336)"
_NARROW = "the paper's code has heads of 16, which only adds biases"
_HEADS = "heads inferred: the only known setting with 26.7M at 10 and 26.8M at 100 classes"
_PER_WINDOW = "queries are convolved into keys, apart for each window, as in the authors' code"
SKA_TABLE1 = (
    ("ViT-S", "vit_s_32_spt", "", "9.6M", "1.29", 9_622_512, ""),
    ("SKA-ViT-S a", "vit_s_32_spt(keep_lsa=True)", "SKA()", "8.1M", "1.25", 8_249_328, _SPT),
    ("SKA-ViT-S b", "vit_s_32_spt(keep_lsa=True)", "SKA(heads=10)", "9.5M", "1.28", 9_478_896, _SPT),
    ("CSKA-ViT-S", "vit_s_32_spt(keep_lsa=True)", "CSKA(cols='conv')", "10.0M", "1.33", 10_049_568, _SPT),
    ("CaiT-S", "cait_s_32", "", "12.7M", "1.42", 12_685_322, ""),
    ("SKA-CaiT-S a", "cait_s_32", "SKA()", "11.3M", "1.37", 11_309_066, ""),
    ("SKA-CaiT-S b", "cait_s_32(heads=10, width=62)", "SKA()", "12.7M", "1.41", 12_788_810, ""),
    ("CSKA-CaiT-S", "cait_s_32", "CSKA()", "12.8M", "1.44", 12_885_002, ""),
    ("Swin-T", "swin_t_32", "", "26.6M", "1.05", 26_598_646, "the code stores 3,072 mask values as parameters too"),
    ("SKA-Swin-T a", "swin_t_32(keys='window')", "SKA()", "24.6M", "0.97", 24_577_270, "a key for each window"),
    ("SKA-Swin-T b", "swin_t_32(keys='window', heads=(4, 8, 16, 32))", "SKA()", "26.7M", "0.99", 26_778_870, _HEADS),
    ("CSKA-Swin-T", "swin_t_32(keys='window')", "CSKA(reading='key')", "26.8M", "1.52", 26_883_574, _PER_WINDOW),
    ("CvT-13", "cvt_13", "", "19.6M", "0.17", 19_616_330, ""),
    ("SKA-CvT-13 a", "cvt_13", "SKA()", "18.0M", "0.21", 18_022_730, ""),
    ("SKA-CvT-13 b", "cvt_13(dims=(64, 198, 402))", "SKA()", "19.6M", "0.22", 19_694_000, "widths inferred"),
    ("CSKA-CvT-13", "cvt_13", "CSKA()", "18.0M", "0.19", 18_074_030, _DEFECT),
)
# label -> the counts of the authors' code with 100 classes
SKA_TABLE1_100 = {
    "ViT-S": 9_668_682, "SKA-ViT-S a": 8_295_498, "SKA-ViT-S b": 9_525_066, "CSKA-ViT-S": 10_095_738,
    "CaiT-S": 12_731_492, "SKA-CaiT-S a": 11_355_236, "SKA-CaiT-S b": 12_834_980, "CSKA-CaiT-S": 12_931_172,
    "Swin-T": 26_667_856, "SKA-Swin-T a": 24_646_480, "SKA-Swin-T b": 26_848_080, "CSKA-Swin-T": 26_952_784,
    "CvT-13": 19_650_980, "SKA-CvT-13 a": 18_057_380, "SKA-CvT-13 b": 19_730_270, "CSKA-CvT-13": 18_108_680,
}  # fmt: skip
CORRECTED = {"CSKA-CvT-13": (18_081_710, 18_116_360)}
"""Label of SKA Table 1 -> counts with 10 and 100 classes, where those of the authors' code have a defect."""
SKA_TABLE2 = (
    ("CAFormer-S18", "caformer_s18", "26M", "8.2", ""),
    ("CAFormer-B36", "caformer_b36", "99M", "46.4", ""),
    ("SKAFormer-S18, stage 2", "skaformer_s18", "26M", "8.0", _OPEN),
    ("SKAFormer-S18, stage 3", "skaformer_s18(mixers=('conv', 'conv', 'ska', 'attn'))", "26M", "8.0", _OPEN),
    ("SKAFormer-S18, stage 4", "skaformer_s18(mixers=('conv', 'conv', 'attn', 'ska'))", "26M", "8.0", _OPEN),
    ("SKAFormer-S18, stages 3, 4", "skaformer_s18(mixers=('conv', 'conv', 'ska', 'ska'))", "26M", "8.0", _OPEN),
    ("SKAFormer-S18, stages 2, 3", "skaformer_s18(mixers=('conv', 'ska', 'ska', 'attn'))", "26M", "8.0", _OPEN),
    ("CSKAFormer-S18, stage 2", "cskaformer_s18", "28M", "8.2", _NARROW),
    ("CSKAFormer-S18, stage 3", "cskaformer_s18(mixers=('conv', 'conv', 'cska', 'attn'))", "28M", "8.2", ""),
    ("CSKAFormer-S18, stage 4", "cskaformer_s18(mixers=('conv', 'conv', 'attn', 'cska'))", "28M", "8.2", ""),
    ("CSKAFormer-S18, stages 3, 4", "cskaformer_s18(mixers=('conv', 'conv', 'cska', 'cska'))", "28M", "8.2", ""),
    ("SKAFormer-B36, stage 2", "skaformer_b36", "97M", "45.6", _OPEN),
    ("SKAFormer-B36, stage 3", "skaformer_b36(mixers=('conv', 'conv', 'ska', 'attn'))", "97M", "45.6", _OPEN),
    ("SKAFormer-B36, stage 4", "skaformer_b36(mixers=('conv', 'conv', 'attn', 'ska'))", "97M", "45.6", _OPEN),
    ("SKAFormer-B36, stages 2, 3", "skaformer_b36(mixers=('conv', 'ska', 'ska', 'attn'))", "97M", "45.6", _OPEN),
    ("SKAFormer-B36, stages 3, 4", "skaformer_b36(mixers=('conv', 'conv', 'ska', 'ska'))", "97M", "45.6", _OPEN),
    ("CSKAFormer-B36, stage 2", "cskaformer_b36", "119M", "48.4", _NARROW),
    ("CSKAFormer-B36, stage 3", "cskaformer_b36(mixers=('conv', 'conv', 'cska', 'attn'))", "119M", "48.4", ""),
    ("CSKAFormer-B36, stage 4", "cskaformer_b36(mixers=('conv', 'conv', 'attn', 'cska'))", "119M", "48.4", ""),
    ("CSKAFormer-B36, stages 3, 4", "cskaformer_b36(mixers=('conv', 'conv', 'cska', 'cska'))", "119M", "48.4", ""),
)
# label, projection, millions printed for Nano, for Tiny, note on Tiny
SNE_TABLE2 = (
    ("baseline", "", "3.1M", "6.7M", ""),
    ("SNE", "SNE()", "3.1M", "6.7M", ""),
    ("P-SNE", "PSNE()", "3.1M", "6.7M", ""),
    ("F-SNE 8", "FSNE(code=8)", "2.9M", "6.3M", ""),
    ("F-SNE 8*", "FSNE(code=8, width={0})", "3.1M", "6.7M", ""),
    ("F-SNE 16", "FSNE(code=16)", "2.9M", "6.3M", ""),
    ("F-SNE 16*", "FSNE(code=16, width={1})", "3.1M", "6.7M", "Table 4 prints 6.3M, a misprint"),
    ("F-SNE 32", "FSNE(code=32)", "2.9M", "6.3M", ""),
    ("F-SNE 64", "FSNE(code=64)", "2.9M", "6.4M", "Table 2 prints 6.3M, a misprint"),
)
XCIT = {"Nano": ("xcit_nano_12_p16_224", (186, 182)), "Tiny": ("xcit_tiny_12_p16_224", (282, 276))}


def printed_rows() -> tuple[Printed, ...]:
    """All rows, in the order of the papers."""
    rows = [Printed("SKA Table 1", *row, SKA_TABLE1_100[row[0]]) for row in SKA_TABLE1]
    rows += [
        Printed("SKA Table 2", label, host, "", size, flops, None, note)
        for label, host, size, flops, note in SKA_TABLE2
    ]
    for index, (size, (host, widths)) in enumerate(XCIT.items()):
        for label, projection, *sizes, note in SNE_TABLE2:
            mixer = f"XCA(projection={projection.format(*widths)})" if projection else "XCA()"
            rows.append(Printed("SNE Table 2", f"XCiT-{size} {label}", host, mixer, sizes[index], note=note * index))
    return tuple(rows)


def published_counts(tables: str = "*") -> Iterator[Counted]:
    """Build each row on the meta device, count it, and compare it with the printed numbers.

    tables: a glob of table names, such as "SKA Table 1". PyTorch's FLOP counter counts products of matrices and
    convolutions in one forward pass, which takes some minutes for all tables.
    """
    for row in printed_rows():
        if fnmatchcase(row.table, tables):
            with torch.device("meta"):
                model = build(row)
            gflops = _gflops(model)
            judged = verdict(round(gflops * 1e9), f"{row.gflops}G") if row.gflops else ""
            params = parameters(model)
            yield Counted(row, params, gflops, verdict(params, row.params), judged)


def build(row: Printed, classes: int = 0) -> nn.Module:
    """The model of a row. classes: 0 = the host's own number."""
    options: dict[str, Any] = {"num_classes": classes} if classes else {}
    return create_model(row.host, parse_mixer(row.mixer) if row.mixer else None, **options)


def parameters(model: nn.Module) -> int:
    """The number of parameters of a model, each number counted."""
    return sum(value.numel() for value in model.parameters())


def verdict(count: int, printed: str) -> str:
    """Whether a count has the digits of a printed number such as "9.6M" or "1.2G".

    "R": when it is rounded; "T": when it is cut off; "R,T": both; "no": neither.
    """
    digits, power = printed[:-1], {"M": 6, "G": 9}[printed[-1]]
    unit = 10 ** (power - len(digits.partition(".")[2]))
    whole = int(digits.replace(".", ""))
    signs = [sign for sign, value in (("R", (count + unit // 2) // unit), ("T", count // unit)) if value == whole]
    return ",".join(signs) or "no"


def _gflops(model: nn.Module) -> float:
    return 2 * count_macs(model, example_input(model).to("meta")) / 1e9
