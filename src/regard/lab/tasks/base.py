"""Task: the interface between a problem and the training loop.

Training, evaluation, results, studies and reports know this interface only. A task is a folder beside this file with
its data, its loss, its score, its pictures and its networks.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import ConfigError, Extra, MixerConfig, UnsupportedError
from regard.core.validation import check_fields
from regard.files.paths import files_below
from regard.images.images import SUFFIXES
from regard.images.order import Part
from regard.lab.data.streamed.names import is_stream

from .weights import check_removed, host_seed, redraw

if TYPE_CHECKING:
    from typing import Self

    from PIL.Image import Image


Record = Mapping[str, Any]
"""What `Task.record` returned when a model was trained."""
Samples = tuple[Tensor, Tensor]
"""A batch of inputs and their labels."""
Prediction = dict[str, Any]
"""As data for JSON."""


@runtime_checkable
class Training(Protocol):
    """The fields of a recipe that a task reads; see `regard.lab.train.recipe.Recipe`."""

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
    @property
    def precision(self) -> str: ...


@runtime_checkable
class Feed(Protocol):
    """The training batches of a run, pure functions of (seed, number of the batch)."""

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch."""
        ...

    def between(self, start: int, stop: int, workers: int = 0) -> Iterator[Any]:
        """Batches start .. stop-1, loaded by so many processes, or by this one if 0."""
        ...


@dataclass(frozen=True)
class Score:
    """The result on a test split.

    metrics: by name, shares in percent: the task's `metric` and its `further` ones. samples: for each test sample
    (image, sentence) what it contributes to the main metric, shape (n,): a bool for right or wrong, else a float whose
    mean over the samples is the metric (`regard.lab.tasks.jackknife` for metrics that are no mean); None = not known.
    details: further numbers by name, such as "iou/sky".
    """

    metrics: dict[str, float]
    samples: np.ndarray | None = None
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """A task's model with random inputs instead of data, to count operations and to time steps.

    inputs: the arguments of the model for one sample. loss: the mean training loss of n random samples. forward: the
    model's prediction for n random samples.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[int], Tensor]
    forward: Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A problem on a data set, with a host model.

    The fields of every task:

    - host: a name or a spelling with options, "vit_tiny_patch16_224(patch_size=4)".
    - data: the name of a data set, or a path of the user's own data.
    - extra: the user's own models and ports that `host` may name; not part of a run's key.

    What a class says about all of its tasks:

    - name: that of `--task`.
    - metric: the main one, of which more is better; further: the others of every evaluation.
    - trivial: the answer whose metric is `chance`, as a noun.
    - unit: what one sample is, in the plural.
    - example_data: a small set that every machine has.
    - sets: the named data sets, and where each comes from; a folder of such a name is written with its path.
    - no_export: why a model cannot become an ONNX file; "" if it can.
    - takes_text: whether `predict` takes texts besides files.
    - model_fields: fields that shape the model, which fine-tuning on other data keeps.
    - reads_streams: whether `data` may be a stream (`regard.lab.data.streamed`).

    A model is called by its forward pass only. Where training needs more than the prediction, the model takes the
    targets as further arguments and returns what the loss needs; without them it returns predictions.
    Subclasses with a `__post_init__` call this one first.
    Raises: ConfigError for a field whose value its annotation does not allow.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    further: ClassVar[tuple[str, ...]] = ()
    example_data: ClassVar[str]
    trivial: ClassVar[str] = "the most frequent class"
    unit: ClassVar[str] = "images"
    sets: ClassVar[Mapping[str, str]] = {}
    no_export: ClassVar[str] = ""
    takes_text: ClassVar[bool] = False
    model_fields: ClassVar[tuple[str, ...]] = ()
    reads_streams: ClassVar[bool] = False
    revision: ClassVar[int] = 1

    host: str
    data: str
    extra: Extra = field(default=(), compare=False, repr=False, metadata={"spelled": False})

    def __post_init__(self) -> None:
        check_fields(self)
        if is_stream(self.data) and not self.reads_streams:
            raise ConfigError(f"--task {self.name} does not read streams ({self.data}): give a folder of files")

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        """Fields of "task" and "recipe" that the command line sets for these data unless the user sets them."""
        return {}

    def on(self, data: str) -> "Self":
        """The same task on other data."""
        return dataclasses.replace(self, data=data)

    def in_host(self, host: str, size: tuple[int, int] | None = None) -> "Self":
        """The same task in another host, for images of `size` = (height, width). Raises: ConfigError."""
        if size is not None:
            raise ConfigError(f"--task {self.name} has no image size")
        return dataclasses.replace(self, host=host)

    @abstractmethod
    def identity(self) -> "Self":
        """The task as it is in a run's key: without paths, and without fields that do not change the result."""

    def check(self, recipe: Training) -> None:
        """Refuse what this task cannot do. Raises: ConfigError, which names the field of the recipe."""
        return

    def validation(self) -> "Self | None":
        """The same task, scored on a part of the training samples that is not trained on; None without such a part."""
        return None

    def check_recipe(self, recipe: Training, augments: Sequence[str], without: Sequence[str]) -> None:
        """Raises: ConfigError for an augment that is not among these, or a field of `without` that is not 0."""
        if recipe.augment not in augments:
            raise ConfigError(f"augment of --task {self.name} is one of {', '.join(augments)}, not {recipe.augment!r}")
        for name in without:
            if getattr(recipe, name):
                raise ConfigError(f"--task {self.name} has no {name}: it must be 0, not {getattr(recipe, name)}")

    def model(
        self, mixer: MixerConfig | None, seed: int, removed: bool = False, record: Record | None = None
    ) -> nn.Module:
        """The model with its initial weights, a pure function of the arguments; see `network`.

        A task with a field `init` has it initialised by `regard.lab.tasks.weights.redraw`.
        """
        check_removed(mixer, removed)
        with host_seed(seed):
            model = self.network(mixer, removed, record)
            redraw(model, seed, getattr(self, "init", "host"))
        return model

    @abstractmethod
    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> nn.Module:
        """The host with the mechanism, as the host initialises it.

        removed: without attention. record: None = of the task's own data; what it holds (classes, channels, a
        vocabulary) is else not read from the data.
        """

    @abstractmethod
    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        """The model on random inputs; no data are read, and no published weights are loaded.

        outputs: number of classes, 0 = the task's own or that of the named data set. augment: applied to the inputs of
        `loss` where the task can, "" = none.
        """

    @abstractmethod
    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> Feed:
        """The training batches of the whole run.

        part: (index, count) of equal parts of each batch, of which only this one is returned.
        """

    def batches_per_epoch(self, recipe: Training) -> int:
        """Number of training batches in an epoch. Raises: ConfigError as `check`."""
        self.check(recipe)
        return self.feed(recipe, 0).per_epoch

    def batches(
        self, recipe: Training, seed: int, start: int, stop: int, workers: int = 0, part: Part = (0, 1)
    ) -> Iterator[Any]:
        """Training batches start .. stop-1 of the whole run, see `feed`. Raises: ConfigError as `check`."""
        self.check(recipe)
        return self.feed(recipe, seed, part).between(start, stop, workers)

    def usual_workers(self, recipe: Training) -> int:
        """Processes that load batches unless the user chooses their number; 0 where samples are ready in memory."""
        return 0

    @abstractmethod
    def loss(
        self, model: nn.Module, batch: Any, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """The mean loss of a batch; may use the global random generators, which the loop has seeded for this step.

        teacher: a model in evaluation mode whose predictions are learned too, or None.
        """

    def check_teacher(self, teacher: nn.Module, student: nn.Module) -> None:
        """Raises: ConfigError if the model cannot learn from this teacher; a task that uses one overrides this."""
        raise ConfigError(f"--task {self.name} cannot learn from a teacher")

    @abstractmethod
    def score(self, model: nn.Module, device: torch.device) -> Score:
        """Evaluate on the test split; leaves the model in evaluation mode."""

    @abstractmethod
    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """Evaluate on the test split of other data. Raises: DataError if the data do not fit the model."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The main metric of a trivial answer, which `trivial` names."""

    @abstractmethod
    def example(self) -> tuple[Any, ...]:
        """The arguments of the model for one prepared sample, on the CPU, for counting operations."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """name, checksum, train and test (numbers of samples), for the outcome. Raises: DataError."""

    def sample_counts(self) -> tuple[int, int]:
        """Numbers of (training, test) samples; a task may know them without reading the data. Raises: DataError."""
        record = self.record()
        return record["train"], record["test"]

    def prepare(self, images: Tensor, device: torch.device, record: Record | None = None) -> Tensor:
        """uint8 images (n, C, h, w) as the model expects them: float32 on the device, normalised.

        record: None = of the task's own data. Raises: UnsupportedError if inputs are not images.
        """
        raise UnsupportedError(f"--task {self.name} takes no images")

    def files_in(self, folder: Path) -> list[Path]:
        """The files, or folders, of a folder that `predict` takes one by one. Raises: DataError."""
        return files_below(folder, SUFFIXES)

    def predict(
        self, model: nn.Module, sources: Sequence[str | Path], device: torch.device, record: Record
    ) -> list[Prediction]:
        """One prediction for each source (file, or line of text), as data for JSON; the first entry is its name.

        Objects are in "objects", each with box (left, top, right, bottom in pixels), label, category, score and, if
        there is one, mask (COCO's compressed RLE).

        Raises: DataError; UnsupportedError.
        """
        raise UnsupportedError(f"--task {self.name} cannot predict single inputs")

    def draw(self, source: str | Path, prediction: Mapping[str, Any]) -> "Image":
        """A prediction of `predict` drawn on its input. Raises: UnsupportedError if it cannot be drawn."""
        raise UnsupportedError(f"predictions of --task {self.name} cannot be drawn")
