"""The table of executions: what "auto" takes."""

import pytest
import torch

from regard.mixers.shared.executions import RULES, Situation, choose

CPU = torch.device("cpu")


def situation(tokens: int = 1024, *facts: str, **more: object) -> Situation:
    options: dict = {"device": CPU, "dtype": torch.float32, "keys": tokens, "m": 64, "top": 64} | more
    return Situation(tokens=tokens, facts=frozenset(facts), **options)


@pytest.mark.parametrize(
    ("mechanism", "case", "execution"),
    [
        ("MiTA", situation(1024, "native"), "native"),
        ("MiTA", situation(1024), "grouped"),
        ("MiTA", situation(128), "dense"),
        ("MiTA", situation(129), "grouped"),
        ("MiTA", situation(1024, "union"), "dense"),
        ("MiTA", situation(1024, "few", "triton", device=torch.device("cuda")), "dense"),
        ("MoBA, NSA", situation(1024), "grouped"),
        ("MoBA, NSA", situation(1024, "few", device=torch.device("cuda")), "dense"),
        ("MoBA, NSA", situation(100), "dense"),
        ("NSA's window", situation(1024, top=9), "gather"),
        ("NSA's window", situation(196, top=9), "dense"),
        ("BRA", situation(), "regions"),
        ("TopK", situation(4096, "native"), "native"),
        ("TopK", situation(4096, top=25), "gather"),
        ("TopK", situation(1024, top=8), "dense"),
        ("Factors", situation(4096, "content"), "compressed"),
        ("Factors", situation(4096, "per query", "fits"), "factorised"),
        ("Factors", situation(4096, "per query"), "compressed"),
        ("Factors", situation(4096), "factorised"),
        ("DeformableConv", situation(196, device=torch.device("cuda")), "torchvision"),
        ("DeformableConv", situation(196, "native"), "native"),
        ("DeformableConv", situation(196), "eager"),
    ],
)
def test_the_table(mechanism: str, case: Situation, execution: str) -> None:
    assert choose(mechanism, "auto", case) == execution
    assert choose(mechanism, "named", case) == "named"


def test_every_rule_of_the_table_can_be_reached() -> None:
    """The last rule of a mechanism always holds, and no other one does."""
    for rules in RULES.values():
        assert rules[-1].holds(situation(10**6))
        assert all(rule.when not in ("always", "elsewhere") for rule in rules[:-1])
