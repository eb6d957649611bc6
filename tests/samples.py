"""Configurations on which the contract is run: at least one for every mechanism, small enough for a 4x4 grid.

`macs` says which execution the cost formula describes; `positions=False` claims that the order of tokens does not
matter; `reach` claims locality.
"""

from dataclasses import dataclass, field
from typing import Any

from regard import MIXERS, PROJECTIONS, MixerConfig, parse


@dataclass(frozen=True)
class Sample:
    """A spelled configuration and what `regard.testing.check` is told about it."""

    text: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> MixerConfig:
        return parse(self.text)


# the formula counts Algorithm 1: every query gathers its keys, windows are averaged without products
GATHER: dict[str, Any] = {"counted": {"execution": "gather"}}
ANYWHERE: dict[str, Any] = {"positions": False}
BETWEEN: dict[str, Any] = {"skip": {"geometry": "its values lie on another grid than its queries"}}

# mechanism -> its samples
SAMPLES: dict[str, tuple[Sample, ...]] = {
    "Softmax": (
        Sample("Softmax()", ANYWHERE),
        Sample("Softmax(scale=0.7, dwc=3, gate=True)"),
    ),
    "SKA": (
        Sample("SKA()"),
        Sample("SKA(scale=1.0, dwc=5)"),
        Sample('SKA(resize="window")'),
        Sample("SKA(projection=IdentityQuery())"),
        Sample('SKA(activation="none", normalise="1/N")'),
    ),
    "CSKA": (
        Sample("CSKA()"),
        Sample('CSKA(rows="centre", cols="conv", resize="window", path="lean")'),
        Sample('CSKA(factorised=True, rows="centre", path="patches")'),
        Sample('CSKA(reading="key", dwc=3)'),
        Sample('CSKA(activation="gelu")'),
    ),
    "XCA": (Sample("XCA()", ANYWHERE),),
    "MiTA": (
        Sample("MiTA(m=4, k=5)", GATHER),
        Sample("MiTA(m=4, k=3, experts=2, dwc=3)", GATHER),
        Sample('MiTA(m=(1, 2), k=4, branches="route", landmarks="avg1d")', GATHER),
        Sample('MiTA(m=4, branches="compress", preset="official")', GATHER),
        Sample('MiTA(m=4, k=5, experts=2, duplicates="union", windows="partition")', {"macs": ""}),
        Sample('MiTA(m=4, k=5, landmarks="learned")', GATHER),
        Sample('MiTA(m=4, k=5, landmarks="random", experts=2)', GATHER),
        Sample('MiTA(m=4, k=5, landmarks="dwconv")', GATHER),
        Sample('MiTA(m=4, k=5, landmarks="conv", branches="compress")', GATHER),
        Sample('MiTA(m=4, k=5, landmarks="tome")', GATHER),
    ),
    "Factors": (
        Sample("Factors()"),
        Sample('Factors(terms="0110")'),
        Sample('Factors(terms="1111", window=3)'),
        Sample('Factors(terms="0000")', ANYWHERE),
        Sample('Factors(preset="mmcv", query_stride=2)'),
    ),
    "Conv": (Sample("Conv()"), Sample('Conv(kernel=5, groups=4, dilation=2, extra="zero")')),
    "DeformableConv": (
        Sample("DeformableConv(groups=2)"),
        Sample("DeformableConv(version=2, offset_kernel=1, dilation=2, mask_init=0.5)"),
    ),
    # its taps are products one by one in the fast form, which the counter does not see
    "DynamicConv": (
        Sample("DynamicConv(kernel=3, groups=4)", {"macs": "reference"}),
        Sample("DynamicConv(kernel=7, groups=2, glu=False, renorm_padding=True)", {"macs": "reference"}),
    ),
    "Linear": (Sample("Linear()", ANYWHERE), Sample('Linear(feature="relu", norm="rms", dwc=3)')),
    "FLatten": (
        Sample("FLatten()"),
        Sample("FLatten(local=5, power=4.0, position=False)", {"skip": {"cross": "the local branch needs one grid"}}),
        Sample('FLatten(over="head", position=False)', ANYWHERE),
    ),
    "PolaFormer": (
        Sample("PolaFormer()", ANYWHERE),
        Sample("PolaFormer(local=5, gate=True, position=True)", {"skip": {"cross": "the local branch needs one grid"}}),
    ),
    "MHLA": (Sample("MHLA(m=4)"), Sample('MHLA(m=(1, 3), normalize="none", norm=True, dwc=5)')),
    "Agent": (
        Sample("Agent(m=4)"),
        Sample('Agent(m=(1, 3), landmarks="avg1d", dwc=3, gate=True)'),
        Sample('Agent(m=4, preset="official")'),
        Sample("Agent(m=4, bias=True)", {"skip": {"cross": "the biases have places"}}),
    ),
    "InLine": (
        Sample("InLine()", ANYWHERE),
        Sample("InLine(residual=True, dwc=3)", {"skip": {"cross": "the residual branch needs one grid"}}),
    ),
    "Linformer": (
        Sample("Linformer(m=4)"),
        Sample('Linformer(m=3, share="kv", per_head=True, init="normal", dwc=3)'),
        Sample('Linformer(m=4, init="pool")'),
    ),
    "Performer": (Sample("Performer()", ANYWHERE), Sample('Performer(features=12, kernel="relu", eps=1e-3, dwc=3)')),
    "Nystrom": (
        Sample("Nystrom(m=4)"),
        Sample(
            'Nystrom(m=(1, 3), landmarks="avg2d", iterations=4, kernel=5)',
            {"skip": {"cross": "the convolution needs one sequence"}},
        ),
    ),
    "TopK": (
        Sample("TopK(k=5)", {**GATHER, **ANYWHERE}),
        Sample('TopK(k=5, indexer="spark", rank=3)', GATHER),
        Sample(
            'TopK(k=5, indexer="lightning", index_heads=2, index_width=4)',
            {**GATHER, "skip": {"gradients": "the indexer learns from its own loss"}},
        ),
    ),
    "BRA": (Sample("BRA(regions=(2, 2), k=2)"), Sample('BRA(regions=(1, 3), k=2, preset="official", dwc=5)')),
    "Window": (
        Sample("Window(size=3)"),
        Sample("Window(size=(2, 4), shift=(1, 2))"),
        Sample("Window(size=2, shift=1, table=False, dwc=3)"),
    ),
    "PVT": (Sample("PVT()", BETWEEN), Sample("PVT(ratio=3)", BETWEEN), Sample("PVT(pool=1)", BETWEEN)),
    "DAT": (Sample("DAT(stride=2, kernel=3)", BETWEEN), Sample("DAT(groups=2, reach=2.0)", BETWEEN)),
    "MoBA": (Sample("MoBA(block=(2, 3), k=2)", GATHER), Sample("MoBA(block=5, k=2, own=False, dwc=3)", GATHER)),
    "NSA": (Sample("NSA(block=(2, 3), k=2)", GATHER), Sample("NSA(block=5, k=2, window=5, group=2, dwc=3)", GATHER)),
    "Reformer": (Sample("Reformer(chunk=5, rounds=3)"), Sample('Reformer(chunk=3, rounds=2, duplicates="every")')),
    "ViT3": (Sample("ViT3()"), Sample('ViT3(inner="linear", local=False, clip=False)')),
}


def samples() -> list[Sample]:
    """The samples of all mechanisms that the package has."""
    return [sample for cls in MIXERS for sample in SAMPLES.get(cls.__name__, ())]


def pairs() -> list[Sample]:
    """Every mechanism on heads with every projection but the linear one and linear keys, which the samples have."""
    found = []
    for cls in MIXERS:
        sample = next(iter(SAMPLES.get(cls.__name__, ())), None)
        if sample is None or not hasattr(sample.config, "projection"):
            continue
        inside = sample.text.removesuffix(")") + ("" if sample.text.endswith("()") else ", ")
        for projection in PROJECTIONS:
            if projection.__name__ not in ("LinearQKV", "IdentityQuery"):
                found.append(Sample(f"{inside}projection={projection.__name__}())", sample.options))
    return found
