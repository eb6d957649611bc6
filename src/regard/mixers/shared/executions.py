"""Which execution "auto" takes: one table for all mechanisms that have several.

Executions have the same result and different speed and memory. The thresholds come from the measurements in
benchmarks/README.md; what decides is the same in eager and in compiled code, so that a graph depends on no file.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from regard.core import ConfigError
from regard.core.tensors import is_open


class Situation(NamedTuple):
    """What decides. tokens, keys: N and M. m, top: experts of a head, and keys of each; 0 where there are none.

    facts: what else rules and kernels depend on, such as "native": a compiled kernel can run. trains: whether
    gradients are needed.
    """

    device: torch.device
    dtype: torch.dtype
    tokens: int
    keys: int
    m: int = 0
    top: int = 0
    trains: bool = False
    facts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rule:
    """An execution, when it runs (a phrase for the documentation), and the same as a condition."""

    execution: str
    when: str
    holds: Callable[[Situation], object]


SMALL = 128 * 128
"""Logits of a head up to which computing all of them is faster than sorting queries (benchmarks/mita.py --choice)."""


def _always(_: Situation) -> bool:
    return True


def _small(s: Situation) -> bool:
    return "few" in s.facts or (not is_open(s.tokens, s.keys) and s.tokens * s.keys <= SMALL)


def _few(s: Situation) -> bool:
    return s.keys > 1024 and s.keys > 64 * s.top


_FEW = "for at most 128 x 128 logits, and on CUDA for at most 2^24 of all heads and images"
_HALVES = (torch.bfloat16, torch.float16)
_GROUPED = Rule("grouped", "elsewhere", _always)
_TRITON = Rule(
    "triton", "on CUDA in half precision for at least 4,096 keys, one expert a query, a bias that is not trained",
    lambda s: "triton" in s.facts and s.dtype in _HALVES and s.keys >= 4096,  # benchmarks/gpu.py
)  # fmt: skip
_NATIVE = "on the CPU with compiled kernels, outside `torch.export` and function transforms such as `vmap`"

LINEAR, TILED = "Linear, FLatten, PolaFormer, MHLA, InLine, Performer", "Window, Neighbourhood"

RULES: dict[str, tuple[Rule, ...]] = {
    "MiTA": (
        Rule("native", f"{_NATIVE}, a bias that is not trained, no union of experts", lambda s: "native" in s.facts),
        Rule("dense", f"for the union of several experts, {_FEW}", lambda s: "union" in s.facts or _small(s)),
        _TRITON, _GROUPED,
    ),
    "MoBA, NSA": (
        Rule("dense", _FEW, _small),
        dataclasses.replace(_TRITON, when="on CUDA in half precision for at least 4,096 keys"), _GROUPED,
    ),
    "NSA's window": (
        Rule("gather", "if there are more than 32 cells for each of the window", lambda s: s.tokens > 32 * s.top),
        Rule("dense", "elsewhere", _always),
    ),
    "BRA": (Rule("regions", "always", _always),),
    "TopK": (
        Rule("native", f"{_NATIVE}, no mask, no indexer of Spark", lambda s: "native" in s.facts),
        Rule("gather", "for more than 1,024 keys, of which fewer than 1 in 64 is chosen", _few),
        Rule("dense", "elsewhere", _always),
    ),
    "Factors": (
        Rule(
            "compressed", "with E1, with a mask, or with E2 in a window of at most a quarter of the keys",
            lambda s: s.facts & {"content", "mask", "tiles"},
        ),
        Rule("factorised", "without E2", lambda s: "per query" not in s.facts),
        Rule("factorised", "in eager mode on the CPU, for more than 400 queries that fit", lambda s: "fits" in s.facts),
        Rule("compressed", "elsewhere", _always),
    ),
    LINEAR: (Rule("products", "always; the Triton kernel where it is named", _always),),
    TILED: (Rule("tiles", "always; the Triton kernel where it is named", _always),),
    "DeformableConv": (
        Rule("torchvision", "on CUDA", lambda s: s.device.type == "cuda"),
        Rule("native", _NATIVE, lambda s: "native" in s.facts),
        Rule("eager", "elsewhere", _always),
    ),
}  # fmt: skip
"""By mechanism: the first rule that holds is taken. Their other executions run where they are named only."""


def choose(mechanism: str, execution: str, situation: Situation) -> str:
    """The execution: the named one; for "auto" that of the first rule of the mechanism in `RULES` that holds."""
    if execution != "auto":
        return execution
    return next(rule.execution for rule in RULES[mechanism] if rule.holds(situation))


def true_facts(facts: Mapping[str, object]) -> frozenset[str]:
    """The facts of a `Situation` that hold."""
    return frozenset(name for name, holds in facts.items() if holds)


def check_execution(execution: str, names: Sequence[str]) -> None:
    """Raises: ConfigError unless execution is "auto" or one of the names."""
    if execution not in ("auto", *names):
        raise ConfigError(f"execution is auto, {', '.join(names[:-1])} or {names[-1]}, not {execution!r}")


def trains(*tensors: torch.Tensor | None) -> bool:
    """Whether a pass over these tensors keeps what their gradients need."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
