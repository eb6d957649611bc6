"""Tables 2 and 3 of the MiTA paper: every row as printed, with the network whose parameters and MACs are counted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.core import Grid, MixerConfig, Site
from regard.lab.engine.study import Row
from regard.mixers import BRA, MHLA, Agent, FLatten, InLine, Linear, MiTA, PolaFormer, Softmax, Sparsifiner

_LAYERS, _CLASSES, _PATCH = 12, 1000, 16


@dataclass(frozen=True, kw_only=True)
class Body:
    """A plain vision transformer of 12 layers without its attention, for 1000 classes.

    site: of each attention. positions: tokens with a learned position. scaled: its norms have a weight only, and its
    branches a learned scale (ViT-5); else norms have weight and bias.
    """

    site: Site
    positions: int
    scaled: bool = False

    @property
    def params(self) -> int:
        """Parameters of patches, positions, prefix and suffix tokens, MLPs of ratio 4 with biases, norms, head."""
        c, grid = self.site.dim, self.site.grid
        norms = 2 * c  # weight and bias of a layer norm, or a weight and a layer scale
        layer = 8 * c * c + 5 * c + 2 * norms
        last = c if self.scaled else 2 * c
        tokens = (self.positions + grid.extra) * c
        return (3 * _PATCH**2 + 1) * c + tokens + _LAYERS * layer + last + (c + 1) * _CLASSES

    @property
    def macs(self) -> int:
        """MACs of one image: patch embedding, MLPs and head."""
        c, grid = self.site.dim, self.site.grid
        return grid.cells * 3 * _PATCH**2 * c + _LAYERS * 8 * grid.tokens * c * c + c * _CLASSES

    def count(self, config: MixerConfig) -> tuple[int, int]:
        """(parameters, multiply-accumulates of one image) with a mechanism in every layer."""
        cost = config.cost(self.site)
        return self.params + _LAYERS * cost.params, self.macs + _LAYERS * cost.macs


def deit(dim: int, heads: int, side: int = 14, *, prefix: int = 1, qkv_bias: bool = True) -> Body:
    """DeiT with a map of side x side patches."""
    grid = Grid(side, side, prefix)
    return Body(site=Site(dim=dim, heads=heads, grid=grid, qkv_bias=qkv_bias), positions=grid.tokens)


TINY, SMALL = deit(192, 3), deit(384, 6)
VIT5 = Body(
    site=Site(dim=384, heads=6, grid=Grid(14, 14, 1, 4), qkv_bias=False, qk_norm="rms"), positions=196, scaled=True
)
LINEAR = Linear(feature="relu", norm="rms")
MHLA_ALONE = MHLA(normalize="none", norm=True)
"""MHLA as its code has it, without the convolution of the values."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the paper. params, macs: as printed, "5.7M" and "1.2G". mixer None: it cannot be counted here.

    top1: as printed. note: what the row leaves open.
    """

    table: str
    label: str
    params: str
    macs: str
    top1: float
    body: Body = TINY
    mixer: MixerConfig | None = None
    note: str = ""

    def row(
        self, label: str, exact: int, *notes: str, host: str = "", mixer: MixerConfig | None = None,
        task: Mapping[str, Any] = {},
    ) -> Row:  # fmt: skip
        """The row of a study. exact: parameters by hand. mixer: instead of `self.mixer`. task: as in `Row`."""
        paper = {"params": float(f"{self.params[:-1]}e6"), "macs": float(f"{self.macs[:-1]}e9"), "top1": self.top1}
        return Row(label, mixer or self.mixer, host=host, paper=paper, exact={"params": exact}, notes=notes, task=task)


_CITED = "weights pruned by its own code during training; cited, not counted"
_SKIM = "k, rows and channels of the skim are not printed; its code's"
_TILES = "256 tokens; 196 without convolution and mixing of blocks would need 4.34 G"
_K30 = "k = 30 in its code"
_MHLA_NOTE = "256 tokens, as its code; the printed FLOPs belong to 196"
_GATE = "the published gate is a fourth projection; the printed FLOPs include it, the printed parameters do not"
_T, _S = (192, 3), (384, 6)
# label, parameters, MACs and top-1 as printed, mechanism, network, note
_TABLE2 = (
    ("DeiT-T", "5.7M", "1.2G", 72.2, Softmax(), TINY, ""),
    ("Linear-T", "5.7M", "1.1G", 68.0, LINEAR, deit(*_T, qkv_bias=False), ""),
    ("PolaFormer-T", "5.7M", "1.2G", 68.1, PolaFormer(), TINY, "no position"),
    ("MHLA-T", "5.7M", "1.1G", 69.2, MHLA_ALONE, deit(*_T, 16, prefix=0), _MHLA_NOTE),
    ("FLatten-T", "6.1M", "1.1G", 70.2, FLatten(), TINY, ""),
    ("BRA-T", "5.7M", "1.1G", 70.2, BRA(), TINY, "regions and k are not printed"),
    ("Agent-T", "5.7M", "1.1G", 70.3, Agent(), TINY, ""),
    ("Agent-T, bias", "6.0M", "1.2G", 71.1, Agent(bias=True), TINY, ""),
    ("MiTA-T", "5.7M", "1.1G", 71.1, MiTA(), TINY, ""),
    ("MiTA-T, DWC", "5.7M", "1.1G", 73.4, MiTA(dwc=3), TINY, ""),
    ("DeiT-S", "22M", "4.6G", 79.9, Softmax(), SMALL, ""),
    ("Agent-S", "22M", "4.4G", 78.5, Agent(), SMALL, ""),
    ("Agent-S, bias", "23M", "4.4G", 79.1, Agent(bias=True), SMALL, ""),
    ("MiTA-S", "22M", "4.4G", 79.8, MiTA(), SMALL, ""),
    ("MiTA-S, DWC", "22M", "4.4G", 80.6, MiTA(dwc=3), SMALL, ""),
    ("MiTA-S, DWC, gate", "22M", "4.7G", 81.2, MiTA(dwc=3, gate=True), SMALL, _GATE),
)
_TABLE3 = (
    ("ViT-5-S", "22M", "4.7G", 82.2, Softmax(), VIT5, ""),
    ("DeiT-III-S", "22M", "4.6G", 81.4, Softmax(), SMALL, "counted as DeiT-S, without layer scale"),
    ("SViTE-S", "11M", "2.5G", 79.7, None, SMALL, _CITED),
    ("Sparsifiner-S", "23M", "4.5G", 79.9, Sparsifiner(), SMALL, _SKIM),
    ("InLine-S", "17M", "5.0G", 80.2, InLine(residual=True), deit(320, 10, 18), "width 320, 10 heads, images of 288"),
    ("Agent-S, bias, DWC", "23M", "4.4G", 80.5, Agent(bias=True, dwc=3), SMALL, ""),
    ("MHLA-S, DWC", "22M", "4.2G", 81.0, replace(MHLA_ALONE, dwc=5), deit(*_S, 16, prefix=0), _TILES),
    ("MiTA-ViT-5-S", "22M", "4.5G", 81.3, MiTA(k=30), VIT5, _K30),
    ("MiTA-ViT-5-S, DWC", "22M", "4.5G", 81.7, MiTA(k=30, dwc=3), VIT5, _K30),
)  # fmt: skip
PUBLISHED = {
    label: Published(table=table, label=label, params=params, macs=macs, top1=top1, body=body, mixer=mixer, note=note)
    for table, rows in (("2", _TABLE2), ("3", _TABLE3))
    for label, params, macs, top1, mixer, body, note in rows
}
"""Tables 2 and 3 of the paper by label: DeiT-T and -S, and rows that are other networks."""
