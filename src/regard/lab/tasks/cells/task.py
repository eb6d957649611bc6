"""Cells: boards some of whose cells ask for a class, with any host whose tokens are the cells."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import ConfigError, DataError, MixerConfig
from regard.images.clips import frames_apart
from regard.images.feed import to_tensor
from regard.images.normalise import Statistics, normalise
from regard.images.order import Part, check_parts, part_of
from regard.lab.data import boards as board_sets
from regard.lab.data.boards import Boards, BoardSet
from regard.lab.data.catalog import folder_in_use
from regard.models.segmentation import CellScores, make_cell_scores, pixel_loss

from ..base import Record, Score, Training, Trial
from ..validation import ValidationPart
from ..weights import Init

_NORMAL: Statistics = ([0.1], [0.2])
"""About the mean and the deviation of pixels of all boards."""
_TOGETHER = 256
"""Boards in one forward pass of the test."""
_SOURCES = {
    "boards": "generated from REGARD_DATA/fashion_mnist",
    "digit_boards": "generated from scikit-learn's digits",
}


@dataclass(frozen=True, kw_only=True)
class Cells(ValidationPart):
    """A class for each asking cell of a board, with a host of one token a cell, of each frame.

    data: a set of boards, `regard.lab.data.boards`. init: as in `Classification`. split: that is evaluated, "test" or
    "val". limit: number of boards of an epoch and of the test, 0 = all. download: Fashion-MNIST if it is missing. val:
    above 0, the boards "val", which are reserved for it, are the validation part; training boards are always new.
    Raises: ConfigError.
    """

    name: ClassVar[str] = "cells"
    metric: ClassVar[str] = "cells"
    part_name: ClassVar[str] = "val"
    trivial: ClassVar[str] = "any class"
    unit: ClassVar[str] = "boards"
    example_data: ClassVar[str] = "digit_boards(ability=content)"
    sets: ClassVar[Mapping[str, str]] = {
        f"{name}(ability={ability})": f"{_SOURCES[name]}: {facts.needs}"
        for name in reversed(board_sets.NAMES)
        for ability, facts in board_sets.ABILITIES.items()
    }
    no_export: ClassVar[str] = "boards are generated, so there are no files to predict"

    init: Init = "zero"
    split: Literal["test", "val"] = "test"
    limit: int = 0
    download: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "data", str(board_sets.read_boards(self.data)))
        if self.limit < 0:
            raise ConfigError(f"limit is 0 or more, not {self.limit}")

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        name = board_sets.read_boards(data).ability if board_sets.is_boards(data) else "content"
        ability = board_sets.ABILITIES[name]
        epochs, frames = ability.epochs, ability.frames
        options = f"patch={board_sets.CELL}, dim=64, depth=3, heads=2"
        host = f"vit_desk({options})" if frames == 1 else f"vit_desk_video(frames={frames}, {options})"
        recipe = {"epochs": epochs, "batch": 64, "lr": 3e-3, "augment": "none", "smoothing": 0.0, "warmup": 1 / epochs}
        return {"task": {"host": host}, "recipe": recipe}

    @property
    def boards(self) -> BoardSet:
        """The set of boards."""
        return board_sets.read_boards(self.data)

    def check(self, recipe: Training) -> None:
        self.check_recipe(recipe, ("none",), without=("mixup", "cutmix", "erasing"))

    def identity(self) -> "Cells":
        same = dataclasses.replace(self, download=False, extra=())
        object.__setattr__(same, "data", self.boards.identity)  # a spelling that only keys have
        return same

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> CellScores:
        return self._build(mixer, removed)

    def _build(self, mixer: MixerConfig | None, removed: bool, pretrained: bool = True) -> CellScores:
        side, frames = self.boards.side, self.boards.frames
        made = make_cell_scores(
            self.host, mixer, classes=self.boards.classes, size=self.boards.size, frames=frames, removed=removed,
            pretrained=pretrained, extra=self.extra,
        )  # fmt: skip
        with torch.no_grad():
            grid = made(self._noise(1)).shape[-2:]
        if tuple(grid) != (frames * side, side):
            of_frames = f" in each of {frames} frames" if frames > 1 else ""
            raise ConfigError(
                f"{self.host} has {grid[0]}x{grid[1]} tokens for a board of {side}x{side} "
                f"cells{of_frames}; use a host with patches of {board_sets.CELL} pixels"
            )
        return made

    def _noise(self, n: int) -> Tensor:
        data = self.boards
        return torch.randn(n, 1, *((data.frames,) if data.frames > 1 else ()), *data.size)

    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        """As in `Task`; the number of classes is that of the boards."""
        model, data = self._build(mixer, removed, pretrained=False), self.boards

        def forward(n: int) -> Tensor:
            return model(self._noise(n))

        def loss(n: int) -> Tensor:
            answers = torch.randint(0, data.classes, (n, data.frames * data.side, data.side), dtype=torch.uint8)
            return pixel_loss(forward(n), answers)

        return Trial(model, (self._noise(1),), loss, forward)

    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> "BoardBatches":
        check_parts(self.sample_counts()[0], recipe.batch, part)
        return BoardBatches(self, min(recipe.batch, self.sample_counts()[0]), seed, part)

    def loss(
        self, model: nn.Module, batch: Boards, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """Cross-entropy of the cells that ask."""
        scores = model(self.prepare(to_tensor(batch.images), device))
        return pixel_loss(scores, torch.from_numpy(batch.answers).to(device), recipe.smoothing)

    def prepare(self, images: Tensor, device: torch.device, record: Record | None = None) -> Tensor:
        frames = self.boards.frames
        mean, deviation = ([*part] * frames for part in _NORMAL)
        made = normalise(images, (mean, deviation), device)
        return made if frames == 1 else frames_apart(made, frames)

    def score(self, model: nn.Module, device: torch.device) -> Score:
        model.eval()
        number, shares = self.sample_counts()[1], list[np.ndarray]()
        for start in range(0, number, _TOGETHER):
            made = self._evaluated_boards(start, min(start + _TOGETHER, number))
            with torch.inference_mode():
                scores = model(self.prepare(to_tensor(made.images), device))
            right = (scores.argmax(1).cpu().numpy() == made.answers) & (made.answers != board_sets.NOTHING)
            shares.append(100 * right.sum((1, 2)) / self.boards.asking)
        samples = np.concatenate(shares)
        return Score({self.metric: float(samples.mean())}, samples)

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """Score on other boards of the same size and number of classes. Raises: DataError."""
        other = self.on(data)
        facts = [(made.classes, made.side, made.frames) for made in (other.boards, self.boards)]
        if facts[0] != facts[1]:
            told = ["{} classes and {} cells a side, frames: {}".format(*fact) for fact in facts]
            raise DataError(
                f"{other.data} has {told[0]}; the run's {self.data} has {told[1]}; they have to be the same"
            )
        return other.score(model, device)

    @property
    def chance(self) -> float:
        """The answers of each class are equally frequent."""
        return 100 / self.boards.classes

    def example(self) -> tuple[Tensor]:
        made = self._evaluated_boards(0, 1)
        return (self.prepare(to_tensor(made.images), torch.device("cpu")),)

    def _evaluated_boards(self, start: int, stop: int) -> Boards:
        return _read_boards(self.boards, self.split, start, stop, self.download, folder_in_use())

    def sample_counts(self) -> tuple[int, int]:
        limit = self.limit or board_sets.EPOCH  # more than are tested
        return min(limit, board_sets.EPOCH), min(limit, board_sets.TESTED)

    def record(self) -> dict[str, Any]:
        """As in `Task`, and: normal, mean and deviation of the normalisation. train: boards of an epoch."""
        train, test = self.sample_counts()
        board_sets.check_images(self.boards, ("train", self.split, *(("val",) if self.val else ())), self.download)
        total, normal = board_sets.checksum(self.boards, self.download), [list(part) for part in _NORMAL]
        return {"name": self.data, "checksum": total, "train": train, "test": test, "normal": normal}


@dataclass(frozen=True)
class BoardBatches:
    """Training batches of boards; each is generated when it is needed. batch: boards in one, at most an epoch's."""

    task: Cells
    batch: int
    seed: int
    part: Part

    @property
    def per_epoch(self) -> int:
        return self.task.sample_counts()[0] // self.batch

    def between(self, start: int, stop: int, workers: int = 0) -> Iterator[Boards]:
        own = part_of(self.batch, self.part)
        for first in range(start * self.batch, stop * self.batch, self.batch):
            rows = first + own.start, first + own.stop
            yield board_sets.boards(self.task.boards, "train", self.seed, *rows, self.task.download)


@lru_cache(maxsize=8)
def _read_boards(data: BoardSet, split: str, start: int, stop: int, download: bool, folder: str) -> Boards:
    """Boards of the evaluated split, which is read several times in a run."""
    return board_sets.boards(data, split, 0, start, stop, download)
