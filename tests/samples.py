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

# mechanism -> its samples
SAMPLES: dict[str, tuple[Sample, ...]] = {
    "Softmax": (
        Sample("Softmax()", ANYWHERE),
        Sample("Softmax(scale=0.7, dwc=3, gate=True)"),
    ),
    "SKA": (Sample("SKA()"), Sample("SKA(scale=1.0, dwc=5)")),
    "XCA": (Sample("XCA()", ANYWHERE),),
    "MiTA": (
        Sample("MiTA(m=4, k=5)", GATHER),
        Sample("MiTA(m=4, k=3, experts=2, dwc=3)", GATHER),
        Sample('MiTA(m=(1, 2), k=4, branches="route", landmarks="avg1d")', GATHER),
        Sample('MiTA(m=4, branches="compress", preset="official")', GATHER),
    ),
    "Factors": (
        Sample("Factors()"),
        Sample('Factors(terms="0110")'),
        Sample('Factors(terms="0000")', ANYWHERE),
    ),
}


def samples() -> list[Sample]:
    """The samples of all mechanisms that the package has."""
    return [sample for cls in MIXERS for sample in SAMPLES.get(cls.__name__, ())]


def pairs() -> list[Sample]:
    """Every mechanism on heads with every projection but the linear one, which the samples have."""
    found = []
    for cls in MIXERS:
        sample = next(iter(SAMPLES.get(cls.__name__, ())), None)
        if sample is None or not hasattr(sample.config, "projection"):
            continue
        inside = sample.text.removesuffix(")") + ("" if sample.text.endswith("()") else ", ")
        for projection in PROJECTIONS:
            if projection.__name__ != "LinearQKV":
                found.append(Sample(f"{inside}projection={projection.__name__}())", sample.options))
    return found
