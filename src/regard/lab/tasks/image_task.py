"""ImageTask: what tasks on images have in common, the image size and the normalisation."""

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from regard.core import ConfigError, DataError
from regard.files.data_record import names_digest
from regard.images.normalise import Statistics, is_pretrained, normalise, pretrained_statistics
from regard.images.streams import BY_NAME
from regard.models.sizes import size_of, with_size

from .base import Record, Task
from .class_scores import check_classes

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """A task on images of `size` = (height, width).

    digest: what the key of a run takes of the user's own images, "bytes" or "index" (`regard.images.digest`); "" =
    all bytes, up to 20 GB. mean, std: with which images are normalised, for each channel, of pixels between 0 and 1;
    () = those of the host's published weights, or of the training images. Data of another number of channels have
    their own. Raises: ConfigError.
    """

    size: tuple[int, int]
    digest: Literal["", "bytes", "index"] = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.size) < 1:
            raise ConfigError(f"size is (height, width) in pixels, at least 1 each, not {self.size}")
        if len(self.mean) != len(self.std) or any(not value > 0 for value in self.std):
            raise ConfigError(
                f"mean and std have a number for each channel, std above 0; not {self.mean} and {self.std}"
            )

    def in_host(self, host: str, size: tuple[int, int] | None = None) -> "Self":
        """As in `Task`; a host without a size gets its own default size."""
        size = size or size_of(host, self.extra)
        return dataclasses.replace(self, host=with_size(host, size, self.extra), size=size)

    @abstractmethod
    def data_set(self) -> Any:
        """The data, with name, checksum, classes and channels. Raises: DataError."""

    @property
    def channels(self) -> int:
        """Channels of the data's images. Raises: DataError."""
        return int(self.data_set().channels)

    @abstractmethod
    def own_statistics(self) -> Statistics:
        """Mean and standard deviation per channel of training images, of pixels between 0 and 1. Raises: DataError."""

    def statistics(self, record: Record | None = None) -> Statistics:
        """Mean and standard deviation per channel, of pixels between 0 and 1, for the normalisation of images.

        Those of the record, else `mean` and `std`; without them a pretrained host gets the values of its weights
        (averaged for grey images), all others `own_statistics`.
        """
        if record is not None:
            return record["normal"][0], record["normal"][1]
        if self.mean and len(self.mean) == self.channels:
            return list(self.mean), list(self.std)
        if is_pretrained(self.host):
            return pretrained_statistics(self.host, self.channels, tuple(self.extra))
        return self.own_statistics()

    def prepare(self, images: Tensor, device: torch.device, record: Record | None = None) -> Tensor:
        """As in `Task`, normalised with `statistics`."""
        return normalise(images, self.statistics(record), device)

    def record_of(self, train: int, test: int) -> dict[str, Any]:
        """The record of a task with these numbers of images: as in `Task`, and class_names, `classes`, a digest of
        them, and normal, mean and deviation of the normalisation."""
        found = self.data_set()
        counts = {"name": found.name, "checksum": found.checksum, "train": train, "test": test}
        normal = [list(part) for part in self.statistics()]
        return {**counts, "classes": names_digest(found.classes), "normal": normal, "class_names": list(found.classes)}

    def check_fits(self, data: str, found: Any, record: Record) -> None:
        """Raises: DataError if the classes or the channels of a data set are not those of the training data."""
        check_classes(data, found.classes, record["class_names"])
        if found.channels != len(record["normal"][0]):
            raise DataError(f"the run takes images of {len(record['normal'][0])} channels, {data} has {found.channels}")


def same_data(trained: str, data: str) -> bool:
    """Whether two paths name the data that a run was trained on."""
    return Path(data).resolve() == Path(trained).resolve()


def is_copy(found: Any, record: Record) -> bool:
    """Whether the user's own boxes or masks, read undivided, are a copy of those of a training."""
    divided = BY_NAME if len(found.splits) == 1 else ""
    return bool(record.get("name") == found.name.replace("own:", f"own:{divided}", 1))
