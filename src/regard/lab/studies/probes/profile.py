"""Profiles of mechanisms over the abilities: scores of finished runs beside those of controls. Needs no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from regard.core import ConfigError, StoreError

from .names import AVERAGE, BASELINE, NONE

Scores = Mapping[str, Mapping[str, Sequence[float]]]
"""Row -> ability -> the score of each seed, in percent."""
CONTROLS_FILE = Path(__file__).with_name("controls.json")
CLEAR = 10.0
"""Points between softmax attention and the better control, below which an ability has no profile."""


@dataclass(frozen=True)
class Cell:
    """A mechanism and an ability. mean: of the seeds that learned, of all where none did. learned, n: seeds that passed
    the middle between softmax attention and the better control, and all. share: (mean - control) / (softmax - control).

    None: learned and share without controls, mean without a finished run.
    """

    mean: float | None
    n: int
    learned: int | None = None
    share: float | None = None

    @property
    def mixed(self) -> bool:
        """Whether only some seeds learned."""
        return self.learned is not None and 0 < self.learned < self.n

    def __str__(self) -> str:
        """ "92.1", or "85.4 (1 of 2)" where only some seeds learned; the mean is of these."""
        if self.mean is None:
            return ""
        return f"{self.mean:.1f}" + (f" ({self.learned} of {self.n})" if self.mixed else "")


def profile_cell(values: Sequence[float], baseline: Sequence[float], controls: Sequence[Sequence[float]]) -> Cell:
    """The cell of one mechanism and ability. baseline, controls: scores of softmax attention and of each control."""
    if not values:
        return Cell(None, 0)
    floors = [fmean(scores) for scores in controls if scores]
    if not baseline or not floors:
        return Cell(fmean(values), len(values))
    floor, ceiling = max(floors), fmean(baseline)
    if ceiling - floor < CLEAR:
        return Cell(fmean(values), len(values))
    learned = [value for value in values if value > (floor + ceiling) / 2]
    mean = fmean(learned or values)
    return Cell(mean, len(values), len(learned), (mean - floor) / (ceiling - floor))


def profiles(scores: Scores, controls: Scores, abilities: Sequence[str]) -> dict[str, dict[str, Cell]]:
    """The cell of every row of `scores` and every ability."""

    def of(row: str, ability: str) -> Sequence[float]:
        return controls.get(row, {}).get(ability, ())

    return {
        row: {
            ability: profile_cell(
                values.get(ability, ()), of(BASELINE, ability), [of(AVERAGE, ability), of(NONE, ability)]
            )
            for ability in abilities
        }
        for row, values in scores.items()
    }  # fmt: skip


def shipped_controls(boards: str, protocol: str, file: Path = CONTROLS_FILE) -> dict[str, dict[str, list[float]]]:
    """The scores of the controls that come with the package.

    boards: "boards" or "digit_boards". protocol: of this version (`regard.lab.studies.probes.study.protocol`).
    Raises: ConfigError if they were trained under another protocol; StoreError if the file is damaged.
    """
    try:
        table = json.loads(file.read_text(encoding="utf-8"))[boards]
        trained, scores = table["protocol"], table["scores"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{file} has no scores of the controls on {boards} ({error!r}); install regard again"
        ) from error
    if trained != protocol:
        raise ConfigError(
            f"the shipped scores of the controls on {boards} are of another protocol than this version's, so they "
            "cannot stand beside these; train the controls here: --train-controls"
        )
    return {
        row: {ability: list(map(float, values)) for ability, values in parts.items()} for row, parts in scores.items()
    }
