"""Training batches of a stream: images, order and augmentation depend on (seed, epoch, step) only.

The shards of an epoch stand in an order of (seed, epoch), and this row of images is cut into lanes of equal length.
Each batch takes equally many images from every lane. Within a shard, blocks of consecutive images are mixed by (seed,
epoch, shard). So a lane needs nothing but its own shards: processes and their workers divide the lanes, and a run
continues at the shards where it stopped.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from regard.core import DataError, DeviceError
from regard.images.augment import augment_batch
from regard.images.feed import iterate, to_tensor
from regard.images.images import Images, decode
from regard.images.order import Part, batches_in_epoch, part_of
from regard.images.streams import generator, seed_all

from .shards import Sample, Shards

LANES = 64
"""The largest number of lanes, a power of two."""
MIXED = 4096
"""Images in the blocks of all lanes together; they are held while they are encoded."""
Row = tuple[int, Sample]
"""Number of an image in the split, and the image."""


class Unread:
    """Stands where an array of this shape would be: what is read in order cannot be indexed."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __getitem__(self, rows: object) -> np.ndarray:
        raise DataError("a stream is read in order and has no single training images; give a folder for this")


@dataclass(frozen=True, eq=False)
class Stream(Images):
    """A training split that is read in order: neither its pixels nor its labels can be indexed.

    classes: their number; a label has to be below it.
    """

    labels: Any
    shards: Shards
    classes: int

    @classmethod
    def of(cls, shards: Shards, classes: int, size: tuple[int, int]) -> "Stream":
        """The images of shards, resized to `size` = (height, width) where no transform does it."""
        number = shards.images
        return cls(Unread(number, *size, 3), Unread(number), shards, classes)

    def __len__(self) -> int:
        return self.shards.images

    def take(self, rows: object) -> "Stream":
        return self.pixels[rows]


@dataclass(frozen=True, eq=False)
class StreamBatches:
    """Batches of a run, as `feed.Batches` has them: images (n, C, h, w) uint8, or float32 of a transform, labels (n,).

    size: (height, width) of a batch's images. batch: images in a batch. transform: of single Pillow images, or None.
    part: of each batch, this one is read.
    """

    stream: Stream
    size: tuple[int, int]
    batch: int
    augment: str
    seed: int
    transform: Callable | None = None
    part: Part = (0, 1)

    def __post_init__(self) -> None:
        if self.lanes % self.part[1]:
            raise DeviceError(
                f"batches of {self._rows} images of this stream have {self.lanes} lanes, which {self.part[1]} "
                "processes cannot divide equally; use a power of two of processes, at most as many as lanes"
            )

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return batches_in_epoch(len(self.stream), self.batch)

    @property
    def lanes(self) -> int:
        """The largest power of two up to `LANES` that divides a batch and is at most the number of shards."""
        most = 2 ** int(math.log2(min(LANES, len(self.stream.shards))))
        return math.gcd(self._rows, most)

    @property
    def _rows(self) -> int:
        return min(self.batch, len(self.stream))

    @property
    def _taken(self) -> int:
        """Images of a batch from one lane."""
        return self._rows // self.lanes

    def between(self, start: int, stop: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches start .. stop-1, read by at most `workers` processes, or by this one if 0.

        The number of processes is cut to a divisor of this part's lanes. Raises: DataError.
        """
        lanes = range(self.lanes)[part_of(self.lanes, self.part)]
        workers = max((number for number in range(1, workers + 1) if len(lanes) % number == 0), default=0)
        if self.part[0] == 0 and (start == 0 or start % self.per_epoch):
            print(self.note(start), file=sys.stderr, flush=True)
        loader = DataLoader(_Chunks(self, lanes, start, stop), batch_size=None, num_workers=workers)
        chunks = iterate(loader)
        for _ in range(start, stop):
            images, labels = zip(*islice(chunks, max(workers, 1)), strict=True)
            yield torch.cat(images), torch.cat(labels)

    def note(self, start: int) -> str:
        """What is read in order, and what reading on at a batch repeats."""
        shards = self.stream.shards
        text = f"a stream of {shards.images} images in {len(shards)} shards: order by (seed, epoch, shard)"
        epoch, index = divmod(start, self.per_epoch)
        if not index:
            return text
        row = self._shards_of(epoch)
        again = sum(row.place(self._span(lane, index)[0])[1] for lane in range(self.lanes))
        return f"{text}; epoch {epoch + 1} continues at its shards, up to {again} images are read again"

    def _shards_of(self, epoch: int) -> "_Shuffled":
        return _Shuffled(self.stream.shards, self.seed, epoch, max(MIXED // self.lanes, 1))

    def _span(self, lane: int, index: int) -> tuple[int, int]:
        """First and last place, in the row of an epoch's images, of what a lane gives from batch `index` on."""
        length = self.per_epoch * self._taken
        return lane * length + index * self._taken, (lane + 1) * length

    def chunks(self, lane: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A lane's images and labels of batches start .. stop-1. Raises: DataError."""
        rows: Iterator[Row] = iter(())
        for step in range(start, stop):
            epoch, index = divmod(step, self.per_epoch)
            if step == start or index == 0:
                rows = self._shards_of(epoch).rows(*self._span(lane, index))
            found = list(islice(rows, self._taken))
            yield self._images(found, lane, step), torch.tensor([label for _, (_, _, label) in found])

    def _images(self, rows: list[Row], lane: int, step: int) -> Tensor:
        epoch = step // self.per_epoch
        if self.transform is not None:
            return torch.stack([self._transform_row(row, epoch) for row in rows])
        height, width = self.stream.pixels.shape[1:3]
        pixels = np.stack([self._decode_row(row, (height, width)) for row in rows])
        rng = generator("augment", self.seed, epoch, step, lane)
        return to_tensor(augment_batch(pixels, self.size, self.augment, False, rng))

    def _transform_row(self, row: Row, epoch: int) -> Tensor:
        pixels = self._decode_row(row, None)
        seed_all("sample", self.seed, epoch, row[0])
        return self.transform(Image.fromarray(pixels))  # type: ignore[misc]

    def _decode_row(self, row: Row, size: tuple[int, int] | None) -> np.ndarray:
        number, (name, image, label) = row
        if not 0 <= label < self.stream.classes:
            raise DataError(f"{self._full(number, name)} has label {label}, outside 0..{self.stream.classes - 1}")
        try:
            return decode(image, size, 3)
        except Exception as error:  # Pillow raises various errors for a damaged file
            text = f"{self._full(number, name)} cannot be read as an image ({error}); write the shard again"
            raise DataError(text) from error

    def _full(self, number: int, name: str) -> str:
        shards = self.stream.shards
        return f"{name} in {shards.name(int(np.searchsorted(np.cumsum(shards.counts), number, side='right')))}"


class _Chunks(IterableDataset):
    """For each batch the images of some lanes; each worker process reads equally many of these lanes."""

    def __init__(self, batches: StreamBatches, lanes: range, start: int, stop: int) -> None:
        self.batches, self.lanes, self.start, self.stop = batches, lanes, start, stop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        lanes = self.lanes if worker is None else self.lanes[part_of(len(self.lanes), (worker.id, worker.num_workers))]
        for parts in zip(*(self.batches.chunks(lane, self.start, self.stop) for lane in lanes), strict=True):
            images, labels = zip(*parts, strict=True)
            yield torch.cat(images), torch.cat(labels)


class _Shuffled:
    """The row of all images of an epoch: its shards one after another, the images of each mixed within blocks."""

    def __init__(self, shards: Shards, seed: int, epoch: int, block: int) -> None:
        self.shards, self.seed, self.epoch, self.block = shards, seed, epoch, block
        self.order = generator("shards", seed, epoch).permutation(len(shards))
        self.ends = np.cumsum(shards.counts[self.order])
        self.firsts = np.cumsum(shards.counts) - shards.counts

    def place(self, row: int) -> tuple[int, int]:
        """Of an image by its place in the row: the place of its shard, and its own place within the shard."""
        place = int(np.searchsorted(self.ends, row, side="right"))
        return place, row - int(self.ends[place] - self.shards.counts[self.order[place]])

    def rows(self, first: int, last: int) -> Iterator[Row]:
        """The images of places first .. last-1."""
        while first < last:
            place, start = self.place(first)
            end = min(last, int(self.ends[place]))
            yield from self._shuffle(int(self.order[place]), start, start + end - first)
            first = end

    def _shuffle(self, shard: int, first: int, last: int) -> Iterator[Row]:
        number, count = int(self.firsts[shard]), int(self.shards.counts[shard])
        start = first - first % self.block
        samples = self.shards.read(shard, start)
        for begin in range(start, last, self.block):
            rows = min(self.block, count - begin)
            block = list(islice(samples, rows + (begin + rows == count)))  # one more at the end, which checks the count
            order = generator("order", self.seed, self.epoch, shard, begin).permutation(len(block))
            for row in order[max(first - begin, 0) : last - begin].tolist():
                yield number + begin + row, block[row]
