"""Task: the interface between a problem and the training loop."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import Extra, MixerConfig

if TYPE_CHECKING:
    from typing import Self


@runtime_checkable
class Training(Protocol):
    """The fields of a recipe that a task reads; see `regard.train.recipe.Recipe`."""

    @property
    def batch(self) -> int: ...
    @property
    def augment(self) -> str: ...
    @property
    def smoothing(self) -> float: ...
    @property
    def mixup(self) -> float: ...
    @property
    def cutmix(self) -> float: ...
    @property
    def erasing(self) -> float: ...


@dataclass(frozen=True)
class Score:
    """metrics by name, accuracies in percent; right: for each test image whether its class was correct, or None."""

    metrics: dict[str, float]
    right: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A problem on a data set, with a host model.

    host: a name or a spelling with options, "vit_tiny_patch16_224(patch_size=4)". data: the name of a data set, or a
    path of the user's own data. size: (height, width) of images. extra: the user's own models and ports that `host` may
    name; not part of a run's key. metric: the main one; larger is better.
    """

    metric: ClassVar[str]
    revision: ClassVar[int] = 1

    host: str
    data: str
    size: tuple[int, int]
    extra: Extra = field(default=(), compare=False, repr=False, metadata={"spelled": False})

    def on(self, data: str) -> "Self":
        """The same task on other data."""
        return dataclasses.replace(self, data=data)

    @abstractmethod
    def identity(self) -> "Self":
        """The task as it is in a run's key: without paths, and without fields that do not change the result."""

    @abstractmethod
    def model(self, mixer: MixerConfig | None, seed: int, removed: bool = False) -> nn.Module:
        """The model with its initial weights, a pure function of the arguments. removed: without attention."""

    @abstractmethod
    def built(
        self, mixer: MixerConfig | None, outputs: int, channels: int, removed: bool = False, *, pretrained: bool = True
    ) -> nn.Module:
        """The host with these numbers of outputs and input channels, for images of `size` if it has such an option.

        Needs no data. pretrained: False ignores the pretrained weights that the host's spelling names.
        """

    @abstractmethod
    def batches_per_epoch(self, recipe: Training) -> int:
        """Number of training batches in an epoch."""

    @abstractmethod
    def batches(
        self, recipe: Training, seed: int, start: int, stop: int, workers: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Any]:
        """Training batches start .. stop-1 of the whole run: pure functions of (seed, number of the batch).

        part: (index, count) of equal parts of each batch, of which only this one is returned.
        """

    @abstractmethod
    def loss(
        self, model: nn.Module, batch: Any, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """The mean loss of a batch; may use the global random generators, which the loop has seeded for this step.

        teacher: a model in evaluation mode whose predictions are learned too, or None.
        """

    @abstractmethod
    def score(self, model: nn.Module, device: torch.device) -> Score:
        """Evaluate on the test split; leaves the model in evaluation mode."""

    @abstractmethod
    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Mapping[str, Any]) -> Score:
        """Evaluate on the test split of other data. record: what `record()` returned when the model was trained.

        Raises: DataError if the data do not fit the model.
        """

    @property
    @abstractmethod
    def chance(self) -> float:
        """The main metric of always predicting the most frequent class."""

    @abstractmethod
    def prepared(self, images: Tensor, device: torch.device, record: Mapping[str, Any] | None = None) -> Tensor:
        """uint8 images (n, C, h, w) as the model expects them: float32 on the device, normalised.

        record: as for `score_on`; None = the task's own data.
        """

    @abstractmethod
    def example(self) -> Tensor:
        """One prepared input (1, C, h, w) on the CPU, for counting operations."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """name, checksum, train and test (numbers of images), for the outcome. Raises: DataError."""
