"""The goals of goals.toml beside measured ratios."""

import tomllib
from pathlib import Path


def goals(*path: str) -> dict[str, list[float]]:
    """A table of goals.toml by its name; empty if there is none."""
    table = tomllib.loads(Path(__file__).with_name("goals.toml").read_text())
    for name in path:
        table = table.get(name, {})
    return table


def verdict(ratios: list[float], goal: list[float] | None) -> str:
    """Each goal with "met" or "missed", or nothing without goals."""
    if goal is None:
        return ""
    return ", ".join(
        f"goal {limit}: {'met' if ratio <= limit else 'missed'}" for ratio, limit in zip(ratios, goal, strict=True)
    )
